"""Checks of invalid calls, made on every rank, each followed by a collective that works."""

import re

import torch
from support import torch_cases as tc
from support.torch_bad_calls import BAD_CALLS
from torch._dynamo.exc import TorchRuntimeError

import cgx_ops

SIZE = cgx_ops.size()


def check_collective() -> None:
    """Check that the communicator of all ranks still works."""
    assert tc.allreduce(torch.ones(20), 32).tolist() == [SIZE] * 20


def bad_calls() -> None:
    for case, (call, kind, text) in BAD_CALLS.items():
        try:
            call()
        except kind as error:
            assert re.search(text, str(error), re.DOTALL), (case, str(error))
        else:
            raise AssertionError(f"{case}: not refused")
        check_collective()


def mismatched_ranks() -> None:
    """Check that all ranks get an error and the communicator still works."""
    try:
        tc.allreduce(torch.ones(100 + cgx_ops.rank()))
    except torch.distributed.DistBackendError as error:
        assert all(str(100 + rank) in str(error) for rank in range(SIZE)), str(error)
    else:
        raise AssertionError("different shapes: no error")
    check_collective()


def bad_call_while_tracing() -> None:
    """Check that the tracer's exception contains the error, the same on every rank."""
    try:
        torch.compile(lambda x: tc.allreduce(x, 9), fullgraph=True, backend="aot_eager")(
            torch.ones(9)
        )
    except TorchRuntimeError as error:
        assert "bits is 9; it must be an integer from 1 to 8, or 32" in str(error), str(error)
    else:
        raise AssertionError("compiled: not refused")
    check_collective()


CHECKS = [bad_calls, mismatched_ranks, bad_call_while_tracing]
