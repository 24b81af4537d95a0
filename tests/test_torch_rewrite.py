"""compress_collectives() under torchrun: see the rank program for what is shown."""

import uuid

import launch
import pytest
import torch_cases as tc


@pytest.mark.timeout(320)
def test_collectives_in_graphs_are_compressed() -> None:
    salt = uuid.uuid4().hex
    for output in launch.torchrun(2, "run_torch_rewrite.py", salt, env=tc.ENVIRONMENT, timeout=300):
        assert output.rstrip().endswith("ok all"), output
