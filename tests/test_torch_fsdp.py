"""FSDP2 whose collectives are compressed: every message to the bit, every way to train, HSDP."""

import re

import launch
import pytest
import torch_cases as tc
from torch import nn

from cgx_ops import InvalidArgument
from cgx_ops.torch import fsdp


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_ranks(ranks: int) -> None:
    outputs = launch.mpirun(ranks, "run_torch_fsdp.py", ranks, env=tc.ENVIRONMENT, timeout=150)
    for output in outputs:
        assert output.rstrip().endswith("ok all"), output


def test_a_model_without_fsdp_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=re.escape("fully_shard before compress")):
        fsdp.compress(nn.Linear(2, 2))


def test_state_goes_on_from_its_state_dict() -> None:
    state = fsdp.State()
    seeds = [state.weights_seed(0, name) for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1]
    other = fsdp.State()
    other.load_state_dict({"draws": 7, "reductions": 3, "used": 1})
    assert other.state_dict() == {"draws": 7, "reductions": 3, "used": 1}
    assert other.weights_seed(0, "a") != seeds[0]
    assert other.state_dict() == {"draws": 8, "reductions": 3, "used": 0}
