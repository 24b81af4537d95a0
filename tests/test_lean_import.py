"""Importing cgx_ops starts nothing, drags in no framework and refuses a second MPI."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def _python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_brings_no_framework() -> None:
    code = "import sys, cgx_ops; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = _python(code)
    for module in ("torch", "jax", "jaxlib", "mpi4py", "rich"):
        assert f"'{module}'" not in loaded


@pytest.mark.parametrize("module", ["torch", "jax", "jaxlib"])
@pytest.mark.parametrize("built", [True, False])
def test_missing_framework_is_named_with_its_remedy(module: str, built: bool) -> None:
    framework = module.removesuffix("lib")
    versions = {framework: "0.10.2+cpu"} if built else {}
    printed = _python(f"""
import sys
from cgx_ops import _native
_native.built_with = lambda: {versions}
sys.modules[{module!r}] = None  # as if it were not installed
try:
    import cgx_ops.{framework}
except ModuleNotFoundError as error:
    print(error.name, error, sep="|")
""")
    name, text = printed.strip().split("|")
    assert name == module
    assert text.startswith(f"cgx_ops.{framework} needs {module}, which is not installed: pip ")
    if built:
        assert text.endswith(f"pip install '{framework}==0.10.*'")
    else:
        assert f"pip install {framework}, then build cgx_ops again: pip install " in text


def test_torch_binding_brings_no_compiler() -> None:
    pytest.importorskip("torch")
    code = "import sys, cgx_ops.torch; print({'torch._dynamo', 'torch._inductor'} & {*sys.modules})"
    assert _python(code) == "set()\n"


def test_import_starts_no_mpi_and_no_thread() -> None:
    code = """
import ctypes, os, cgx_ops
from cgx_ops import _native
mpi = ctypes.CDLL(str(_native._find_mpi()))  # the copy that is loaded already
started = ctypes.c_int(-1)
assert mpi.MPI_Initialized(ctypes.byref(started)) == 0
print(started.value, len(os.listdir("/proc/self/task")))
"""
    alone = int(_python("import os, numpy; print(len(os.listdir('/proc/self/task')))"))
    assert _python(code).split() == ["0", str(alone)]  # numpy's own threads, and no more


def test_exit_without_use_is_silent() -> None:
    assert _python("import cgx_ops") == ""


@pytest.mark.parametrize("name", ["libmpi.so.12", "libmpich.so.12", "libmpi.so.40"])
def test_another_mpi_in_the_process_is_refused(name: str, tmp_path: Path) -> None:
    other = tmp_path / name  # any library will do: what counts is what it is called
    any_library = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"))
    other.write_bytes(any_library.read_bytes())
    printed = _python(f"""
import ctypes
ctypes.CDLL({str(other)!r})
try:
    import cgx_ops
except RuntimeError as error:
    print(type(error).__name__, error)
""")
    assert printed.startswith("SystemFailure Another MPI library is already loaded")
    assert str(other) in printed


def test_mpi4py_shares_the_library() -> None:
    for first, second in (("cgx_ops", "mpi4py.MPI"), ("mpi4py.MPI", "cgx_ops")):
        code = f"import {first}, {second}; print(open('/proc/self/maps').read())"
        mapped = {line.split()[-1] for line in _python(code).splitlines() if "/libmpi" in line}
        assert len(mapped) == 1, mapped
