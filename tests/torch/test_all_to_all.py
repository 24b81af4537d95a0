"""cgx_ops.torch.all_to_all, and all_to_all_single of the backend. A rank program has the checks."""

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks
from support.torch_groups import over_groups

PROGRAM, REST = "run_torch_all_to_all.py", ("backend", "bad_calls")
BLOCKS = "run_torch_blocks.py"
OVER_TCP = {"by": launch.torchrun, "env": {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "TCP"}}


@rank_checks(
    over_groups(2, PROGRAM, *REST),
    over_groups(4, PROGRAM, *REST, marks=[pytest.mark.slow]),
    Launch(8, BLOCKS, "small_blocks", marks=[pytest.mark.slow], **OVER_TCP),
    Launch(8, BLOCKS, "large_blocks", marks=[pytest.mark.exhaustive], **OVER_TCP),
)
def test_exchanges(check: RankCheck) -> None:
    check.passes()
