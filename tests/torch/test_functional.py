"""cgx_ops.torch.all_reduce and related functions. The checks are in the rank program."""

from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM = "run_torch_functional.py"
NAMES = [
    f"{check} on {size}"
    for size in range(1, 5)
    for check in listed(PROGRAM) + (listed(PROGRAM, "ON_TWO") if size == 2 else [])
]
NAMES += ["group_forms", "bad_calls"]


@rank_checks(Launch(4, PROGRAM, names=NAMES, by=launch.torchrun, env=tc.ENVIRONMENT, timeout=300))
def test_functions_over_gloo(check: RankCheck) -> None:
    check.passes()
