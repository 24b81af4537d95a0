"""cgx_ops.torch.all_to_all, and all_to_all_single of the backend. A rank program has the checks."""

import pytest
from support.rank_checks import RankCheck, rank_checks
from support.torch_groups import over_groups

PROGRAM, REST = "run_torch_all_to_all.py", ("backend", "bad_calls")


@rank_checks(
    over_groups(2, PROGRAM, *REST), over_groups(4, PROGRAM, *REST, marks=[pytest.mark.slow])
)
def test_exchanges(check: RankCheck) -> None:
    check.passes()
