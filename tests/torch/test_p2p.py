"""send, recv, isend, irecv and batch_isend_irecv of the backend. Rank programs have the checks."""

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM, ERRORS = "run_torch_p2p.py", "run_torch_p2p_errors.py"
LEAVING = "run_torch_p2p_leaving.py"
NAMES = [f"{check} on {size}" for size in range(2, 5) for check in listed(PROGRAM)]
ON_THREE = [name for name in NAMES if not name.endswith("4")]
BY_TORCHRUN = {"by": launch.torchrun, "env": tc.ENVIRONMENT}
OVER_TCP = {"by": launch.torchrun, "env": {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "TCP"}}
ON_HOSTS = {"by": launch.torchrun, "env": {**tc.ENVIRONMENT, "CGX_TEST_HOSTS": "a,b,a"}}
OVER_MPI = {"by": launch.mpirun, "env": {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": "MPI"}}


@rank_checks(
    Launch(3, PROGRAM, names=ON_THREE, timeout=240, **BY_TORCHRUN),
    Launch(4, PROGRAM, names=NAMES, timeout=240, marks=[pytest.mark.slow], **BY_TORCHRUN),
    Launch(4, PROGRAM, names=NAMES, timeout=240, marks=[pytest.mark.exhaustive], **OVER_TCP),
    Launch(3, PROGRAM, names=ON_THREE, timeout=240, marks=[pytest.mark.slow], **ON_HOSTS),
    Launch(3, PROGRAM, names=ON_THREE, timeout=240, marks=[pytest.mark.exhaustive], **OVER_MPI),
    Launch(2, ERRORS, marks=[pytest.mark.slow], **BY_TORCHRUN),
    Launch(2, ERRORS, marks=[pytest.mark.slow], **OVER_TCP),
    Launch(3, LEAVING, marks=[pytest.mark.slow], **BY_TORCHRUN),
    Launch(3, LEAVING, marks=[pytest.mark.exhaustive], **OVER_TCP),
)
def test_messages(check: RankCheck) -> None:
    check.passes()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["SHM", "TCP"])
def test_errors_name_the_lost_rank(transport: str) -> None:
    env = {**tc.ENVIRONMENT, "COMMUNICATOR_TYPE": transport}
    outputs = launch.torchrun(3, ERRORS, "loss", env=env, check=False)
    for rank in (0, 2):
        assert outputs[rank].count(": named") == 2, outputs[rank]
