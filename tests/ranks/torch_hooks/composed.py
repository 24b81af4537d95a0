"""The hooks inside PyTorch's wrappers and optimizers.

1. hooks registered by name
2. torch's 16-bit wrappers
3. optimizers that step during backward give the weights of those that step afterwards
4. mixed precision, which uses torch's own hook
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # must be imported before its Event is replaced
import torch.distributed as dist
from failing import fails
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
    _hook_then_optimizer,
    _OptimizerHookState,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, as_functional_optim
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_training import (
    RANK,
    SIZE,
    batch,
    identical_on_all_ranks,
    loss_of,
    network,
    train,
    weights_of,
)

import cgx_ops.torch
from cgx_ops import Communicator, Config, InvalidArgument
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp import CommHookType

FOUR_BITS = Config(bits=4, bucket_size=64, rounding="nearest", error_feedback=False)
SMALL: dict[str, Any] = {"bucket_cap_mb": 0.001}  # several buckets
Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def options_of(kind: CommHookType) -> dict[str, Any]:
    """Return options with which each method acts within six steps."""
    if "POWER" in kind.name:
        return {"start_powerSGD_iter": 2}
    if kind is CommHookType.DEEP_GRADIENT:
        return {"density": 0.1, "momentum": 0.0}  # Adam, below, has momentum itself
    return {"config": FOUR_BITS}


def averaging() -> list[CommHookType]:
    """Return the hooks that average: with --slow all, otherwise one per kind of state."""
    if "--slow" not in sys.argv:
        return [CommHookType.QUANTIZED_ALLREDUCE, CommHookType.POWER_SGD]
    return [kind for kind in CommHookType if kind is not CommHookType.NOOP]


def wrapped(
    kind: CommHookType, wrap: Callable[[Hook, DistributedDataParallel], Hook], **options: Any
) -> DistributedDataParallel:
    """Return a model whose hook is wrapped by wrap()."""
    model = DistributedDataParallel(network(), **options)
    state = kind.value.make_state(
        **{"process_group": None, **kind.value.options, **options_of(kind)}
    )
    model.register_comm_hook(state, wrap(kind.value.hook, model))  # type: ignore[arg-type]
    return model


def backward_alone(model: nn.Module, steps: range) -> torch.Tensor:
    """Do all of a step except the optimizer's; return the weights."""
    for step in steps:
        model.zero_grad()
        loss_of(model, batch(RANK, step)).backward()
    return weights_of(model)


# ---- 1. hooks by name ----------------------------------------------------------------------------


def by_name() -> None:
    """Compare with hooks registered by hand; all of them train."""
    for kind in averaging():
        model = DistributedDataParallel(network())
        state = CommHookType[kind.name].register(model, **options_of(kind))
        assert state is not None and state.process_group is model.process_group, kind
        weights = train(model, range(5))
        identical_on_all_ranks(weights[-1])
        want = train(wrapped(kind, lambda hook, _: hook), range(5))
        assert torch.equal(weights[-1], want[-1]), kind
        assert state.steps == 5, kind


def noop_sends_nothing() -> None:
    """Check that with NOOP each rank trains alone, and nothing is sent."""
    group: Any = dist.group.WORLD
    model = DistributedDataParallel(network())
    assert CommHookType.NOOP.register(model) is None
    comm = Communicator.find(group.group_name)
    before = comm.bytes_sent
    weights = train(model, range(3))
    assert comm.bytes_sent == before
    assert torch.equal(weights[-1], train(network(), range(3))[-1])


def bad_names() -> None:
    fails(TypeError, "model is Sequential", lambda: CommHookType.NOOP.register(network()))  # type: ignore[arg-type]
    model = DistributedDataParallel(network())
    fails(TypeError, "config", lambda: CommHookType.NOOP.register(model, config=FOUR_BITS))
    fails(TypeError, "rank", lambda: CommHookType.QUANTIZED_ALLREDUCE.register(model, rank=1))
    own: dict[str, Any] = {"matrix_approximation_rank": 0}
    fails(InvalidArgument, "at least 1", lambda: CommHookType.POWER_SGD.register(model, **own))
    CommHookType.POWER_SGD.register(model)
    fails(RuntimeError, "once", lambda: CommHookType.NOOP.register(model))


# ---- 2. 16-bit wrappers --------------------------------------------------------------------------


def rounding(hook: Hook, dtype: torch.dtype) -> Hook:
    """Return a hook that rounds its input and output, in float32."""

    def run(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().copy_(bucket.buffer().to(dtype))
        return hook(state, bucket).then(lambda f: f.value().copy_(f.value().to(dtype)))

    return run


def torchs_wrappers() -> None:
    """Compare each wrapped hook with gradients and averages rounded to 16 bits, bit for bit."""
    wrappers: list[tuple[Any, torch.dtype]] = [
        (default_hooks.fp16_compress_wrapper, torch.float16),
        (ddp.bf16_compress_wrapper, torch.bfloat16),
    ]
    for kind in averaging():
        for wrap, dtype in wrappers:
            for options in ({}, SMALL, {"gradient_as_bucket_view": True}):
                got = train(wrapped(kind, lambda hook, _, w=wrap: w(hook), **options), range(5))
                identical_on_all_ranks(got[-1])
                want = train(
                    wrapped(kind, lambda hook, _, d=dtype: rounding(hook, d), **options), range(5)
                )
                assert torch.equal(got[-1], want[-1]), (kind, dtype, options)


# ---- 3. optimizers that step during backward -----------------------------------------------------

STEPS = range(6)


def stepping_afterwards(
    kind: CommHookType, optimizer: Any, rate: float, first: int = 0, **options: Any
) -> torch.Tensor:
    """Return the weights after STEPS with an optimizer that begins at step `first`."""
    model = wrapped(kind, lambda hook, _: hook, **options)
    own = optimizer(model.parameters(), rate)
    for step in STEPS:
        model.zero_grad()
        loss_of(model, batch(RANK, step)).backward()
        if step >= first:
            own.step()
    return weights_of(model)


def zero_redundancy() -> None:
    """Step each rank's part in the last bucket's hook. Torch skips the optimizer in two steps."""
    for kind in averaging():
        for options in ({}, SMALL):

            def wrap(hook: Hook, model: DistributedDataParallel) -> Hook:
                own: Any = ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
                )
                return hook_with_zero_step(hook, model, own)  # type: ignore[arg-type, return-value]

            got = backward_alone(wrapped(kind, wrap, **options), STEPS)
            identical_on_all_ranks(got)
            want = stepping_afterwards(kind, torch.optim.Adam, 0.01, first=2, **options)
            assert torch.equal(got, want), (kind, options)


