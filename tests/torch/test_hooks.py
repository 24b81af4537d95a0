"""PowerSGD, Deep Gradient Compression, PyTorch's features around hooks, and outer loops.

The checks are in the rank programs. All checks of two ranks share a launch.
"""

from pathlib import Path

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

PROGRAM = "run_torch_hooks.py"
DAILY = ["power_sgd.values.*matches_reference", "pytorchs_trajectory_by_default"]
DAILY += ["power_sgd.values.conservation", "power_sgd.state.*"]
DAILY += ["deep_gradient.values.default_method", "deep_gradient.values.not_finite"]
DAILY += ["deep_gradient.state.resumed", "optimizers"]
DAILY += ["diloco.*", "diloco_ranks.*", "hooks.together.*", "hooks.again.*"]
DAILY += ["by_name", "bad_names", "zero_redundancy", "post_local_sgd"]
DAILY += ["optim.resumed_on_other_rank_count", "optim.exact_by_rules", "optim.mismatched_settings"]
DAILY += [f"hooks.*.{check}" for check in ("matches_reference", "bytes_sent", "resumed")]
DAILY += ["hooks.grad_scaler.*", "hooks.failing_rank.*"]
# Ambient settings; skipped steps and failures on one rank, with a deadline of 300 seconds.
ON_THREE = [f"hooks.{each}.*" for each in ("ambient", "grad_scaler", "failing_rank", "names")]
LONGER = ["pytorchs_trajectory_with_its_options", "residuals_stay_bounded", "recommended_codecs"]

slow, exhaustive = [pytest.mark.slow], [pytest.mark.exhaustive]


@rank_checks(
    Launch(2, PROGRAM, *DAILY, env=tc.ENVIRONMENT, timeout=250),
    Launch(3, PROGRAM, *ON_THREE, env=tc.ENVIRONMENT, timeout=150, marks=exhaustive),
    Launch(1, PROGRAM, "hooks.optim.*", env=tc.ENVIRONMENT, timeout=250, marks=slow),
    Launch(2, PROGRAM, *LONGER, env=tc.ENVIRONMENT, timeout=250, marks=slow),
)
def test_hooks(check: RankCheck) -> None:
    check.passes()


@rank_checks(
    *(
        Launch(n, PROGRAM, f"{module}.*", env=tc.ENVIRONMENT, timeout=550, marks=exhaustive)
        for module, n in [
            *(("power_sgd", n) for n in (2, 4)),
            *(("deep_gradient", n) for n in (1, 2, 4)),
            *(("hooks", n) for n in (2, 4)),
        ]
    )
)
def test_all(check: RankCheck) -> None:
    check.passes()


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_other_rank_counts(tmp_path: Path) -> None:
    """Load the state of two ranks on four, and on one."""
    for n, phase in ((2, "save"), (4, "load"), (1, "load")):
        launch.check_ok(
            launch.mpirun(
                n, "run_torch_restart.py", tmp_path, phase, env=tc.ENVIRONMENT, timeout=90
            )
        )
