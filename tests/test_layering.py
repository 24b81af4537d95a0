"""The include rules of docs/design.md, section 2, read off the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "cgx_ops/csrc"

# Who may include whom, by folder. "" is the top: cgx.cc, communicator.*, engine.*, plan.cc and what
# else lies in no folder; plan.h describes a collective to algorithms and is a layer of its own, as
# is config.h, which is the table of what a call may say.
ALLOWED = {
    "base": {"base"},
    "kernel": {"base", "kernel"},
    "config.h": set(),
    "compressor": {"base", "kernel", "config.h", "compressor"},
    "transport": {"base", "transport"},
    "plan.h": {"base", "compressor"},
    "algorithm": {"base", "kernel", "compressor", "plan.h", "transport", "algorithm"},
    "device": {"base", "kernel", "compressor", "plan.h", "transport", "algorithm", "device"},
    "cuda": {"base", "kernel", "transport", "device", "cuda"},
    "": {
        "",
        "base",
        "kernel",
        "config.h",
        "compressor",
        "plan.h",
        "transport",
        "algorithm",
        "device",
    },
}
# Its enums and status codes are everybody's.
WAIST = {f"cgx/{header}.h" for header in ("cgx", "config", "status")}
# Helpers in C++ that bindings share.
SHARED = {"cgx/call_seeds.h", "cgx/completion_pool.h"}


def _sources(folder: Path = CORE) -> Iterator[tuple[Path, str]]:
    files = [f for f in folder.rglob("*") if f.suffix in {".h", ".cc", ".cu", ".cuh"}]
    assert files, f"no sources in {folder}"
    for file in files:
        yield file.relative_to(folder), _without_comments(file.read_text())


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _layer(path: str) -> str:
    return path.split("/")[0] if "/" in path or path in ALLOWED else ""


def test_includes_point_one_way() -> None:
    wrong = []
    for file, text in _sources():
        if file.parts[0] == "include":
            continue
        for included in re.findall(r'#include "([^"]+)"', text):
            target = file.parent / included
            path = str(target) if (CORE / target).exists() else included
            if path.removeprefix("include/") not in WAIST and (
                _layer(path) not in ALLOWED[_layer(str(file))]
            ):
                wrong.append(f"{file} includes {path}")
    assert not wrong


def test_every_layer_is_known() -> None:
    assert {_layer(str(file)) for file, _ in _sources()} - {"include"} == ALLOWED.keys()


def test_schedule_is_pure_arithmetic() -> None:
    for file, text in _sources():
        if file.name.startswith("schedule."):
            assert not re.search(r'#include "(transport|compressor|kernel)/', text), file


def _users(pattern: str) -> set[str]:
    return {str(file) for file, text in _sources() if re.search(pattern, text)}


def test_mpi_only_in_its_transport() -> None:
    users = _users(r"#include\s*[<\"]mpi(-ext)?\.h|\bMPI_[A-Z]\w+\s*\(")
    files = (
        "mpi.cc", "mpi_world.h", "mpi_post.h", "mpi_post.cc", "mpi_transport.cc", "mpi_messages.cc",
    )  # fmt: skip
    assert users == {f"transport/{name}" for name in files}


def test_environment_is_read_in_one_place() -> None:
    assert _users(r"\bgetenv\b|\benviron\b") == {"base/env.cc"}


def test_core_knows_no_python_and_no_framework() -> None:
    assert not _users(r"(?i)\b(python\w*|pybind11|nanobind|torch|c10d?|aten|jax|xla)\b")


def test_cuda_headers_stay_in_their_folders() -> None:
    assert not {f for f in _users(r"#include\s*<cuda|#include\s*<nccl") if "cuda/" not in f}


def test_bindings_see_the_waist_alone() -> None:
    for folder in ("cgx_ops/numpy_ops", "torch_ops", "xla_ffi"):
        own = {file.name for file, _ in _sources(ROOT / folder)}
        for file, text in _sources(ROOT / folder):
            included = set(re.findall(r'#include "([^"]+)"', text))
            foreign = {name for name in included if not name.startswith(("xla/", "torch/"))}
            assert foreign <= own | WAIST | SHARED, f"{folder}/{file}"


def test_python_faces_do_not_know_each_other() -> None:
    package = ROOT / "cgx_ops"
    rules = {"torch": r"jax", "jax": r"torch", ".": r"torch|jax"}
    for folder, forbidden in rules.items():
        files = list((package / folder).glob("*.py"))
        assert files, f"cgx_ops/{folder} is empty"
        for file in files:
            pattern = rf"^\s*(?:import|from) (?:{forbidden}|cgx_ops\.(?:{forbidden}))\b"
            assert not re.search(pattern, file.read_text(), re.MULTILINE), file


def test_private_names_of_torch_are_in_one_file() -> None:
    users = set()
    for file in (ROOT / "cgx_ops/torch").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            # torch.ops has operators, by the names that graphs show.
            if any(re.match(r"(?!torch\.ops)(torch|dist)\b.*\._(?!_)", name) for name in names):
                users.add(file.name)
    assert users == {"_compat.py"}


def test_one_file_knows_the_libraries_path() -> None:
    for file in (ROOT / "cgx_ops").rglob("*.py"):
        if file.name != "_native.py":
            assert not re.search(r"CDLL|\.so\b", file.read_text()), file
