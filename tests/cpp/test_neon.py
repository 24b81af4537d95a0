"""The aarch64 kernels under emulation: kernel and codec tests, and comparison with x86's bytes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support import cpp_programs

CSRC = cpp_programs.ROOT / "cgx_ops" / "csrc"
FLAGS = (
    "-std=c++20", "-O3", "-DNDEBUG", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off",
    "-fno-trapping-math", "-static", f"-I{CSRC}", f"-I{CSRC}/include",
)  # fmt: skip
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (COMPILER and EMULATOR),
        reason="needs apt-get install g++-aarch64-linux-gnu qemu-user-static",
    ),
]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Compile the sources that do not need ranks or MPI; return the objects."""
    folder = tmp_path_factory.mktemp("neon")
    sources = [
        *(CSRC / "compressor").glob("*.cc"),
        *(CSRC / "kernel" / name for name in ("dispatch.cc", "cpu/kernels_baseline.cc")),
        CSRC / "kernel/cpu/kernels_neon.cc",
        CSRC / "base/env.cc",
    ]
    made = [folder / f"{source.stem}.o" for source in sources]
    for source, each in zip(sources, made, strict=True):
        cpp_programs.run(COMPILER, *FLAGS, "-c", source, "-o", each)
    return made


def emulated(name: str, objects: list[Path]) -> str:
    """Return the output of a program of tests/cpp for the targets neon and baseline."""
    program = objects[0].with_name(name)
    source = cpp_programs.ROOT / "tests/cpp" / f"{name}.cc"
    cpp_programs.run(COMPILER, *FLAGS, source, *objects, "-o", program)
    output = cpp_programs.run(EMULATOR, program, timeout=1500)
    assert "checks passed on neon baseline" in output, output
    return output


def test_kernels(objects: list[Path]) -> None:
    emulated("kernels_test", objects)


def test_entropy_coder(objects: list[Path]) -> None:
    emulated("rans_test", objects)


def test_codecs_give_the_same_bytes_as_on_this_processor(objects: list[Path]) -> None:
    here = subprocess.run(
        [cpp_programs.build("compressors_test") / "compressors_test"],
        capture_output=True, text=True, timeout=600, check=True,
    ).stdout  # fmt: skip
    there = emulated("compressors_test", objects)
    digests = [re.findall(r"digest (\d+)", output) for output in (here, there)]
    assert digests[0] == digests[1] != [], (here, there)
