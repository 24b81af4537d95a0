"""Models over the backend "cgx", which registers the hook by default; CGX's names; user hooks."""

import copy
import io
import itertools
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.torch import ddp
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.integrations import trainer_state

from .common import (
    NEAREST,
    RANK,
    SIZE,
    averaged,
    compressing_group,
    gradients_of,
    identical_on_all_ranks,
    images,
    local_gradients,
    network,
    same,
)
from .steps import train


def hook_by_default() -> None:
    """Run a script written for torch_cgx, of which only the import is changed."""
    import cgx_ops.torch as torch_cgx

    group, module = compressing_group(), network()
    torch_cgx.register_model([(name, p.numel()) for name, p in module.named_parameters()])
    torch_cgx.exclude_layer("last")
    torch_cgx.set_quantization_bits("spare.weight", 2)
    torch_cgx.set_quantization_bucket_size("spare.weight", 32)
    try:
        model = DistributedDataParallel(module, process_group=group)
        model(images(RANK), spare=True).square().sum().backward()
        x = torch.full((1000,), RANK + 0.3)
        dist.all_reduce(x, group=group)  # CGX would have crashed, or treated it as a bucket
        want = sum(torch.full((1000,), r + 0.3) for r in range(SIZE))
        torch.testing.assert_close(x, want)
    finally:
        torch_cgx.forget_models()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    small = [{"spare.weight": g["spare.weight"]} for g in alone]
    own = averaged(small, Config(bits=2, bucket_size=32, rounding="nearest", error_feedback=False))
    table = {"first.weight": 4}
    want_all = averaged(alone, bits=lambda name, _: table.get(name, 32)) | own
    same(gradients_of(model), want_all)
    with cgx_ops.torch.uncompressed():
        model.zero_grad()
        model(images(RANK), spare=True).square().sum().backward()
    same(gradients_of(model), averaged(alone, bits=lambda *_: 32))


def user_hook_is_kept() -> None:
    model = DistributedDataParallel(network(), process_group=compressing_group())
    seen = []

    def own(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, own)
    model(images(RANK), spare=True).square().sum().backward()
    assert seen
    same(gradients_of(model), local_gradients(RANK, spare=True))
    model = DistributedDataParallel(network(), process_group=compressing_group())
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    model(images(RANK), spare=True).square().sum().backward()


def default_hook_state_can_be_restored() -> None:
    """Check access for trainers, which did not create the state, before the first forward."""
    model = DistributedDataParallel(network(), process_group=compressing_group())
    state = cgx_ops.torch.hook_state(model)
    assert isinstance(state, ddp.QuantizedAllreduceState) and state.steps == 0
    model(images(RANK), spare=True).square().sum().backward()
    assert cgx_ops.torch.hook_state(model) is state and state.steps == 1
    module: Any = model.module
    fails(TypeError, "pass the DistributedDataParallel", lambda: cgx_ops.torch.hook_state(module))

    compiled: Any = torch.compile(model, backend="eager")
    assert cgx_ops.torch.hook_state(compiled) is state
    saved = trainer_state.save_for_all_ranks(compiled)
    assert saved is not None and trainer_state.save_for_all_ranks(model.module) is None
    second = DistributedDataParallel(network(), process_group=compressing_group())
    trainer_state.restore(torch.compile(second, backend="eager"), saved)
    restored = cgx_ops.torch.hook_state(second)
    assert restored is not None and restored.steps == 1
    exact = DistributedDataParallel(network(), process_group=dist.new_group(backend="gloo"))
    assert cgx_ops.torch.hook_state(exact) is None


