"""benchmarks/: the suite runs existing programs and collects their results; the times of codecs."""

import argparse
import sys
from pathlib import Path

import codec
import plots
import pytest
import suite

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate
from cgx_ops.bench import allreduce
from cgx_ops.bench.report import Report
from cgx_ops.bench.results import Result

ROOT = Path(__file__).resolve().parents[2]
TABLE = Table("Times", ["size", "who", "us"], [["4", "mpi", "1"], ["8", "cgx", "20"]], 2, [1])


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    allreduce.add_arguments(parser)
    return parser.parse_args(arguments)


def test_suite_has_valid_programs_and_arguments() -> None:
    runs = [one for part in suite.PARTS.values() for one in part]
    assert len({one.name for one in runs}) == len(runs)
    assert {*suite.LONG_PARTS} <= {*suite.PARTS}
    for one in runs:
        if one.program[:3] == ("-m", "cgx_ops", "bench"):
            options = options_of(*one.program[3:])
            assert options.link_rate == (one.rate and parse_rate(one.rate)), one.name
        else:
            assert (ROOT / one.program[0]).exists(), one.name
            assert "--link-rate" not in one.program or one.rate in one.program, one.name
        assert one.command()[-2:] == ["--json", str(one.report)]


def test_suite_collects_tables_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    results = [
        Result(name, 2, size, 1e-3, 1e-3, 1e-3, 3, 0.0, 0.0, None).record()
        for size in (4096, 1 << 20)
        for name in ("mpi", "cgx 4 nearest")
    ]
    for hosts, rate in ((1, None), (2, 125e6), (2, None)):
        settings = {"ranks": 2, "hosts": hosts, "transport": "shm", "link_rate": rate}
        name = f"allreduce-{hosts}-{rate}.json"
        Report("allreduce", settings, results, [TABLE]).write(tmp_path / name)
    phases = {"gloo": {"compute_s": 0.1, "communicate_s": 0.5}}
    Report("ddp_step", {"phases": phases}, [], [TABLE]).write(tmp_path / "ddp_step.json")

    reports = [Report.read(path) for path in sorted(tmp_path.glob("*.json"))]
    suite.write_tables(reports)
    text = (tmp_path / "tables.md").read_text()
    assert text.count("### Times") == 4
    assert reports[0].machine["cpu"] in text and "torch 2" in text
    drawn = {path.name for path in plots.draw(tmp_path)}
    assert drawn == {"time_by_size.png", "speedup_by_link.png", "steps.png"}
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_suite_skips_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite.hosts, "refusal", lambda: "only root can")
    monkeypatch.setattr(sys, "argv", ["suite.py", "links"])
    with pytest.raises(SystemExit) as caught:
        suite.main()
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert printed.count("skipped: only root can") == len(suite.PARTS["links"])


def test_suite_continues_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    runs = (
        suite.Run("bad", ("-c", "raise SystemExit(3)")),
        suite.Run("late", ("-c", "import time; time.sleep(60)"), timeout=1),
        suite.Run("good", ("-c", "pass")),
    )
    monkeypatch.setattr(suite, "PARTS", {"part": runs})
    monkeypatch.setattr(suite, "_GRACE", 0)
    monkeypatch.setattr(sys, "argv", ["suite.py"])
    with pytest.raises(SystemExit) as caught:
        suite.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    for outcome in ("failed with status 3", "ran past 1 s", "done"):
        assert outcome in printed


MEMCPY = ("memcpy", "-", 32.0, "-")


@pytest.mark.slow
def test_codec_times_and_counts_every_operation() -> None:
    program = codec.build()
    times = codec.time_all(program, 4096, 2)
    kinds = {(c.operation, c.compressor, c.bits, c.rounding) for c in times} - {MEMCPY}
    assert {kind[0] for kind in kinds} == {*codec.OPERATIONS}
    assert {("quantize", "uniform", bits, "nearest") for bits in range(1, 9)} <= kinds
    missing = {kind for kind in kinds if codec.Case("bf16", *kind) not in times}
    assert {kind[0] for kind in missing} == {"dequantize-add", "rans-encode", "rans-decode"}
    assert all(summary.median > 0 and summary.rounds == 2 for summary in times.values())
    counts = codec.count_all(program)
    assert not counts or counts.keys() == times.keys()
    results = codec.results_of(dict.fromkeys(codec.SIZES, times), counts)
    assert [r.ratio for r in results if r.operation == "memcpy"] == [1.0] * 4
    table = codec.table_of(results)
    assert len(table.rows) == len(kinds)
    assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.slow
def test_codec_speeds_by_target() -> None:
    program = codec.build()
    targets = codec.library.describe()["cpu_targets"]
    found = {
        target: codec.time_all(program, 4096, 1, target, codec.SPEEDS)
        for target in codec.TARGETS
        if target in targets
    }
    for times in found.values():
        assert {case.compressor for case in times} == {*codec.SPEEDS}
    table = codec.table_of_speeds(found)
    assert {len(row) for row in table.rows} <= {len(table.columns)}
    wanted = [row for row in table.rows if row[6]]
    assert len(wanted) == (6 if found else 0)  # entropy with two roundings, and lossless
