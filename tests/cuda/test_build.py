"""The GPU code in libcgx.so, read by NVIDIA's cuobjdump without a GPU."""

import re
from itertools import product

import pytest
from support.gpu_code import ARCHITECTURES, dump, listings, usage

from cgx_ops._core import binary

pytestmark = pytest.mark.skipif(
    "cuda" not in binary.built_with(), reason="cgx_ops was built without CUDA: no nvcc was found"
)

DTYPES = ("Float32", "Float16", "Bfloat16")
LAUNCHES = ("Encode", "Reduce", "Decode")
FORMATS = ("UniformFormat", "AnyFormat", "SparseFormat", "BlocksFormat")
GROUPS = ("Warp", "Block<512>")
UNIFORM = ("Uniform<2>", "Uniform<4>", "Uniform<8>")
LEVELS = ("Levels<2>", "Levels<3>", "Levels<4>")
LANES = ("0", "32")  # of a bucket: any number, or those of 512 values
FLAGS = ("false", "true")

# Template arguments: all combinations of a row.
KERNELS = [
    ("run_buckets", DTYPES, FORMATS, GROUPS, LAUNCHES),
    # Flags: stochastic rounding, residuals.
    ("encode_aligned", DTYPES, UNIFORM, LANES, FLAGS, FLAGS),
    ("encode_aligned", DTYPES, LEVELS, ["32"], ["false"], FLAGS),
    # Flags: stochastic rounding, own values, residuals, encoding of the sum.
    ("reduce_aligned", DTYPES, UNIFORM, LANES, ["false"], FLAGS, ["false"], ["false"]),
    ("reduce_aligned", ["Float32"], UNIFORM, LANES, FLAGS, ["false"], ["false"], ["true"]),
    ("reduce_aligned", DTYPES, UNIFORM, LANES, FLAGS, ["true"], FLAGS, ["true"]),
    ("reduce_aligned", DTYPES, LEVELS, ["32"], ["false"], FLAGS, ["false"], ["false"]),
    ("reduce_aligned", ["Float32"], LEVELS, ["32"], ["false"], ["false"], ["false"], ["true"]),
    ("reduce_aligned", DTYPES, LEVELS, ["32"], ["false"], ["true"], FLAGS, ["true"]),
    ("decode_aligned", DTYPES, UNIFORM, LANES),
    ("decode_aligned", DTYPES, LEVELS, ["32"]),
    ("run_exact", DTYPES, LAUNCHES),
]


def test_machine_code_and_ptx() -> None:
    held = dump("--list-elf", "--list-ptx")
    assert set(re.findall(r"(sm_\d+)\.cubin", held)) == set(ARCHITECTURES)
    assert set(re.findall(r"(sm_\d+)\.ptx", held)) == {"sm_90"}  # the name for compute_90


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_kernels_exist(architecture: str) -> None:
    expected = {
        f"{template}<{', '.join(combination)}>"
        for template, *arguments in KERNELS
        for combination in product(*arguments)
    }
    assert usage(architecture).keys() == {*expected, "run_exchange"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_do_not_spill(architecture: str) -> None:
    """Check that kernels use no stack, except those of other formats with many warps."""
    spilling = [name for name, used in usage(architecture).items() if used.stack > 0]
    known = re.compile(r"(Any|Sparse|Blocks)Format, Block<512>")
    assert not [name for name in spilling if not known.search(name)]


@pytest.mark.slow  # a listing takes 20 seconds
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("kernels", "operation"),
    [
        ("run_buckets<.*UniformFormat.*Encode>", "LDG"),  # of values
        ("run_buckets<.*UniformFormat.*Encode>", "STG"),  # of records
        ("run_buckets<.*UniformFormat.*Reduce>", "LDGSTS"),  # of messages, to shared memory
        ("run_buckets<.*UniformFormat.*Decode>", "STG"),  # of values
        ("encode_aligned<.*>", "LDG"),
        ("encode_aligned<.*true>", "STG"),  # of residuals
        ("reduce_aligned<.*true, (true|false), true>", "LDG"),  # of own values
        ("reduce_aligned<.*false>", "STG"),  # of sums
        ("decode_aligned<.*>", "STG"),
        ("run_exact<.*>", "LDG"),
        ("run_exact<.*>", "STG"),
    ],
)
def test_memory_accesses_have_16_bytes(kernels: str, operation: str, architecture: str) -> None:
    found = listings(architecture)
    chosen = {name: each for name, each in found.items() if re.fullmatch(kernels, name)}
    assert chosen
    for name, listing in chosen.items():
        assert re.search(rf"\b{operation}\.(\w+\.)*128\b", listing), name


def test_arithmetic_is_exact() -> None:
    """Check that denormals are preserved, divisions round to nearest, and fusion is intended."""
    ptx = dump("--dump-ptx")
    operations = set(re.findall(r"\s((?:add|sub|mul|fma|mad|div|rcp|sqrt)\S*\.f32)\s", ptx))
    spelled_out = {f"{name}.rn.f32" for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")}
    assert operations == {*spelled_out, "add.rm.f32"}  # add.rm is the floor
    assert not re.search(r"\.f(tz|ull)\b|\.approx", ptx)
