"""The training benchmarks run, with small sizes, on two ranks of this host; their reports."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import adamw
import adamw_training
import convergence
import documents
import numpy as np
import pytest
import torch
from hosts import refusal
from small_tasks import Task, digits
from support import launch

from cgx_ops import Communicator, Config
from cgx_ops._core.text_table import Table

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("--layers", "2", "--compute-ms", "1", "--rounds", "2", "--budget", "1")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("program", "first", "count"),
    [
        pytest.param("ddp_step.py", "gloo", 6, marks=pytest.mark.slow),
        pytest.param("jax_step.py", "lax.psum", 4, marks=pytest.mark.exhaustive),
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


# ---- time to the same loss -----------------------------------------------------------------------


def curve(method: str, losses: list[float], warmup: int = 0) -> dict[str, Any]:
    """Return a curve with a point every ten steps, in the format of the examples."""
    return {
        "method": method,
        "ours": method != "gloo",
        "warmup": warmup,
        "steps": [10 * (i + 1) for i in range(len(losses))],
        "losses": losses,
        "score": 50 + losses[-1],
    }


@pytest.mark.parametrize(
    ("losses", "target", "steps"),
    [
        ([3, 2, 1], 2, 20),
        ([3, 2, 1], 1.5, 25),
        ([3, 2, 1], 4, 10),  # at the first point already
        ([3, 1, 4, 0], 1, 20),  # the first time counts
        ([3, 2, 1], 0.5, None),
    ],
)
def test_target_between_points(losses: list[float], target: float, steps: float | None) -> None:
    assert convergence.crossing(curve("x", losses), target) == steps


def test_time_to_loss() -> None:
    exact = [float(loss) for loss in range(20, 0, -1)]
    curves = {
        "gloo": [curve("gloo", exact)] * 3,  # 9 after 120 of 200 steps
        "fast": [curve("fast", [x / 2 for x in exact], warmup=10)] * 3,  # 9 after 30
        "once": [curve("once", x) for x in (exact, [9.5] * 20, [9.5] * 20)],
    }
    seconds = {"gloo": 1.0, "fast": 0.1, "warm-up of fast": 0.5, "once": 0.01}
    seconds["compute alone"] = 0.005
    gloo, fast, once = convergence.outcomes(curves, seconds)
    assert (gloo.reached, gloo.seconds) == (120, 120)
    assert (fast.reached, fast.seconds) == (30, 10 * 0.5 + 20 * 0.1)
    assert fast.curve[0] == (10 * 0.5, 10)
    assert (once.reached, once.seconds) == (None, None)
    assert once.score == pytest.approx((51 + 59.5 + 59.5) / 3)
    cell = convergence.Cell("task", 2, "1gbit")
    default = replace(fast, method="4 bits", seconds=60)
    row = convergence.winners_table({cell: [gloo, fast, once, default]}).rows[0]
    assert row[:5] == ["task", "2", "1gbit", "gloo", "120 s"]
    assert row[5:] == ["60.0 s", "2.00", "fast", "7.00 s", "17.14"]
    row = convergence.winners_table({cell: [gloo, once]}).rows[0]
    assert row[5:] == ["-", "", "none", "-", ""]


def test_tables_replace_text_between_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin a -->\nold\n<!-- end a -->\nafter\n")
    table = Table("title", ["who", "s"], [["x", "1"]], notes=["A note."])
    body = "| who | s |\n| --- | ---: |\n| x | 1 |\n\nA note."
    for _ in range(2):
        documents.insert(page, {"a": documents.body_of(table)})
        assert page.read_text() == f"before\n<!-- begin a -->\n\n{body}\n\n<!-- end a -->\nafter\n"
    with pytest.raises(ValueError, match="has no lines '<!-- begin b -->'"):
        documents.insert(page, {"b": ""})


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_methods_are_compared_on_hosts(tmp_path: Path) -> None:
    path, plot = tmp_path / "report.json", tmp_path / "plot.png"
    small = ["--tasks", "boxes", "--hosts", "2", "--rates", "1gbit", "--seeds", "0", "1"]
    small += ["--steps", "20", "--budget", "1", "--methods", "4 bits"]
    page = tmp_path / "page.md"
    names = ("fastest", "speed-ups", "scores")
    page.write_text("".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names))
    files = ["--json", str(path), "--plot", str(plot), "--docs", str(page)]
    program = [sys.executable, str(BENCHMARKS / "convergence.py"), *small, *files]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    gloo, few = json.loads(path.read_text())["results"]
    assert (gloo["method"], few["method"]) == ("gloo", "4 bits")
    assert gloo["curve"][-1][1] != few["curve"][-1][1], "the second did not quantize"
    for each in (gloo, few):
        assert (each["task"], each["hosts"], each["rate"]) == ("boxes", 2, "1gbit")
        assert each["curve"][-1][0] == pytest.approx(20 * each["step"])
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    text = page.read_text()
    assert "| boxes | 2 | 1gbit |" in text
    assert text.count("| 4 bits |") >= 2


# ---- AdamW ---------------------------------------------------------------------------------------


@pytest.fixture
def comms() -> Iterator[list[Communicator]]:
    comms = Communicator.local(adamw_training.RANKS)
    yield comms
    for comm in comms:
        comm.close()


@pytest.fixture(scope="module")
def task() -> Task:
    return digits()


@pytest.mark.parametrize("usual", [{}, {"decay": 0.5, "floor": 0.2, "norm": 0.1}])
def test_exact_adamw_is_torchs(
    usual: dict[str, float], task: Task, comms: list[Communicator]
) -> None:
    steps, rate = 5, 1e-2
    task = replace(task, **usual)
    ours, theirs = (adamw_training.Training(task, 0, rate, steps) for _ in range(2))
    averager = adamw_training.Averager(comms, ours.model, Config(32))
    moments = adamw_training.Moments(ours.numel)
    parameters = [*theirs.model.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, rate, adamw_training.BETAS, adamw_training.EPS, task.decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, adamw_training.schedule(steps, task.floor)
    )
    for _ in range(steps):
        ours.step(
            moments.update(adamw_training.clipped(averager.mean(ours.gradients()), task.norm))
        )
        mean = torch.from_numpy(np.mean(theirs.gradients(), 0))
        for p, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        torch.nn.utils.clip_grad_norm_(parameters, task.norm)
        optimizer.step()
        schedule.step()
    for mine, other in zip(ours.model.parameters(), parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    found = adamw_training.train(comms, task, adamw_training.EXACT, 0, rate, steps)
    assert found.loss == ours.result()[0]


def test_rates_rise_and_fall_to_the_floor() -> None:
    factors = [adamw_training.schedule(100, 0.1)(step) for step in range(101)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert factors[-1] == pytest.approx(0.1)
    assert factors[5:] == sorted(factors[5:], reverse=True)


@pytest.mark.parametrize("method", adamw_training.METHODS)
def test_every_method_trains_under_adamw(
    method: str, task: Task, comms: list[Communicator]
) -> None:
    found = adamw_training.train(comms, task, method, 0, 1e-3, 10)
    assert found.loss < 2.5
    exact = "exact" in method
    assert found.bits == pytest.approx(32, abs=0.1) if exact else 0.5 < found.bits < 11


def test_losses_are_compared_with_exact_adamw_of_the_same_seed() -> None:
    def trained(method: str, seed: int, rate: float, loss: float) -> adamw_training.Trained:
        return adamw_training.Trained("digits", method, seed, rate, 10, loss, 90.0, 4.0)

    found = [trained("exact", s, r, 1 + s + r) for s in (0, 1) for r in (0.3, 0.1)]
    found += [trained("4 bits", s, r, 1.5 + s + r) for s in (0, 1) for r in (0.3, 0.1)]
    found += [trained("1-bit Adam", s, 0.3, [math.nan, 2.3][s]) for s in (0, 1)]
    found += [trained("exact", s, 0.9, 9.0) for s in (0, 1)]
    assert adamw.best_rate(found, "digits") == 0.1
    assert adamw.differences(found, "digits", "4 bits", 0.3) == pytest.approx([0.5, 0.5])
    row = adamw.summary_of(found).rows[1]
    assert row == ["4 bits", "4.0", "+0.500 ± 0.000"]
    text = adamw.spread(adamw.differences(found, "digits", "1-bit Adam", 0.3))
    assert text == "1 of 2 diverge"


def test_trainings_of_different_lengths_are_not_merged(tmp_path: Path) -> None:
    paths = [tmp_path / "short.json", tmp_path / "long.json"]
    for path, steps in zip(paths, (10, 20), strict=True):
        trained = adamw_training.Trained("digits", "exact", 0, 0.1, steps, 1.0, 90.0, 32.0)
        adamw.report_of([trained]).write(path)
    assert len(adamw.read(paths[:1])) == 1
    with pytest.raises(SystemExit, match="different lengths"):
        adamw.read(paths)
