"""The package: relocatable libraries that export only the API, in a complete wheel."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import cgx_ops
from cgx_ops._core import binary, library, structs, tables

ROOT = Path(__file__).parents[2]
PACKAGE = Path(cgx_ops.__file__).parent
LIBRARIES = sorted(PACKAGE.glob("*.so"))


def _output(*command: str | Path, **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)  # pyright: ignore
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def _headers() -> str:
    folder = ROOT / "cgx_ops/csrc/include/cgx"
    return "".join((folder / f"{name}.h").read_text() for name in ("status", "config", "cgx"))


def _dynamic(library: Path, tag: str) -> list[str]:
    text = _output("readelf", "--dynamic", "--wide", library)
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


def test_core_and_bindings_are_in_one_folder() -> None:
    names = {library.name.split(".")[0] for library in LIBRARIES}
    assert names == {"libcgx", "libcgx_mpi", "_numpy_ops", "_torch_ops", "_xla_ffi"}


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name.split(".")[0])
def test_no_path_of_the_build_machine(library: Path) -> None:
    runpath = {"libcgx.so": [], "libcgx_mpi.so": ["$ORIGIN/../../.."]}
    needed = _dynamic(library, "NEEDED")
    assert _dynamic(library, "RUNPATH") == runpath.get(library.name, ["$ORIGIN"])
    assert _dynamic(library, "RPATH") == []
    if library.name in runpath:
        assert _dynamic(library, "SONAME") == [library.name]
        assert "libcgx.so" not in needed
    else:
        assert "libcgx.so" in needed
    of_mpi = ["libmpi.so.40"] if library.name == "libcgx_mpi.so" else []
    assert [name for name in needed if "mpi" in name] == of_mpi
    assert not [name for name in needed if "/" in name]


def _exported(library: str) -> set[str]:
    symbols = _output("nm", "--dynamic", "--defined-only", PACKAGE / library)
    return {line.split()[-1].split("@")[0] for line in symbols.splitlines()}


def test_core_exports_only_the_api() -> None:
    header = _headers()
    declared = set(re.findall(r"CGX_API [^(;]*?\b(cgx_\w+)\(", header))
    assert len(declared) > 15
    assert _exported("libcgx.so") == declared


def test_mpi_library_exports_only_its_entry() -> None:
    assert _exported("libcgx_mpi.so") == {"cgx_mpi"}


def test_python_declarations_match_the_header() -> None:
    header = _headers()
    header = re.sub(r"/\*.*?\*/|//[^\n]*", "", header, flags=re.DOTALL)
    functions = {
        name: 0 if arguments.strip() == "void" else arguments.count(",") + 1
        for name, arguments in re.findall(r"CGX_API [^(;]*?\b(cgx_\w+)\(([^)]*)\);", header)
    }
    declared = library._TEXTS | library._CALLS
    assert functions == {name: len(types) for name, types in declared.items()}

    plain = {
        "size_t": ctypes.c_size_t,
        "int32_t": ctypes.c_int32,
        "int64_t": ctypes.c_int64,
        "double": ctypes.c_double,
        "const char*": ctypes.c_char_p,
        "cgx_config_t": structs.Config,
    }
    pointer = ctypes.sizeof(ctypes.c_void_p)
    declarations = re.findall(r"typedef struct cgx_(\w+)_t \{(.*?)\}", header, re.DOTALL)
    assert len(declarations) > 5
    for name, body in declarations:
        declared = getattr(structs, "".join(word.capitalize() for word in name.split("_")))._fields_
        fields = re.findall(r"([\w ]+?\*?)\s*(\w+);", body)
        assert [field for _, field in fields] == [field for field, _ in declared], name
        for (c_type, field), (_, given) in zip(fields, declared, strict=True):
            wanted = plain.get(c_type.strip())
            assert given is wanted if wanted else ctypes.sizeof(given) == pointer, (name, field)


def test_table_of_verbs_equals_the_header() -> None:
    (body,) = re.findall(r"typedef enum cgx_verb_t \{(.*?)\}", _headers(), re.DOTALL)
    numbers = {name.lower(): int(number) for name, number in re.findall(r"CGX_(\w+) = (\d+)", body)}
    assert numbers == {name: row["id"] for name, row in tables.VERBS.items()}
    for row in tables.VERBS.values():
        assert row["shards"] == (not row["blocks_in"] and not row["blocks_out"])
        assert "sra" in row["algorithms"] and set(row["algorithms"]) <= set(tables.ALGORITHMS)
        assert row["reduces"] or not row["residuals"]


def test_page_of_options_equals_the_core_table() -> None:
    row = "| `{name}` | `{default}` | {accepted} | {documentation} |"
    rows = [row.format(**field) for field in tables.CONFIG_FIELDS]
    page = (ROOT / "docs/reference/options.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")] == rows


def test_bindings_export_only_their_entry_point() -> None:
    for module in ("_numpy_ops", "_torch_ops", "_xla_ffi"):
        entry = f"PyInit_{module}"
        library = PACKAGE / f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"
        text = _output("nm", "--dynamic", "--defined-only", "--demangle", library)
        strong = {line.split(maxsplit=2)[-1] for line in text.splitlines() if " T " in line}
        assert entry in strong
        assert not [name for name in strong if name.startswith("cgx")]


def test_version_names_the_frameworks_of_the_build() -> None:
    built = binary.built_with()
    torch, jax = (".".join(built[name].split(".")[:2]) for name in ("torch", "jax"))
    served = f"+torch{torch}.jax{jax}" + (".cu13" if "cuda" in built else "")
    setup = [sys.executable, ROOT / "setup.py", "--version"]
    parts = "torch, jax" + (", cuda" if "cuda" in built else "")
    said = _output(*setup, env={**os.environ, "CGX_WITH": parts}, cwd=ROOT).split()
    assert said[-1] == cgx_ops.__version__ + served
    said = _output(*setup, env={**os.environ, "CGX_WITH": "none"}, cwd=ROOT).split()
    assert said[-1] == cgx_ops.__version__


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CGX_WITH", "pytorch"), ("CGX_WITH", "TORCH"), ("CGX_WITH", "none,torch"),
        ("MAX_JOBS", "0"), ("MAX_JOBS", "two"),
    ],
)  # fmt: skip
def test_build_rejects_invalid_variables(variable: str, value: str) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "setup.py", "--version"],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(f"cgx_ops: {variable} is {value!r}; it must be ")


def test_sdist_contains_the_tracked_files(tmp_path: Path) -> None:
    """Pack without git, next to files left by builds and tests."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: what is tracked is not known")
    listed = _output("git", "ls-files", "-z", cwd=ROOT).split("\0")
    tracked = {name for name in listed if name and (ROOT / name).exists()}
    tree = tmp_path / "a tree"
    strays = {"build/x.o", ".venv/x", "cgx_ops/libcgx.so", "cgx_ops/_build.json", "dist/x.whl"}
    strays |= {"tests/__pycache__/x.cpython-311.pyc", "examples/out/x.png", "x.txt"}
    for name in tracked | strays:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        if name in tracked:
            shutil.copy2(ROOT / name, tree / name)
        else:
            (tree / name).touch()
    _output(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    top = f"cgx_ops-{cgx_ops.__version__}"
    assert sdist.name == f"{top}.tar.gz"
    with tarfile.open(sdist) as tar:
        packed = {file.name.removeprefix(f"{top}/") for file in tar.getmembers() if file.isfile()}
    generated = {name for name in packed if name.startswith("cgx_ops.egg-info/")}
    generated |= {"PKG-INFO", "setup.cfg"}
    checkout = {".gitignore", ".pre-commit-config.yaml"}
    checkout |= {name for name in tracked if name.startswith((".ci/", ".github/"))}
    assert packed - generated == tracked - checkout


@pytest.mark.exhaustive
def test_wheel_works_without_the_source_tree(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path)]
    _output(*pip, "wheel", *options, str(ROOT))
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "libcgx.so",
        "libcgx_mpi.so",
        "py.typed",
        "_build.json",
        "_numpy_ops.pyi",
        "_torch_ops.pyi",
        "_xla_ffi.pyi",
        "csrc/include/cgx/cgx.h",
        "csrc/include/cgx/config.h",
        "csrc/include/cgx/status.h",
        "csrc/include/cgx/cpp.h",
        "torch/__init__.py",
        "jax/__init__.py",
        "bench/allreduce.py",
    ):
        assert f"cgx_ops/{needed}" in names
    strangers = [n for n in names if not n.startswith(("cgx_ops/", "cgx_ops-"))]
    assert not strangers
    assert not [n for n in names if n.endswith((".cc", ".py")) and "csrc" in n]

    # Use another environment: this package comes from the wheel, its dependencies from here.
    new = tmp_path / "venv"
    _output(sys.executable, "-m", "venv", "--without-pip", new)
    site = _output(new / "bin/python", "-c", "import site; print(site.getsitepackages()[0])")
    zipfile.ZipFile(wheel).extractall(site.strip())
    code = """
import sys
import numpy as np, cgx_ops, cgx_ops.torch, cgx_ops.jax
assert cgx_ops.__file__.startswith(sys.prefix), cgx_ops.__file__
x = np.arange(1000, dtype=np.float32)
print(cgx_ops.allreduce(x).sum(), cgx_ops.__version__)
"""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    printed = _output(new / "bin/python", "-c", code, cwd=tmp_path, env=environment)
    assert printed.split() == ["499500.0", cgx_ops.__version__]
