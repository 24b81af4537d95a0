"""Deadlines and errors: the hook does not block; missing peers; invalid calls."""

import datetime
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Rules
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging import layers

from .backend import Products
from .common import (
    NEAREST,
    RANK,
    SIZE,
    compressing_group,
    gradients_of,
    hooked,
    images,
    local_gradients,
    network,
    same,
)


def does_not_wait() -> None:
    """Check that the hook returns before a peer has begun; only the end of backward waits."""
    for carrier in ("native", "c10d"):
        done, begun = [], time.monotonic()

        def hook(
            state: Any,
            bucket: GradBucket,
            done: list[bool] = done,
        ) -> torch.futures.Future[torch.Tensor]:
            future = ddp.quantized_allreduce_hook(state, bucket)
            done.append(future.done())
            return future

        group = dist.new_group(backend="gloo")
        options: dict[str, Any] = {"process_group": group, "bucket_cap_mb": 0.001}
        model, _ = hooked(network(), hook=hook, carrier=carrier, **options)
        model(images(RANK), spare=True).square().sum().backward()  # connects
        loss = model(images(RANK), spare=True).square().sum()
        done.clear()
        dist.barrier()
        if RANK == SIZE - 1:
            time.sleep(0.5)
        begun = time.monotonic()
        loss.backward()
        if RANK == 0:
            assert len(done) > 1
            assert not any(done), "a bucket ended before its last rank began"
            assert time.monotonic() - begun > 0.3


def missing_peer() -> None:
    group = dist.new_group(backend="cgx", timeout=datetime.timedelta(seconds=1))
    model, _ = hooked(network(), process_group=group)
    loss = model(images(RANK), spare=True).square().sum()
    if RANK == 0:
        fails(RuntimeError, "rank 1 has not started it", loss.backward)
    dist.barrier()
    # Torch's collectives have the deadline of the given group, with the state's own carrier too.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2))
    model, state = hooked(network(), process_group=group, carrier="c10d")
    state.carry(torch.device("cpu"))
    loss = model(images(RANK), spare=True).square().sum()
    if RANK == 0:
        begun = time.monotonic()
        try:
            loss.backward()
        except RuntimeError as error:  # the error text is gloo's
            assert "Unable to cast" not in str(error), error
        else:
            raise AssertionError("nothing was raised")
        assert time.monotonic() - begun < 20
    dist.barrier()


def looks_up_names_once() -> None:
    """Check that steps after the first do not traverse the modules."""
    model, _ = hooked(network())
    for _ in range(2):
        model(images(RANK), spare=True).square().sum().backward()
    loss = model(images(RANK), spare=True).square().sum()
    walk, walks = nn.Module.named_parameters, []

    def counted(*args: Any, **options: Any) -> Any:
        walks.append(args)
        return walk(*args, **options)

    nn.Module.named_parameters = counted  # type: ignore[method-assign]
    try:
        loss.backward()
    finally:
        nn.Module.named_parameters = walk  # type: ignore[method-assign]
    assert not walks


def rejects_bad_calls() -> None:
    model, _ = hooked(network(dtype=torch.float64))
    loss = model(images(RANK).double(), spare=True).square().sum()
    fails(TypeError, "'first.weight', 'first.bias'", loss.backward)

    model, _ = hooked(nn.Embedding(10, 4, sparse=True))
    loss = model(torch.tensor([1, 2])).sum()
    fails(TypeError, "sparse=False", loss.backward)

    # the buckets are real, so the layers of a complex gradient would not be where expected
    for bits in (4, 32):
        model, _ = hooked(Products(torch.complex64), Config(bits=bits))
        fails(TypeError, "torch.complex64", model(1.0).backward)

    alone = [dist.new_group([rank], backend="gloo") for rank in range(SIZE)][RANK]
    model = DistributedDataParallel(network(), process_group=alone)
    model.register_comm_hook(
        ddp.QuantizedAllreduceState(None, NEAREST), ddp.quantized_allreduce_hook
    )
    loss = model(images(RANK), spare=True).square().sum()
    fails(ValueError, f"DistributedDataParallel over [{RANK}]", loss.backward)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, _ = hooked(network(), rules=Rules([("typo", 2)]))
        model(images(RANK), spare=True).square().sum().backward()
    assert any("no layer matches 'typo'" in str(w.message) for w in warned), warned

    gloo = dist.new_group([0], backend="gloo")
    if isinstance(gloo, dist.ProcessGroup) and RANK == 0:
        assert ddp.QuantizedAllreduceState(gloo, NEAREST).communicator().size == 1

    module = network()
    layers.register_model([(name, p.numel() + 1) for name, p in module.named_parameters()])
    try:
        wrong = "'first.weight' was registered with 801"
        model = DistributedDataParallel(module, process_group=compressing_group())
        for _ in range(2):  # the error must persist
            fails(ValueError, wrong, lambda: model(images(RANK)))
        model, _ = hooked(network())
        fails(ValueError, wrong, model(images(RANK), spare=True).sum().backward)
    finally:
        layers.forget_models()


def switches_process_group() -> None:
    """Check that setting a state's process_group changes the ranks of the average."""
    alone: Any = [dist.new_group([rank], backend="cgx") for rank in range(SIZE)][RANK]
    for carrier in ("native", "c10d"):
        model, state = hooked(network(), carrier=carrier)
        model(images(RANK), spare=True).square().sum().backward()
        state.process_group = alone
        loss = model(images(RANK), spare=True).square().sum()
        fails(ValueError, f"over ranks [{RANK}]", loss.backward)
        model = DistributedDataParallel(network(), process_group=alone)
        model.register_comm_hook(state, ddp.quantized_allreduce_hook)
        model(images(RANK), spare=True).square().sum().backward()
        same(gradients_of(model), local_gradients(RANK, spare=True), carrier)
    # Change the group before the model's bits are decided, too.
    model = DistributedDataParallel(network(), process_group=alone)
    state = ddp.QuantizedAllreduceState(auto_bits=True)
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)
    fails(ValueError, "use the model's", model(images(RANK), spare=True).sum().backward)
    assert state.auto_bits


def refuses_the_group_of_absent_ranks() -> None:
    """Check that a state whose group has ranks that do not take part is refused without waiting."""
    group: Any = dist.new_group(list(range(SIZE - 1)), backend="cgx")
    if RANK < SIZE - 1:
        for carrier in ("native", "c10d"):
            state = ddp.QuantizedAllreduceState(carrier=carrier)
            model = DistributedDataParallel(network(), process_group=group)
            model.register_comm_hook(state, ddp.quantized_allreduce_hook)
            loss = model(images(RANK), spare=True).square().sum()
            fails(ValueError, "use the model's", loss.backward)
    dist.barrier()


CHECKS = [switches_process_group, refuses_the_group_of_absent_ranks]
CHECKS += [does_not_wait, missing_peer, looks_up_names_once, rejects_bad_calls]
