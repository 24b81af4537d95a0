"""carrier="c10d" under torchrun, without MPI: the rank program has what is shown."""

import uuid

import pytest
from support import launch
from support import torch_cases as tc


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "n", [pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.exhaustive)]
)
def test_gloo_carries_the_same_bits(n: int) -> None:
    salt = uuid.uuid4().hex
    launch.check_ok(
        launch.torchrun(n, "run_torch_carried.py", salt, env=tc.ENVIRONMENT, timeout=300)
    )
