"""Importing cgx_ops starts nothing and loads no framework and no MPI."""

import pytest
from support.launch import python


def test_import_loads_no_framework() -> None:
    code = "import sys, cgx_ops; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = python(code)
    for module in ("torch", "jax", "jaxlib", "mpi4py", "rich"):
        assert f"'{module}'" not in loaded


@pytest.mark.parametrize("module", ["torch", "jax", "jaxlib"])
@pytest.mark.parametrize("built", [True, False])
def test_missing_framework_names_the_remedy(module: str, built: bool) -> None:
    framework = module.removesuffix("lib")
    versions = {framework: "0.10.2+cpu"} if built else {}
    printed = python(f"""
import sys
from cgx_ops._core import binary, library
binary.built_with = lambda: {versions}
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


def test_torch_binding_loads_no_compiler() -> None:
    pytest.importorskip("torch.nn")
    code = "import sys, cgx_ops.torch; print({'torch._dynamo', 'torch._inductor'} & {*sys.modules})"
    assert python(code) == "set()\n"


def test_import_loads_no_mpi_and_starts_no_thread() -> None:
    code = """
import os, cgx_ops
print("libmpi" in open("/proc/self/maps").read(), len(os.listdir("/proc/self/task")))
"""
    alone = int(python("import os, numpy; print(len(os.listdir('/proc/self/task')))"))
    assert python(code).split() == ["False", str(alone)]  # numpy's own threads, and no more


def test_exit_without_use_is_silent() -> None:
    assert python("import cgx_ops") == ""
