"""The GPU code in libcgx.so, read by NVIDIA's cuobjdump without a GPU."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cgx_ops
from cgx_ops._core import binary

LIBRARY = Path(cgx_ops.__file__).parent / "libcgx.so"
ARCHITECTURES = ("sm_80", "sm_90")
DTYPES = ("Float32", "Float16", "Bfloat16")

pytestmark = pytest.mark.skipif(
    "cuda" not in binary.built_with(), reason="cgx_ops was built without CUDA: no nvcc was found"
)


@cache
def _dump(*options: str) -> str:
    # cuobjdump calls nvdisasm, so both must be in one folder: of the packages or of a toolkit.
    folders = [f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin", "/usr/local/cuda/bin"]
    tool = next(filter(None, (shutil.which("cuobjdump", path=f) for f in [*folders, None])), None)
    assert tool, "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    environment = {"PATH": f"{Path(tool).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        [tool, *options, LIBRARY], capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def _usage(*options: str) -> dict[str, str]:
    """Return each kernel's resource usage, by name."""
    usage = _dump("--dump-resource-usage", *options)
    return dict(re.findall(r"Function (\S+):\s+(REG:.*)", usage))


@cache
def _code(architecture: str) -> dict[str, str]:
    """Return the machine code of the kernels of uniform buckets and exact values, by name."""
    one = ("--gpu-architecture", architecture)
    names = ",".join(name for name in _usage(*one) if "UniformFormat" in name)
    code = _dump("--dump-sass", *one, "--function", names)
    parts = re.split(r"^\s*Function : (\S+)$", code, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _named(launch: str, dtype: str, kernels: dict[str, str]) -> Iterator[str]:
    wanted = ("run_buckets", f"{len(dtype)}{dtype}", f"{len(launch)}{launch}E")
    for name, code in kernels.items():
        if all(part in name for part in wanted):
            yield code


def test_machine_code_and_ptx() -> None:
    held = _dump("--list-elf", "--list-ptx")
    assert set(re.findall(r"(sm_\d+)\.cubin", held)) == set(ARCHITECTURES)
    assert set(re.findall(r"(sm_\d+)\.ptx", held)) == {"sm_90"}  # the name for compute_90


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_exist(architecture: str) -> None:
    kernels = _usage("--gpu-architecture", architecture)
    for launch in ("Encode", "Reduce", "Decode"):
        for dtype in DTYPES:
            assert len(list(_named(launch, dtype, kernels))) == 6, (launch, dtype)
    assert [name for name in kernels if "run_exchange" in name]


def test_kernels_do_not_spill() -> None:
    """Check that kernels use no stack, except those of other formats with many warps."""
    usage = re.findall(r"Function (\S+):\s+(REG:.*)", _dump("--dump-resource-usage"))
    assert len(usage) >= 2 * 55
    spilling = [(name, used) for name, used in usage if "STACK:0 " not in used]
    known = re.compile("(Any|Sparse)Format.*BlockILi512E")
    assert not [each for each in spilling if not known.search(each[0])]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_accesses_have_16_bytes(dtype: str, architecture: str) -> None:
    kernels = _code(architecture)
    for code in _named("Encode", dtype, kernels):
        assert re.search(r"\bLDG\.E\S*\.128\b", code), "reads of values"
        assert re.search(r"\bSTG\.E\S*\.128\b", code), "writes of records"
    for code in _named("Reduce", dtype, kernels):
        assert re.search(r"\bLDGSTS\.E\S*\.128\b", code), "copies of messages to shared memory"
    for code in _named("Decode", dtype, kernels):
        assert re.search(r"\bSTG\.E\S*\.128\b", code), "writes of values"


def test_arithmetic_is_exact() -> None:
    """Check that denormals are preserved, divisions round to nearest, and fusion is intended."""
    code = _dump("--dump-ptx")
    operations = set(re.findall(r"\s((?:add|sub|mul|fma|mad|div|rcp|sqrt)\S*\.f32)\s", code))
    spelled_out = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "fma", "div", "sqrt")}
    assert operations == {*spelled_out, "add.rm.f32"}  # add.rm is the floor
    assert not re.search(r"\.f(tz|ull)\b|\.approx", code)
