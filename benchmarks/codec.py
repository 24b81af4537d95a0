"""Time and instructions of the codec on one core, against a memcpy of the values.

    python benchmarks/codec.py [--rounds N] [--json FILE]

1. Build codec_bench.cc, which calls the core without Python.
2. Run it at a size beyond the caches and at a size within them.
3. Run it under callgrind to count instructions, which do not depend on the load of the machine.
4. Run it with the kernels of each target for the compressors of SPEEDS.

The ratio is memcpy's time for the input values over the operation's: 1 is as fast as copying.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cgx_ops._core import library
from cgx_ops._core.text_table import Table
from cgx_ops.bench.measure import Summary
from cgx_ops.bench.report import Report

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cmake"  # where setup.py built the core
SIZES = {"memory": 1 << 24, "cache": 1 << 16}  # values: 64 MiB and 256 KiB of fp32
COUNTED = 1 << 16  # values
COUNTED_TARGET = "avx2"  # valgrind does not support AVX-512
OPERATIONS = (
    "quantize", "quantize-residual", "dequantize", "dequantize-add", "rans-encode", "rans-decode",
)  # fmt: skip

# Phase 4: the compressors, and the millions of values per second that they should reach on one
# core, by target.
SPEED_NUMEL = 1 << 22  # values
SPEEDS = ("entropy", "lossless", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
TARGETS = ("avx2", "avx512")
WANTED: dict[tuple[str, str, str, float], tuple[int, int]] = {
    ("fp32", "quantize", "entropy", 2): (250, 400),
    ("fp32", "dequantize", "entropy", 2): (350, 500),
    ("fp32", "quantize", "lossless", 32): (150, 150),  # 0.6 GB/s
    ("fp32", "dequantize", "lossless", 32): (150, 150),
}


@dataclass(frozen=True)
class Case:
    """An operation, with the names that codec_bench.cc prints."""

    dtype: str
    operation: str
    compressor: str
    bits: float
    rounding: str

    @classmethod
    def of(cls, words: list[str]) -> "Case":
        return cls(words[0], words[1], words[2], float(words[3]), words[4])


def memcpy_of(dtype: str) -> Case:
    return Case(dtype, "memcpy", "-", 32, "-")


@dataclass(frozen=True)
class Result(Case):
    """An operation at one size.

    Attributes:
        place: of SIZES.
        values: how many.
        seconds: of a call; the median over rounds.
        lower: first quartile of the same.
        upper: third quartile.
        rounds: how many.
        ratio: memcpy's seconds for the same values, over these.
        instructions: per value, of the kernels for COUNTED_TARGET; None: not counted.
    """

    place: str
    values: int
    seconds: float
    lower: float
    upper: float
    rounds: int
    ratio: float
    instructions: float | None


def build() -> Path:
    """Build codec_bench beside the core and return its path."""
    scripts = str(Path(sys.executable).parent)
    cmake = shutil.which("cmake", path=scripts)
    if cmake is None or not BUILD.exists():
        sys.exit("The core is not built here: make test, or pip install --no-build-isolation -e .")
    configure = [cmake, "-S", ROOT / "cgx_ops/csrc", "-B", BUILD, "-DCGX_BUILD_BENCHMARKS=ON"]
    for command in (configure, [cmake, "--build", BUILD, "--target", "codec_bench"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}\ncodec_bench could not be built")
    return BUILD / "codec_bench"


def time_all(
    program: Path,
    numel: int,
    rounds: int,
    target: str | None = None,
    compressors: Sequence[str] = (),
) -> dict[Case, Summary]:
    """Return the seconds a call of every operation on `numel` values.

    Args:
        program: codec_bench.
        numel: number of values.
        rounds: number of measurements.
        target: the kernels; None: the best for this CPU.
        compressors: whose operations run; none: all.
    """
    command = [program, "time", str(numel), str(rounds), *compressors]
    environment = {**os.environ, **({"CGX_CPU_TARGET": target} if target else {})}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return {Case.of(words): Summary.of([float(word) for word in words[5:]]) for words in lines}


def count_all(program: Path) -> dict[Case, float]:
    """Return the instructions per value of every operation; nothing if valgrind is missing."""
    if shutil.which("valgrind") is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"),
                *("--toggle-collect=run_case", "--dump-after=run_case"),
                *(program, "count", str(COUNTED)),
            ],
            env={**os.environ, "CGX_CPU_TARGET": COUNTED_TARGET},
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
        cases = [Case.of(line.split()) for line in done.stdout.splitlines()]
        return {
            case: _total(Path(folder, f"out.{number}")) / COUNTED  # a file for each call
            for number, case in enumerate(cases, start=1)
        }


def _total(dump: Path) -> int:
    found = re.search(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)
    assert found, f"{dump} is not what callgrind writes"
    return int(found[1])


def results_of(times: dict[str, dict[Case, Summary]], counts: dict[Case, float]) -> list[Result]:
    return [
        Result(
            **asdict(case),
            place=place,
            values=SIZES[place],
            seconds=summary.median,
            lower=summary.lower,
            upper=summary.upper,
            rounds=summary.rounds,
            ratio=found[memcpy_of(case.dtype)].median / summary.median,
            instructions=counts.get(case),
        )
        for place, found in times.items()
        for case, summary in found.items()
    ]


def table_of(results: list[Result]) -> Table:
    """Return a row for each operation: fp32 values, then bf16."""
    found = {(r.dtype, r.place, r.operation, r.compressor, r.bits, r.rounding): r for r in results}
    kinds = sorted(
        {key[2:] for key in found if key[2] in OPERATIONS},
        key=lambda kind: (kind[0], kind[1] != "uniform", *kind[1:]),
    )

    def cells(dtype: str, kind: tuple[str, str, float, str]) -> list[str]:
        at = [found[dtype, place, *kind] for place in SIZES if (dtype, place, *kind) in found]
        numbers = [each.ratio for each in at] + [each.instructions for each in at[:1]]
        return [f"{number:.2f}" if number else "" for number in numbers] or [""] * 3

    rows = [
        [*kind[:2], f"{kind[2]:g}", kind[3], *cells("fp32", kind), *cells("bf16", kind)]
        for kind in kinds
    ]
    columns = [f"{dtype} {what}" for dtype in ("fp32", "bf16") for what in (*SIZES, "instr.")]
    copies = (
        f"in {place} {r.values * 4 / r.seconds / 1e9:.1f} GB/s"
        for place in SIZES
        if (r := found["fp32", place, "memcpy", "-", 32, "-"])
    )
    return Table(
        "codec on one core: memcpy's time over the operation's (1: as fast as copying)",
        ["operation", "compressor", "bits", "rounding", *columns],
        rows,
        text_columns=4,
        sections=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
        notes=[
            f"memcpy of fp32 values: {', '.join(copies)}. Memory: {SIZES['memory']:,} values; "
            f"cache: {SIZES['cache']:,}. Kernels: {library.describe()['cpu_target']}.",
            "Instr.: instructions per value, "
            + (
                f"counted by callgrind in the {COUNTED_TARGET} kernels, because valgrind does not "
                "support AVX-512."
                if shutil.which("valgrind")
                else "not counted, because valgrind is missing: apt install valgrind."
            ),
        ],
    )


def table_of_speeds(found: dict[str, dict[Case, Summary]]) -> Table:
    """Return millions of values per second and the wanted ones, by target."""

    def cells(case: Case, place: int) -> list[str]:
        summary = found.get(TARGETS[place], {}).get(case)
        speed = f"{SPEED_NUMEL / summary.median / 1e6:,.0f}" if summary else ""
        wanted = WANTED.get((case.dtype, case.operation, case.compressor, case.bits))
        return [speed, str(wanted[place]) if wanted else ""]

    def row_of(case: Case) -> list[str]:
        first = [case.operation, case.compressor, f"{case.bits:g}", case.rounding, case.dtype]
        return [*first, *(text for place in range(len(TARGETS)) for text in cells(case, place))]

    cases = dict.fromkeys(case for times in found.values() for case in times)
    shown = sorted(
        (case for case in cases if case.operation in ("quantize", "dequantize")),
        key=lambda case: (SPEEDS.index(case.compressor), case.dtype != "fp32", case.bits),
    )
    return Table(
        "codec on one core: millions of values per second",
        [
            *("operation", "compressor", "bits", "rounding", "dtype"),
            *(text for target in TARGETS for text in (target, "wanted")),
        ],
        [row_of(case) for case in shown],
        text_columns=5,
        notes=[f"{SPEED_NUMEL:,} values in memory. Lossless: 150 million of fp32 are 0.6 GB."],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The codec on one core, beside memcpy")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    program = build()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of the programs started here too
    times = {place: time_all(program, SIZES[place], options.rounds) for place in SIZES}
    results = results_of(times, count_all(program))
    available = [target for target in TARGETS if target in library.describe()["cpu_targets"]]
    speeds = {
        target: time_all(program, SPEED_NUMEL, options.rounds, target, SPEEDS)
        for target in available
    }
    tables = [table_of(results), table_of_speeds(speeds)]
    for table in tables:
        table.print()
    if options.json:
        settings = {"cores": 1, "counted_target": COUNTED_TARGET}
        Report("codec", settings, [asdict(r) for r in results], tables).write(options.json)


if __name__ == "__main__":
    main()
