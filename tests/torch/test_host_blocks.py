"""Hierarchical reduce_scatter and all_gather in functions, FSDP2 and HSDP, on simulated hosts."""

import pytest
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

PROGRAM, slow = "run_torch_host_blocks.py", [pytest.mark.slow]


@rank_checks(
    Launch(3, PROGRAM, "functions", env=tc.ENVIRONMENT, hosts="a,a,b", timeout=150, marks=slow),
    Launch(4, PROGRAM, env=tc.ENVIRONMENT, hosts="a,b,a,b", timeout=200, marks=slow),
)
def test_on_hosts(check: RankCheck) -> None:
    check.passes()
