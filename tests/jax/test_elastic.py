"""examples/jax_elastic.py: processes that lose one of them save, and a smaller job continues."""

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cgx_ops.jax import consolidate

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("jax_elastic", EXAMPLES / "jax_elastic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_last_common_step(example: ModuleType) -> None:
    weights, ahead = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    saved = [
        {4: [weights, np.full((1, 2), 0.0)], 5: [ahead, np.full((1, 2), 9.0)]},
        {3: [ahead, np.full((1, 2), 9.0)], 4: [weights, np.full((1, 2), 1.0)]},
    ]
    step, (same, own) = example.joined(saved, [False, True])
    assert step == 4
    assert same is weights
    assert own.tolist() == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="no step is in all files"):
        example.joined([{1: []}, {2: []}], [])
    with pytest.raises(ValueError, match="step 1: replicated values differ"):
        example.joined([{1: [weights]}, {1: [ahead]}], [False])


def test_residuals_are_conserved(example: ModuleType) -> None:
    """The mean of the survivors' residuals is that of any number of devices of the next job."""
    from cgx_ops.jax._src.transforms.average_gradients import AverageGradientsState

    random = np.random.default_rng(0)
    own = [random.standard_normal((1, 50)).astype(np.float32) for _ in range(3)]
    _, leaves = example.joined([{7: [np.int32(7), each]} for each in own], [False, True])
    state = AverageGradientsState(jnp.asarray(leaves[0]), jnp.asarray(leaves[1]))
    want = np.concatenate(own).astype(np.float64).mean(0)
    # A sum of three rounds twice and the quotient once; partial sums are below 16.
    assert np.abs(np.concatenate(own)).max() * 3 < 16
    bound = 3 * 2.0**-24 * 16
    for devices in (1, 2, 3, 8):
        residual = np.asarray(consolidate(state, devices).residual, np.float64)
        assert residual.shape == (devices, 50)
        assert np.abs(residual.mean(0) - want).max() <= bound


def lines_of(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_shrink_and_continue(example: ModuleType, tmp_path: Path) -> None:
    """Kill a process of four, then one of three; two end the training."""
    command = [sys.executable, str(EXAMPLES / "jax_elastic.py"), "--folder", str(tmp_path)]
    done = subprocess.run(
        [*command, "--processes", "4", "--steps", "90", "--kill", "25", "50"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = lines_of(done.stdout)
    jobs = [line["statuses"] for line in lines if "job" in line]
    assert jobs == [[75, 75, 75, -9], [75, 75, -9], [0, 0]]
    resumed = [(line["resumed"], line["processes"]) for line in lines if "resumed" in line]
    assert [processes for _, processes in resumed] == [4, 3, 2]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    for (first, _), (at, _) in itertools.pairwise(resumed):
        # Each job continues from the last step of all survivors.
        assert first < at <= 90
        saved = [example.load(file) for file in (tmp_path / str(resumed.index((at, _)))).glob("*")]
        assert max(set.intersection(*map(set, saved))) == at
    means = [np.mean([losses[s] for s in range(a, a + 10)]) for a in (1, resumed[1][0] - 9, 81)]
    assert means[0] > 1.5 * means[1], means
    assert means[1] > 1.2 * means[2], means
    # The same state gives the same weights again.
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda line, **_: printed.append(line))
        (tmp_path / "again").mkdir()
        statuses = example.run_job(2, 90, [], tmp_path / "2", tmp_path / "again")
    assert statuses == [0, 0]
    assert lines_of("\n".join(printed))[-1] == lines[-2]
