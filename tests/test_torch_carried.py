"""carrier="c10d" under torchrun, without MPI: the rank program has what is shown."""

import uuid

import launch
import pytest
import torch_cases as tc


@pytest.mark.timeout(320)
def test_gloo_carries_the_same_bits() -> None:
    salt = uuid.uuid4().hex
    for output in launch.torchrun(4, "run_torch_carried.py", salt, env=tc.ENVIRONMENT, timeout=300):
        assert output.rstrip().endswith("ok all"), output
