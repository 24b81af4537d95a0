"""cgx_ops.torch.all_reduce and its kin: the rank program has what is shown."""

import pytest
from support import launch
from support import torch_cases as tc


@pytest.mark.timeout(320)
def test_functions_over_gloo() -> None:
    launch.check_ok(launch.torchrun(4, "run_torch_functional.py", env=tc.ENVIRONMENT, timeout=300))
