"""The training benchmarks run, small, on two ranks of this host, and report what they should."""

import json
from pathlib import Path

import launch
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TINY = ("--layers", "2", "--compute-ms", "1", "--rounds", "2", "--budget", "1")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("program", "first", "count"),
    [
        pytest.param("ddp_step.py", "gloo", 6, marks=pytest.mark.slow),
        pytest.param("jax_step.py", "lax.psum", 3, marks=pytest.mark.exhaustive),
    ],
)
def test_step_is_divided_into_phases(program: str, first: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    launch.mpirun(2, BENCHMARKS / program, *TINY, "--json", path, env=ONE_THREAD)
    report = json.loads(path.read_text())
    results, phases = report["results"], report["settings"]["phases"]
    assert [each["contender"] for each in results] == list(phases)
    assert len(results) == count
    assert results[0]["contender"] == first
    assert results[0]["speedup"] == 1
    assert report["settings"]["parameters"] == 2 * (1024 * 1024 + 1024)
    for each in results:
        assert each["communicate_s"] == max(0, each["seconds"] - each["compute_s"])
        assert phases[each["contender"]] == {
            "compute_s": each["compute_s"],
            "communicate_s": each["communicate_s"],
        }
    table = report["tables"][0]
    assert [row[0] for row in table["rows"]] == list(phases)


@pytest.mark.exhaustive
def test_training_reports_a_curve_for_each_contender(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    launch.mpirun(
        2,
        BENCHMARKS / "convergence.py",
        "--tasks",
        "digits",
        "--turns",
        2,
        "--json",
        path,
        env=ONE_THREAD,
    )
    report = json.loads(path.read_text())
    curves: dict[str, list[dict[str, float]]] = {}
    for point in report["results"]:
        assert point["task"] == "digits"
        curves.setdefault(point["contender"], []).append(point)
    assert list(curves) == ["gloo", "gloo, fp16 hook", "gloo, PowerSGD rank 4", "cgx 4 bits"]
    assert len({curve[0]["loss"] for curve in curves.values()}) == 1, "the same weights at first"
    assert len({curve[-1]["loss"] for curve in curves.values()}) == 4, "averages of four kinds"
    for contender, curve in curves.items():
        assert [point["step"] for point in curve] == [0, 10, 20]
        assert 0 == curve[0]["seconds"] < curve[1]["seconds"] < curve[2]["seconds"]
        assert curve[2]["loss"] < curve[0]["loss"], f"{contender} learned nothing"
    lowest_of_all = max(min(point["loss"] for point in curve) for curve in curves.values())
    assert f"time to {lowest_of_all:.3f}" in report["tables"][0]["columns"]
