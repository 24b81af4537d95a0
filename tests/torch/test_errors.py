"""Errors of torch.ops.cgx, and the state after a failure.

ranks/torch_refused.py, run by torch/test_compile.py, tests several processes.
"""

import re
import time
from typing import Any

import pytest
import torch
from support import launch
from support import torch_cases as tc
from support.torch_bad_calls import BAD_CALLS

import cgx_ops
from cgx_ops import Communicator
from cgx_ops._core import binary
from cgx_ops.torch import ddp
from cgx_ops.torch.backend import errors


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_name_the_remedy(case: str) -> None:
    call, kind, text = BAD_CALLS[case]
    cgx_ops.init()  # the world now exists
    state = torch.get_rng_state()
    with pytest.raises(kind, match=re.compile(text, re.DOTALL)):
        call()
    if "group" not in case:  # known only when the collective starts
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "case", ["int64", "bits 9", "bucket_size 0", "op", "op at 4 bits", "rounding", "algorithm"]
)
def test_errors_on_the_meta_device(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, kind, text = BAD_CALLS[case]
    monkeypatch.setattr("support.torch_bad_calls.X", torch.ones(40, device="meta"))
    with pytest.raises(kind, match=re.compile(text, re.DOTALL)):
        call()


def test_meta_tensors_pass() -> None:
    x = torch.ones(3, 4, device="meta", dtype=torch.bfloat16)
    y = tc.allreduce(x)
    tc.allreduce_(x)
    assert (y.shape, y.dtype, y.device.type) == (x.shape, x.dtype, "meta")


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        ({"numel": 900}, {"numel": 901}),
        ({"bits": 4}, {"bits": 8}),
        ({"bucket_size": 64}, {"bucket_size": 512}),
        ({"op": "sum"}, {"op": "avg"}),
        ({"dtype": torch.float16}, {"dtype": torch.bfloat16}),
    ],
    ids=["shape", "bits", "bucket_size", "op", "dtype"],
)
def test_mismatched_ranks(mine: dict[str, Any], yours: dict[str, Any]) -> None:
    def rank_program(rank: int, comm: Communicator) -> str:
        options = dict(mine if rank == 0 else yours)
        x = torch.ones(options.pop("numel", 900), dtype=options.pop("dtype", torch.float32))
        with pytest.raises(errors.MismatchError) as failure:
            tc.allreduce(x, group_name=comm.name, **options)
        whole = tc.allreduce(torch.ones(1), 32, group_name=comm.name)
        assert whole.item() == 2
        return str(failure.value)

    texts = launch.threads(2, rank_program)
    for text in texts:  # on both ranks, with both values
        for side in (mine, yours):
            (value,) = side.values()
            assert str(value).removeprefix("torch.") in text, text


def test_missing_rank() -> None:
    comms = Communicator.local(2, timeout=1)
    started = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match="1"):
        tc.allreduce(torch.ones(100), group_name=comms[0].name)
    assert 0.5 < time.monotonic() - started < 10
    with pytest.raises(errors.Closed, match="closed"):
        tc.allreduce(torch.ones(100), group_name=comms[0].name)
    for comm in comms:
        comm.close()
    assert tc.allreduce(torch.ones(5)).sum() == 5  # the world is a different communicator


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("quantized_allreduce_hook", "QuantizedAllreduceState"),
        ("planned_allreduce_hook", "PlannedAllreduceState"),
        ("power_sgd_hook", "PowerSGDState"),
        ("batched_power_sgd_hook", "PowerSGDState"),
        ("deep_gradient_hook", "DeepGradientState"),
    ],
)
def test_hooks_name_the_state_that_they_need(hook: str, kind: str) -> None:
    """Pass None as the state, which torch's hooks hand over at the first backward."""
    bucket: Any = None
    with pytest.raises(ValueError, match=f"^{hook}: the state is NoneType; it must be a {kind}: "):
        getattr(ddp, hook)(None, bucket)


def test_error_for_a_different_torch_version() -> None:
    with pytest.raises(ImportError, match=r"built for torch .* 2\.0\.1 is installed"):
        binary.require_binding("torch", "2.0.1")
