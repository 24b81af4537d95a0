"""PowerSGD, Deep Gradient Compression, what PyTorch builds around hooks, and outer loops.

The rank programs say what is shown. All checks of two ranks share a launch.
"""

from pathlib import Path

import pytest
from support import launch
from support import torch_cases as tc

PROGRAM = "run_torch_hooks.py"
DAILY = ["power_sgd.values.*as_the_reference", "pytorchs_trajectory_by_default"]
DAILY += ["power_sgd.values.nothing_is_given_up", "power_sgd.state.*"]
DAILY += ["deep_gradient.values.the_method", "deep_gradient.values.not_finite"]
DAILY += ["deep_gradient.state.resumed", "optimizers"]
DAILY += ["diloco.*", "diloco_ranks.*", "hooks.together.*", "hooks.again.*"]
DAILY += ["by_name", "bad_names", "zero_redundancy", "post_local_sgd"]
DAILY += ["optim.another_number_of_ranks"]
DAILY += [f"hooks.*.{check}" for check in ("as_the_reference", "what_is_sent", "resumed")]


def run(n: int, *checks: str, timeout: float) -> None:
    launch.check_ok(launch.mpirun(n, PROGRAM, *checks, env=tc.ENVIRONMENT, timeout=timeout))


@pytest.mark.timeout(270)
def test_two_ranks() -> None:
    run(2, *DAILY, timeout=250)


@pytest.mark.timeout(110)
def test_three_ranks() -> None:
    """Settings of the caller; a rank that skips a step, or fails: the deadline is 300 seconds."""
    run(
        3,
        "hooks.ambient.*",
        "hooks.grad_scaler.*",
        "hooks.failing_rank.*",
        "hooks.names.*",
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.timeout(270)
@pytest.mark.parametrize(
    ("n", "checks"),
    [
        (1, ["hooks.optim.*"]),
        (2, ["pytorchs_trajectory_with_its_options", "residuals_stay_bounded"]),
    ],
)
def test_one_rank_and_longer(n: int, checks: list[str]) -> None:
    run(n, *checks, timeout=250)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "n"),
    [
        *(("power_sgd", n) for n in (2, 4)),
        *(("deep_gradient", n) for n in (1, 2, 4)),
        *(("hooks", n) for n in (2, 4)),
    ],
)
def test_all(module: str, n: int) -> None:
    run(n, f"{module}.*", timeout=550)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """What two ranks have saved, four load, and one."""
    for n, phase in ((2, "save"), (4, "load"), (1, "load")):
        launch.check_ok(
            launch.mpirun(
                n, "run_torch_restart.py", tmp_path, phase, env=tc.ENVIRONMENT, timeout=90
            )
        )
