"""The GPU code in libcgx.so, read by NVIDIA's cuobjdump without a GPU.

This program prints the registers, the stack and the loops of kernels:

    PYTHONPATH=tests python -m support.gpu_code [--file FILE] [--architecture sm_90] [PATTERN]
"""

import argparse
import ctypes
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import cgx_ops
from support import sass

LIBRARY = Path(cgx_ops.__file__).parent / "libcgx.so"
ARCHITECTURES = ("sm_80", "sm_90")


@cache
def dump(*options: str, file: Path = LIBRARY) -> str:
    """Return the output of cuobjdump."""
    # It calls nvdisasm, so both must be in one folder: of the packages or of a toolkit.
    folders = [f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin", "/usr/local/cuda/bin"]
    tool = next(filter(None, (shutil.which("cuobjdump", path=f) for f in [*folders, None])), None)
    assert tool, "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    environment = {"PATH": f"{Path(tool).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        [tool, *options, file], capture_output=True, text=True, timeout=250, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Usage:
    registers: int
    stack: int  # bytes of a thread, for spilled registers and arrays


@cache
def usage(architecture: str, file: Path = LIBRARY) -> dict[str, Usage]:
    """Return all kernels by name, such as run_buckets<Float32, UniformFormat, Warp, Encode>."""
    text = dump("--dump-resource-usage", "--gpu-architecture", architecture, file=file)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) ", text)
    return {name_of(symbol): Usage(int(regs), int(stack)) for symbol, regs, stack in found}


@cache
def listings(architecture: str, file: Path = LIBRARY) -> dict[str, str]:
    """Return the machine code of all kernels, by name."""
    text = dump("--dump-sass", "--gpu-architecture", architecture, file=file)
    parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)[1:]
    return {name_of(symbol): code for symbol, code in zip(parts[::2], parts[1::2], strict=True)}


@cache
def code(
    architecture: str, pattern: str, file: Path = LIBRARY
) -> dict[str, dict[int, sass.Instruction]]:
    """Return the instructions of the kernels whose names contain a regular expression, by name."""
    found = listings(architecture, file)
    return {name: sass.parse(found[name]) for name in found if re.search(pattern, name)}


def name_of(symbol: str) -> str:
    """Return the name of a kernel with its template arguments, without namespaces."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    whole = demangle(symbol.encode(), None, None, None).decode()
    return re.sub(r"^void |(\w+|\(anonymous namespace\))::|\([^()]*\)$", "", whole)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[-1])
    parser.add_argument("--file", type=Path, default=LIBRARY, help="such as a .cubin of nvcc")
    options = parser.parse_args()
    print(f"{options.file.name}: {options.file.stat().st_size:,} bytes; {options.architecture}")
    found = code(options.architecture, options.pattern, options.file)
    print("registers  stack  instructions  kernel: instructions of each loop that loads")
    for name, instructions in found.items():
        used = usage(options.architecture, options.file)[name]
        loops = ", ".join(str(len(loop)) for loop in sass.loading_loops(instructions))
        print(f"{used.registers:9}  {used.stack:5}  {len(instructions):12}  {name}: {loops}")


if __name__ == "__main__":
    _main()
