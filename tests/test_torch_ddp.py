"""DistributedDataParallel with the quantized hook: the rank program says what is shown."""

from pathlib import Path

import launch
import pytest
import torch_cases as tc


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_ddp(n: int) -> None:
    for output in launch.mpirun(n, "run_torch_ddp.py", env=tc.ENVIRONMENT, timeout=180):
        assert output.rstrip().endswith("ok all"), output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_feedback_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    for n, phase in ((2, "save"), (4, "load"), (1, "load")):
        outputs = launch.mpirun(
            n, "run_torch_restart.py", tmp_path, phase, env=tc.ENVIRONMENT, timeout=60
        )
        for output in outputs:
            assert output.rstrip().endswith("ok all"), output
