"""DistributedDataParallel with the quantized hook. The checks are in the rank program."""

import pytest
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

PROGRAM = "run_torch_ddp.py"


@rank_checks(
    Launch(3, PROGRAM, env=tc.ENVIRONMENT, timeout=180),
    Launch(2, PROGRAM, env=tc.ENVIRONMENT, timeout=180, marks=[pytest.mark.exhaustive]),
)
def test_ddp(check: RankCheck) -> None:
    check.passes()
