"""cgx_ops.torch.all_to_all, and all_to_all_single of the backend. A rank program has the checks."""

from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM = "run_torch_all_to_all.py"
NAMES = [
    f"{check} on {size}"
    for size in range(1, 5)
    for check in listed(PROGRAM) + (listed(PROGRAM, "ON_TWO") if size == 2 else [])
]
NAMES += ["backend", "bad_calls"]


@rank_checks(Launch(4, PROGRAM, names=NAMES, by=launch.torchrun, env=tc.ENVIRONMENT, timeout=300))
def test_exchanges(check: RankCheck) -> None:
    check.passes()
