"""compress_collectives() under torchrun: see the rank program for what is shown."""

import uuid

import launch
import pytest
import torch_cases as tc


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("in_turns", marks=pytest.mark.slow),
        pytest.param("each", marks=pytest.mark.exhaustive),
    ],
)
def test_collectives_in_graphs_are_compressed(how: str) -> None:
    """Every check on one of two groups, whose carriers differ, or on each."""
    arguments = (uuid.uuid4().hex, how)
    launch.check_ok(
        launch.torchrun(2, "run_torch_rewrite.py", *arguments, env=tc.ENVIRONMENT, timeout=300)
    )
