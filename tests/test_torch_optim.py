"""OneBitAdam and Signum: the rank program says what is shown."""

import launch
import pytest
import torch_cases as tc


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "n", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_optimizers(n: int) -> None:
    for output in launch.mpirun(n, "run_torch_optim.py", env=tc.ENVIRONMENT, timeout=100):
        assert output.rstrip().endswith("ok all"), output
