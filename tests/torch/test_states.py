"""States of hooks, averagers and optimizers in one process: errors and checkpoints."""

import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch import nn

from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops._core import environment
from cgx_ops.planner import AdaptiveBits, Plan
from cgx_ops.torch import BackendOptions, ddp
from cgx_ops.torch.diloco import DiLoCo
from cgx_ops.torch.optim import CompressedAdamW, Signum

MODEL = nn.Linear(4, 4)
PLAN = Plan(("weight", "bias"), (16, 4), (4, 4), ((1, 0),))


def test_state_preserves_its_carrier() -> None:
    state = ddp.QuantizedAllreduceState(config=Config(bits=8), carrier="c10d")
    native = ddp.QuantizedAllreduceState(config=Config(bits=4))
    state.load_state_dict(native.state_dict())
    assert (state.carrier, state.config.bits) == ("c10d", 4)
    native.load_state_dict(state.state_dict())
    assert native.carrier == "native"
    assert pickle.loads(pickle.dumps(state)).carrier == "c10d"
    for other, words in (
        (ddp.QuantizedAllreduceState(config=Config(bits=2, algorithm="ring")), "support algorithm"),
        (ddp.QuantizedAllreduceState(config=Config(bits=2), adaptive=AdaptiveBits()), "adaptive"),
        (ddp.QuantizedAllreduceState(auto_bits=True), "auto_bits"),
    ):
        with pytest.raises(InvalidArgument, match=f"carrier 'c10d' .*{words}"):
            state.load_state_dict(other.state_dict())
        assert state.config.bits == 4


KEEPS_NOTHING = Rules([("weight", {"error_feedback": False})])
VOTES = Rules([("0", {"compressor": "sign"})])
SENDERS: dict[str, Any] = {
    "sync_every": 1,
    "mean_over": "senders",
    "config": Config(compressor="topk"),
}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ddp.QuantizedAllreduceState(bits=1, rounding="nearest"),
            r"1 bit .*or Config\(error_feedback=False\)",
        ),
        (
            lambda: ddp.QuantizedAllreduceState(bits=cast(Any, [4])),
            r"Config.bits is \[4\]; it must be",
        ),
        (lambda: ddp.QuantizedAllreduceState(seed=2**63), "seed is 9223372036854775808"),
        (lambda: BackendOptions(seed=cast(Any, 0.5)), "seed is 0.5"),
        (
            lambda: BackendOptions(transport=cast(Any, "UCC")),
            "transport is 'UCC'; it must be None or one of",
        ),
        (lambda: BackendOptions(Config(compressor="topk"), auto_bits=True), "no bits to choose"),
        (lambda: CompressedAdamW(MODEL.parameters(), warmup_steps=1, rules=VOTES), "use Signum"),
        (lambda: Signum(MODEL.parameters(), config=Config(bits=4)), "compressor='sign'"),
        (lambda: DiLoCo(MODEL, **SENDERS, rules=KEEPS_NOTHING), "sent by 'topk', with error_f"),
    ],
)
def test_invalid_states(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make()


def test_power_sgd_sends_the_rest_exact_by_default() -> None:
    assert ddp.PowerSGDState().config.bits == ddp.PowerSGDState(bits=None).config.bits == 32
    assert ddp.PowerSGDState(bits=4).config.bits == 4
    assert ddp.PowerSGDState(compressor="levels").config.bits == 4


def test_auto_bits_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_AUTO_BITS", "1")
    assert BackendOptions().auto_bits
    assert not BackendOptions(Config(bits=2)).auto_bits
    for name, value in (("CGX_COMPRESSOR", "topk"), ("CGX_INTRA_COMPRESS", "1")):
        with pytest.raises(InvalidArgument, match="CGX_AUTO_BITS is '1'"):
            environment.check({"CGX_AUTO_BITS": "1", name: value})