def _chain(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in two steps; the first one's callback starts the second one."""
    values = bucket.buffer().div_(dist.get_world_size(group))
    half = values.numel() // 2

    def reduce(part: torch.Tensor) -> torch.futures.Future[Any]:
        work: Any = dist.all_reduce(part, group=group, async_op=True)
        return work.get_future()

    def second(first: Any) -> torch.Tensor:
        first.value()
        reduce(values[half:]).wait()
        return values

    return reduce(values[:half]).then(second)


def _trained_by(hook: Callable[[], tuple[Any, Any]], group: Any, steps: int) -> nn.Module:
    torch.manual_seed(7)  # PowerSGD draws from this generator, too
    # Use one bucket: over any backend, chains of several buckets start in no fixed order.
    model = DistributedDataParallel(network(64), process_group=group)
    model.register_comm_hook(*hook())
    train(model, range(steps), torch.optim.SGD(model.parameters(), 1e-4))
    return model.module


def chained_collectives_do_not_race() -> None:
    """Check that ranks treat a callback's collectives the same, inline or on another thread."""
    compressing, exact = compressing_group(), dist.new_group(backend="cgx")

    def chain() -> tuple[Any, Any]:
        return current, _chain

    def low_rank() -> tuple[Any, Any]:
        state = powerSGD_hook.PowerSGDState(current, 2, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook

    for hook, steps in ((chain, 20), (low_rank, 20)):
        current = exact
        want = _trained_by(hook, current, steps).state_dict()
        current = compressing
        same(_trained_by(hook, current, steps).state_dict(), want, hook)
        with cgx_ops.torch.compressed(NEAREST):  # explicit, so callbacks are compressed too
            module = _trained_by(hook, current, steps)
        identical_on_all_ranks(dict(module.named_parameters()))


def callbacks_inherit_compressed_scope() -> None:
    """Check that a callback inherits compressed() and the gradient state of its collective."""
    group = compressing_group()
    comm = cgx_ops.Communicator.find(group.group_name)

    def sums(x: torch.Tensor) -> list[int]:
        """Reduce x, and again in a callback; return the bytes that each of the two sent."""
        sent = [comm.bytes_sent]
        dist.barrier()
        work: Any = dist.all_reduce(x, group=group, async_op=True)

        def again(first: Any) -> None:
            first.value()
            sent.append(comm.bytes_sent)
            dist.all_reduce(x, group=group)
            sent.append(comm.bytes_sent)

        if RANK == 0:
            # the collective has ended, so the callback runs here; otherwise on a thread
            time.sleep(0.05)
        work.get_future().then(again).wait()
        return [after - before for before, after in itertools.pairwise(sent)]

    numel = 30_000
    exact = sums(torch.ones(numel))
    with cgx_ops.torch.compressed():
        quantized = sums(torch.ones(numel))
    assert min(exact) > 6 * max(quantized), (exact, quantized)
    found = []
    parameter = nn.Parameter(torch.ones(numel))
    parameter.register_post_accumulate_grad_hook(lambda p: found.append(sums(p.grad)))  # type: ignore[arg-type]
    (parameter * 2).sum().backward()
    assert found == [quantized]


def optimizers_that_step_in_backward_keep_their_hook() -> None:
    module = network()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1e-4})
    model = DistributedDataParallel(module, process_group=compressing_group())
    # torch's hook creates a stream, which requires a GPU in builds with CUDA
    with mock.patch("torch.Stream"):
        # registers the default hook if there is none; two hooks would raise
        model(images(RANK), spare=True)
    assert [hook.__name__ for hook, _ in model._comm_hooks] != ["quantized_allreduce_hook"]
    # torch's hook needs an accelerator's stream in backward, so the check ends here.


