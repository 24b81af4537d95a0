"""cgx_ops.torch.all_reduce and related functions. The checks are in the rank program."""

import pytest
from support.rank_checks import RankCheck, rank_checks
from support.torch_groups import over_groups

PROGRAM, REST = "run_torch_functional.py", ("group_forms", "bad_calls")


@rank_checks(
    over_groups(2, PROGRAM, *REST), over_groups(4, PROGRAM, *REST, marks=[pytest.mark.slow])
)
def test_functions_over_gloo(check: RankCheck) -> None:
    check.passes()