def zero_redundancy_interleaved() -> None:
    """Use one bucket, because torch's callbacks of several buckets interfere."""

    def wrap(hook: Hook, model: DistributedDataParallel) -> Hook:
        own: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05
        )
        return hook_with_zero_step_interleaved(hook, model, own)  # type: ignore[arg-type, return-value]

    for kind in (CommHookType.QUANTIZED_ALLREDUCE, CommHookType.POWER_SGD):
        got = backward_alone(wrapped(kind, wrap), STEPS)
        assert torch.equal(got, stepping_afterwards(kind, torch.optim.SGD, 0.05, first=2)), kind


def optimizer_overlap() -> None:
    """Step a bucket's parameters in the callback of its future."""
    for kind in averaging():
        for optimizer, rate in ((torch.optim.SGD, 0.05), (torch.optim.Adam, 0.01)):
            for options in ({}, SMALL):

                def wrap(
                    hook: Hook,
                    model: DistributedDataParallel,
                    optimizer: type = optimizer,
                    rate: float = rate,
                ) -> Hook:
                    functional = as_functional_optim(optimizer, lr=rate)
                    state = _OptimizerHookState(functional, list(model.parameters()))
                    return _hook_then_optimizer(hook, state)  # type: ignore[arg-type, return-value]

                got = backward_alone(wrapped(kind, wrap, **options), STEPS)
                want = stepping_afterwards(kind, optimizer, rate, **options)
                assert torch.equal(got, want), (kind, optimizer, options)


@contextlib.contextmanager
def dummy_streams() -> Iterator[None]:
    """Replace accelerator streams by dummies, for torch's hooks that use the current stream.

    On the CPU everything runs in order without them.
    """
    names = ("torch.accelerator.current_stream", "torch.Stream", "torch.Event")
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch(name))
        yield


def compressing_group() -> Any:
    options = cgx_ops.torch.BackendOptions(config=FOUR_BITS)
    return dist.new_group(backend="cgx", pg_options=options)


def asked_for() -> AbstractContextManager[None]:
    return cgx_ops.torch.compressed(FOUR_BITS)


def optimizers_in_backward() -> None:
    """Check that torch's hook sums over the backend: exact, or by bucket in the group's bits."""
    for group, scope in ((None, contextlib.nullcontext), (compressing_group(), asked_for)):
        for options in ({}, SMALL):
            module = network()
            _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
            model = DistributedDataParallel(module, process_group=group, **options)
            with dummy_streams():
                got = backward_alone(model, STEPS)
            identical_on_all_ranks(got)
            model = DistributedDataParallel(network(), **options)
            model.register_comm_hook(None, default_hooks.allreduce_hook)
            with scope():
                want = train(model, STEPS)[-1]
            assert torch.equal(got, want), (group, options)


# ---- 4. mixed precision --------------------------------------------------------------------------


def trained_in_bfloat16(group: Any, scope: Callable[[], Any]) -> torch.Tensor:
    """Return the weights after STEPS: computed in bfloat16, averaged and stepped in float32.

    The first backward is discarded: on the CPU torch averages uninitialized memory there.
    """
    precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with dummy_streams(), scope():
        model = DistributedDataParallel(network(), process_group=group, mixed_precision=precision)
        backward_alone(model, STEPS[:1])
        weights = train(model, STEPS[1:])[-1]
        fails(RuntimeError, "once", lambda: CommHookType.POWER_SGD.register(model))
    assert weights.dtype == torch.float32
    identical_on_all_ranks(weights)
    return weights


def mixed_precision() -> None:
    """Check that torch's own hook sums as over gloo, or in the group's bits."""
    own = contextlib.nullcontext
    want = trained_in_bfloat16(dist.new_group(backend="gloo"), own)
    exact = trained_in_bfloat16(None, own)
    # Sums over two ranks are bitwise equal; for more ranks gloo adds in another order, five times.
    assert torch.equal(exact, want) or SIZE > 2
    assert torch.allclose(exact, want, rtol=0, atol=5 * 0.05 * SIZE * 2.0**-9)
    asked, unasked = trained_in_bfloat16(None, asked_for), trained_in_bfloat16(
        compressing_group(), own
    )  # fmt: skip
    assert torch.equal(asked, unasked)
    assert 0 < (asked - exact).abs().max() < 0.1


CHECKS = [by_name, noop_sends_nothing, bad_names, torchs_wrappers, zero_redundancy]
CHECKS += [zero_redundancy_interleaved, optimizer_overlap, optimizers_in_backward, mixed_precision]