class Products(nn.Module):
    """Model with several layers of any dtype, also complex."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (20, 30, 5)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(n, n, dtype=dtype)) for n in sizes])

    def forward(self, scale: float) -> torch.Tensor:
        return sum((w * scale).abs().square().sum() for w in self.w)  # type: ignore[return-value]


def unsupported_models_stay_exact() -> None:
    """Check that the default hook never makes a model fail."""
    mean = sum((r + 1) ** 2 for r in range(SIZE)) / SIZE
    for dtype in (torch.float64, torch.complex64):
        module = Products(dtype)
        model = DistributedDataParallel(module, process_group=compressing_group())
        model(float(RANK + 1)).backward()
        for w in module.w:
            torch.testing.assert_close(w.grad, w.detach() * 2 * mean)
    module = nn.Embedding(20, 40, sparse=True)
    model = DistributedDataParallel(module, process_group=compressing_group())
    model(torch.tensor([RANK, 5])).sum().backward()
    want = torch.zeros(20, 40)
    want[:SIZE] = 1 / SIZE
    want[5] += 1
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad.to_dense(), want)


def saved_and_copied_before_first_forward() -> None:
    group = compressing_group()
    model = DistributedDataParallel(network(), process_group=group)
    default = DistributedDataParallel(network())
    torch.save(default, io.BytesIO())
    copied = copy.deepcopy(default)
    for each in (model, copied):
        each(images(RANK), spare=True).square().sum().backward()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    same(gradients_of(model), averaged(alone))
    for name, gradient in gradients_of(copied).items():  # the default group has 32 bits
        torch.testing.assert_close(gradient, sum(g[name] for g in alone) / SIZE)
    assert not copied._forward_pre_hooks  # later forwards do not need the hook
    cgx_ops.torch.set_quantization_bits("first.weight", 2)
    try:
        for each in _copies(DistributedDataParallel(network())):
            assert cgx_ops.torch.hook_state(each) is not None
    finally:
        cgx_ops.torch.forget_models()


def _copies(model: DistributedDataParallel) -> list[DistributedDataParallel]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return [copy.deepcopy(model), torch.load(file, weights_only=False)]


def copies_have_separate_state() -> None:
    """Copy a model, or load it from a file, after a step; torch drops the hook in both cases."""
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    for unasked in (False, True):
        model = DistributedDataParallel(network())
        if unasked:
            cgx_ops.torch.set_quantization_bits("first.weight", 2)
        else:
            ddp.CommHookType["QUANTIZED_ALLREDUCE"].register(model, config=NEAREST)
        try:
            model(images(RANK), spare=True).square().sum().backward()
            for asked in (True, False):
                with unittest.TestCase().assertNoLogs("cgx_ops.torch.averaging.state"):
                    copies = _copies(model)
                for copied in copies:
                    state = cgx_ops.torch.hook_state(copied) if asked else None
                    copied.zero_grad()
                    copied(images(RANK), spare=True).square().sum().backward()
                    found = cgx_ops.torch.hook_state(copied)
                    assert found is not None and found.steps == 2
                    assert state in (found, None) and len(copied._comm_hooks) == 1
                    if not unasked:
                        same(gradients_of(copied), averaged(alone))
            first = cgx_ops.torch.hook_state(model)
            assert first is not None and first.steps == 1
        finally:
            cgx_ops.torch.forget_models()


def unlisted_group_is_ignored() -> None:
    """Check groups such as torchft's, and those made by split_group()."""
    store = parallel.PrefixStore("not listed", parallel.default_store())
    bare: Any = dist.ProcessGroup(store, RANK, SIZE)
    gloo = dist.ProcessGroupGloo(store, RANK, SIZE, timeout=timedelta(seconds=60))
    bare._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    world: Any = dist.group.WORLD
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    for group in (bare, world.split_group(list(range(SIZE)), group_name="not listed")):
        model = DistributedDataParallel(network(), process_group=group)
        assert cgx_ops.torch.hook_state(model) is None
        model(images(RANK), spare=True).square().sum().backward()
        for name, got in gradients_of(model).items():
            torch.testing.assert_close(got, sum(g[name] for g in alone) / SIZE)


CHECKS = [hook_by_default, user_hook_is_kept]
CHECKS += [unlisted_group_is_ignored]
CHECKS += [default_hook_state_can_be_restored]
CHECKS += [chained_collectives_do_not_race]
CHECKS += [callbacks_inherit_compressed_scope]
CHECKS += [optimizers_that_step_in_backward_keep_their_hook]
CHECKS += [unsupported_models_stay_exact]
CHECKS += [saved_and_copied_before_first_forward]
CHECKS += [copies_have_separate_state]
