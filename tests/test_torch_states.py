"""States of hooks, averagers and optimizers in one process: what they refuse, and what is saved."""

import pickle

import pytest
from torch import nn

from cgx_ops import Config, InvalidArgument
from cgx_ops.planner import AdaptiveBits, Plan
from cgx_ops.torch import ddp

MODEL = nn.Linear(4, 4)
PLAN = Plan(("weight", "bias"), (16, 4), (4, 4), ((1, 0),))


def test_a_state_keeps_its_carrier() -> None:
    state = ddp.QuantizedAllreduceState(config=Config(bits=8), carrier="c10d")
    native = ddp.QuantizedAllreduceState(config=Config(bits=4))
    state.load_state_dict(native.state_dict())
    assert (state.carrier, state.config.bits) == ("c10d", 4)
    native.load_state_dict(state.state_dict())
    assert native.carrier == "native"
    assert pickle.loads(pickle.dumps(state)).carrier == "c10d"
    for other, words in (
        (ddp.QuantizedAllreduceState(config=Config(bits=2, algorithm="ring")), "no algorithm"),
        (ddp.QuantizedAllreduceState(config=Config(bits=2), adaptive=AdaptiveBits()), "adaptive"),
        (ddp.QuantizedAllreduceState(auto_bits=True), "auto_bits"),
    ):
        with pytest.raises(InvalidArgument, match=f"carrier 'c10d' .*{words}"):
            state.load_state_dict(other.state_dict())
        assert state.config.bits == 4
