"""A rank that fails between messages: the other ranks raise its reason before any deadline.

The test ends before the deadline of the groups, so a rank that waits makes it fail.

1. hooks: in a callback, and before the first message
2. averages of lists: outer loops, optimizers
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, backward, identical_on_all_ranks, network, weights_of

from cgx_ops import Config
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging import exchange
from cgx_ops.torch.averaging.power_sgd.linear_algebra import Matrices
from cgx_ops.torch.ddp import bucket
from cgx_ops.torch.ddp import hook as ddp_hook
from cgx_ops.torch.ddp.deep_gradient import hook as ddp_deep_gradient
from cgx_ops.torch.ddp.deep_gradient.hook import _Layer
from cgx_ops.torch.diloco import sparse_loco
from cgx_ops.torch.optim import CompressedAdamW, Signum

REASON = "ValueError: an accident"
LEVELS = Config(bits=1, compressor="levels", bucket_size=64, residual_decay=0.9)


@contextlib.contextmanager
def accident(of: Any, name: str) -> Iterator[None]:
    """Make a function raise on rank 1."""
    if RANK != 1:
        yield
        return
    with mock.patch.object(of, name, side_effect=ValueError("an accident")):
        yield


def fails_everywhere(call: Callable[[], object]) -> None:
    """Check that every rank raises rank 1's reason, and the other ranks name rank 1."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        said = "an accident" if RANK == 1 else r"rank 1 (takes no part|failed first).*" + REASON
        assert re.search(said, str(error)), error
    else:
        raise AssertionError("a rank continued without the others")
    dist.barrier()


# ---- 1. hooks ------------------------------------------------------------------------------------

Make = Callable[..., Any]
HOOKS: dict[str, tuple[Make, Any, list[tuple[Any, str]]]] = {
    "quantized": (
        lambda **o: ddp.QuantizedAllreduceState(config=LEVELS, **o),
        ddp.quantized_allreduce_hook,
        [(ddp_hook, "layout_of"), (bucket, "decayed")],
    ),
    "power_sgd": (
        lambda **o: ddp.PowerSGDState(start_powerSGD_iter=2, **o),
        ddp.power_sgd_hook,
        [(Matrices, "project"), (Matrices, "project_back")],
    ),
    "batched": (
        lambda **o: ddp.PowerSGDState(start_powerSGD_iter=2, **o),
        ddp.batched_power_sgd_hook,
        [(Matrices, "project"), (Matrices, "project_back")],
    ),
    "deep_gradient": (
        lambda **o: ddp.DeepGradientState(density=0.05, clip=2.0, **o),
        ddp.deep_gradient_hook,
        [(ddp_deep_gradient, "_clipped"), (_Layer, "add")],
    ),
}


def hooks() -> None:
    """Fail with both carriers, in one bucket and in many; with "native" the next step works."""
    for carrier in ("native", "c10d"):
        for make, hook, places in HOOKS.values():
            for of, name in places:
                for cap in (25, 0.001):
                    gloo: Any = dist.new_group(backend="gloo") if carrier == "c10d" else None
                    model = DistributedDataParallel(
                        network(), process_group=gloo, bucket_cap_mb=cap
                    )
                    state = make(process_group=gloo, carrier=carrier)
                    model.register_comm_hook(state, hook)
                    for step in range(3):
                        backward(model, step)
                    with accident(of, name):
                        fails_everywhere(lambda model=model: backward(model, 3))
                    if carrier == "native":
                        backward(model, 4)
                        identical_on_all_ranks(gradients_of(model))


def states_of_another_rank() -> None:
    """Check a state that rank 1 loaded from another rank's checkpoint; later messages match."""
    for make, hook, _ in HOOKS.values():
        model, state = DistributedDataParallel(network()), make()
        model.register_comm_hook(state, hook)
        for step in range(3):
            backward(model, step)
        saved = state.state_dict()
        if RANK == 1:
            state.residuals.owner, state.residuals.loaded = (0, 7), True
        words = "the residuals are those of rank 0 of 7"
        fails(Exception, words, lambda model=model: backward(model, 3))
        dist.barrier()
        state.load_state_dict(saved)
        again = DistributedDataParallel(network())  # torch's reducer cannot continue
        again.register_comm_hook(state, hook)
        backward(again, 4)
        identical_on_all_ranks(gradients_of(again))


def gradients_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


# ---- 2. averages of lists ------------------------------------------------------------------------


def outer_loops() -> None:
    """Fail before the message, and between it and the number of its senders."""
    for carrier in ("native", "c10d"):
        for of, name in ((torch, "ne"), (exchange, "segments_of")):
            model = network()
            gloo: Any = dist.new_group(backend="gloo") if carrier == "c10d" else None
            loop = sparse_loco(model, sync_every=1, process_group=gloo, carrier=carrier)
            loop.step()
            with accident(of, name):
                fails_everywhere(loop.step)
            if carrier == "native":
                loop.step()
                identical_on_all_ranks(weights_of(model))


def optimizers() -> None:
    """Fail for a gradient that only one rank cannot average; the step may be repeated."""
    makers: list[Callable[[Any], Any]] = [lambda p: CompressedAdamW(p, warmup_steps=2), Signum]
    for make in makers:
        model = network()
        optimizer = make(model.parameters())
        for step in range(4):
            backward(model, step)
            optimizer.step()
        backward(model, 4)
        with accident(type(optimizer), "_gradient_of"):
            fails_everywhere(optimizer.step)
        optimizer.step()
        identical_on_all_ranks(weights_of(model))


CHECKS = [hooks, states_of_another_rank, outer_loops, optimizers]
