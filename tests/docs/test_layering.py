"""The sources follow the rules of docs/explanation/architecture.md on includes and errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "cgx_ops/csrc"

# The layers that each folder may include. "" has the files outside of folders, such as
# communicator.cc and plan.cc. Two files are separate layers: plan.h describes a collective to
# algorithms, and config.h is the table of options.
ALLOWED = {
    "base": {"base"},
    "kernel": {"base", "kernel"},
    "config.h": set(),
    "compressor": {"base", "kernel", "config.h", "compressor"},
    "transport": {"base", "transport"},
    "plan.h": {"base", "config.h", "compressor"},
    "algorithm": {"base", "kernel", "compressor", "plan.h", "transport", "algorithm"},
    "device": {"base", "kernel", "compressor", "plan.h", "transport", "algorithm", "device"},
    "cuda": {"base", "kernel", "transport", "device", "cuda"},
    "engine": {"base", "plan.h", "transport", "algorithm", "engine"},
    "": {
        "",
        "base",
        "config.h",
        "compressor",
        "plan.h",
        "transport",
        "algorithm",
        "engine",
        "device",
    },
    "api": {
        "",
        "base",
        "kernel",
        "config.h",
        "compressor",
        "plan.h",
        "transport",
        "algorithm",
        "api",
        "device",
    },
}
# Headers of the C API, which any file may include.
C_API = {f"cgx/{header}.h" for header in ("cgx", "config", "status", "verb")}
# C++ helpers of the bindings.
SHARED = {"cgx/call.h", "cgx/call_seeds.h", "cgx/completion_pool.h"}


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
            if path.removeprefix("include/") not in C_API and (
                _layer(path) not in ALLOWED[_layer(str(file))]
            ):
                wrong.append(f"{file} includes {path}")
    assert not wrong


def test_every_layer_is_listed() -> None:
    assert {_layer(str(file)) for file, _ in _sources()} - {"include"} == ALLOWED.keys()


def test_schedule_is_pure_arithmetic() -> None:
    for file, text in _sources():
        if file.name.startswith("schedule."):
            assert not re.search(r'#include "(transport|compressor|kernel)/', text), file


def _users(pattern: str) -> set[str]:
    return {str(file) for file, text in _sources() if re.search(pattern, text)}


def _calls_mpi(file: str) -> bool:
    """Return whether CMakeLists.txt compiles a file into libcgx_mpi.so."""
    return re.fullmatch(r"transport/mpi\w*\.cc", file) is not None


def test_mpi_only_in_its_library() -> None:
    users = _users(r"#include\s*[<\"]mpi(-ext)?\.h|\bMPI_[A-Z]\w+\s*\(")
    headers = {f"transport/{name}.h" for name in ("mpi_world", "mpi_post")}
    sources = {str(file) for file, _ in _sources() if _calls_mpi(str(file))}
    assert users == headers | sources
    includers = _users(r'#include "transport/(mpi_world|mpi_post)\.h"')
    assert includers <= users


def test_mpi_library_needs_no_source_of_the_core() -> None:
    """Check that it includes only headers of base and transport, which need no libcgx.so."""
    for file, text in _sources():
        if _calls_mpi(str(file)):
            included = set(re.findall(r'#include "([^"]+)"', text)) - C_API
            assert {_layer(path) for path in included} <= {"base", "transport"}, file
    assert _users(r"\bdlopen\b") == {"transport/load_mpi.cc", "cuda/nccl.cc"}


def test_environment_is_read_in_one_place() -> None:
    assert _users(r"\bgetenv\b|\benviron\b") == {"base/env.cc"}


def test_core_uses_no_python_and_no_framework() -> None:
    assert not _users(r"(?i)\b(python\w*|pybind11|nanobind|torch|c10d?|aten|jax|xla)\b")


def test_cuda_headers_stay_in_their_folders() -> None:
    assert not {f for f in _users(r"#include\s*<cuda|#include\s*<nccl") if "cuda/" not in f}


def test_bindings_include_only_the_c_api() -> None:
    for folder in ("cgx_ops/numpy_ops", "torch_ops", "xla_ffi"):
        own = {file.name for file, _ in _sources(ROOT / folder)}
        for file, text in _sources(ROOT / folder):
            included = set(re.findall(r'#include "([^"]+)"', text))
            foreign = {name for name in included if not name.startswith(("xla/", "torch/"))}
            assert foreign <= own | C_API | SHARED, f"{folder}/{file}"


def test_python_apis_do_not_import_each_other() -> None:
    package = ROOT / "cgx_ops"
    rules = {"torch": r"jax", "jax": r"torch"}
    for file in package.rglob("*.py"):
        folder = file.relative_to(package).parts[0]
        if folder != "bench":  # measures both frameworks
            forbidden = rules.get(folder, r"torch|jax")
            pattern = rf"^\s*(?:import|from) (?:{forbidden}|cgx_ops\.(?:{forbidden}))\b"
            assert not re.search(pattern, file.read_text(), re.MULTILINE), file


def test_private_names_of_torch_are_in_one_package() -> None:
    users = set()
    for file in (ROOT / "cgx_ops/torch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            # Names in torch.ops are operators, not private names.
            if any(re.match(r"(?!torch\.ops)(torch|dist)\b.*\._(?!_)", name) for name in names):
                users.add(file.parent.name)
    assert users == {"_compat"}


def test_one_file_has_the_path_of_the_library() -> None:
    for file in (ROOT / "cgx_ops").rglob("*.py"):
        if file.name != "binary.py":
            assert not re.search(r"CDLL|\.so\b", file.read_text()), file


# ---- errors have codes: no code compares or searches their text ----------------------------------

_SEARCHES = {
    "count", "endswith", "find", "findall", "finditer", "fullmatch", "index", "match", "partition",
    "removeprefix", "removesuffix", "rfind", "rindex", "rpartition", "rsplit", "search", "split",
    "splitlines", "startswith",
}  # fmt: skip
_IN_CPP = r"(?:find\w*|rfind|starts_with|ends_with|contains|compare|substr)\s*\("
_TEXT_IN_CPP = r"\b(?:what|what_without_backtrace|cgx_last_error)\(\)"
_NAMED_IN_CPP = r"\b(?:last_error|message|reason|refusal|failure|why)\b"


class _Searches(ast.NodeVisitor):
    """Finds the lines that compare or search the text of an error."""

    def __init__(self) -> None:
        self.lines: set[int] = set()
        self._errors = {"error", "exc", "exception"}
        self._texts: set[str] = set()

    def _is_text(self, node: ast.AST) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self._texts
            case ast.Attribute(value=ast.Name(id=name), attr="args" | "strerror"):
                return name in self._errors
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=name)]):
                return name in self._errors
            case ast.FormattedValue(value=ast.Name(id=name)):
                return name in self._errors
            case ast.JoinedStr(values=values):
                return any(map(self._is_text, values))
            case ast.Call(func=ast.Attribute(value=value)) | ast.Subscript(value=value):
                return self._is_text(value)
            case ast.NamedExpr(value=value):
                return self._is_text(value)
        return False

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._errors.add(node.name or "")
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        if node.annotation and re.search(r"(Error|Exception)\b", ast.unparse(node.annotation)):
            self._errors.add(node.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        if self._is_text(node.value):
            self._texts |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        if self._is_text(node.value):
            self._texts.add(node.target.id)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._check(node, node.left, *node.comparators)

    def visit_Match(self, node: ast.Match) -> None:
        self._check(node, node.subject)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._check(node, node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
            self._check(node, node.func.value, *node.args)
        else:
            self.generic_visit(node)

    def _check(self, node: ast.expr | ast.stmt, *operands: ast.expr) -> None:
        if any(map(self._is_text, operands)):
            self.lines.add(node.lineno)
        self.generic_visit(node)


def _searches_of_errors(source: str) -> list[int]:
    found = _Searches()
    found.visit(ast.parse(source))
    return sorted(found.lines)


def _searches_in_cpp(text: str) -> list[str]:
    pattern = (
        r"\bstrstr\b|\bregex_\w+|"
        rf"{_TEXT_IN_CPP}\)*\s*(?:[=!]=|\[|\.\s*{_IN_CPP})|"
        rf"\bstr\w*cmp\s*\([^;]*{_TEXT_IN_CPP}|"
        rf"{_NAMED_IN_CPP}(?:\(\))?\s*(?:[=!]=\s*\"|(?:\.|->)\s*{_IN_CPP})|"
        r"\b(?:refusal|failure|reason|why)\[0\]"
    )
    found = [match[0] for match in re.finditer(pattern, text)]
    for match in re.finditer(rf"(\w+) = [^;]*{_TEXT_IN_CPP}[^;]*;", text):
        rest = text[match.end() :].split("\n}\n")[0]
        found += re.findall(rf"\b{match[1]}(?:\s*[=!]=|\.{_IN_CPP})", rest)
    return found


@pytest.mark.parametrize(
    "line",
    [
        "'closed' in str(error)",
        "str(error) == 'closed'",
        "str(error).startswith('UNAVAILABLE')",
        "str(error).lower().endswith('closed')",
        "re.search('rank ([0-9]+)', str(error))",
        "f'{error}'.split(':')",
        "error.args[0]",
        "text = str(error); 'closed' in text",
        "'closed' in (text := repr(error))",
    ],
)
def test_a_search_of_an_error_is_found(line: str) -> None:
    assert _searches_of_errors(line) == [1]
    handler = f"try:\n  f()\nexcept OSError as failed:\n  {line.replace('error', 'failed')}"
    assert _searches_of_errors(handler) == [4]


@pytest.mark.parametrize(
    "text",
    [
        'std::string(error.what()).find("closed")',
        'error.what() == "closed"',
        'strcmp(cgx_last_error(), "closed")',
        'strstr(text, "closed")',
        'const std::string text = cgx_last_error();\n  if (text.starts_with("closed")) return;',
        'message.find("closed")',
        "hello.refusal[0]",
    ],
)
def test_a_search_of_an_error_is_found_in_cpp(text: str) -> None:
    assert _searches_in_cpp(text)


def test_no_python_searches_an_errors_text() -> None:
    package = ROOT / "cgx_ops"
    for file in package.rglob("*.py"):
        assert not _searches_of_errors(file.read_text()), file


def test_no_cpp_searches_an_errors_text() -> None:
    for folder in ("cgx_ops/csrc", "cgx_ops/numpy_ops", "torch_ops", "xla_ffi"):
        for file, text in _sources(ROOT / folder):
            assert not _searches_in_cpp(text), f"{folder}/{file}"


def test_bindings_parse_no_lists_of_the_core() -> None:
    for folder in ("cgx_ops/numpy_ops", "torch_ops", "xla_ffi"):
        for file, text in _sources(ROOT / folder):
            lists = re.findall(r"\bcgx_(?:compressors|config_fields|describe)\s*\(", text)
            assert not lists, f"{folder}/{file}"
