"""send, recv, isend, irecv and batch_isend_irecv of the backend. A rank program has the checks."""

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM = "run_torch_p2p.py"
NAMES = [f"{check} on {size}" for size in range(2, 5) for check in listed(PROGRAM)]
NAMES += listed(PROGRAM, "OF_WORLD")
BY_TORCHRUN = {"names": NAMES, "by": launch.torchrun, "env": tc.ENVIRONMENT}
OVER_TCP = {**BY_TORCHRUN, "env": {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "TCP"}}


@rank_checks(
    Launch(4, PROGRAM, **BY_TORCHRUN, timeout=240),
    Launch(4, PROGRAM, **OVER_TCP, timeout=240, marks=[pytest.mark.exhaustive]),
)
def test_messages(check: RankCheck) -> None:
    check.passes()


@pytest.mark.parametrize("transport", ["SHM", pytest.param("TCP", marks=pytest.mark.slow)])
def test_errors_name_the_lost_rank(transport: str) -> None:
    env = {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": transport}
    outputs = launch.torchrun(3, PROGRAM, "loss", env=env, check=False)
    for rank in (0, 2):
        assert outputs[rank].count(": named") == 2, outputs[rank]
