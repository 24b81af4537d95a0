"""DistributedDataParallel with the quantized hook: the rank program says what is shown."""

import pytest
from support import launch
from support import torch_cases as tc


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_ddp(n: int) -> None:
    launch.check_ok(launch.mpirun(n, "run_torch_ddp.py", env=tc.ENVIRONMENT, timeout=180))
