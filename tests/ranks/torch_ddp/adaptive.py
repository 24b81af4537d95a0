"""Adaptive bits, and auto_bits.

1. values: compared with the oracle, for the bits that follow from its own statistics
2. checkpoints, mismatched ranks, invalid settings
3. auto_bits: timings are given, so that nothing depends on the machine
"""

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import reference
import torch
import torch.distributed as dist
from failing import fails
from support import torch_cases as tc
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config, InvalidArgument, Rules, Unsupported, autotune
from cgx_ops._core.verdicts import Timings, Verdict
from cgx_ops.planner import AdaptiveBits, allocate_bits, allocate_rates
from cgx_ops.rules import pattern_of
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp import automatic

from .common import (
    NEAREST,
    RANK,
    SIZE,
    averaged,
    gradients_of,
    hooked,
    identical_on_all_ranks,
    images,
    local_gradients,
    network,
    same,
)
from .steps import train

FREE = ["first.weight", "last.weight", "spare.weight"]  # sorted, the order in which ranks average


def adaptive(**options: Any) -> AdaptiveBits:
    return AdaptiveBits(**{"every": 4, "samples": 2, "budget": "norm", **options})


def adapting(config: Config = NEAREST, bits: Any = None, **options: Any) -> Any:
    """Return a model with the hook, and its state."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    options = {"adaptive": adaptive() if bits is None else bits, **options}
    state = ddp.QuantizedAllreduceState(config=config, **options)
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)
    return model, state


# ---- values --------------------------------------------------------------------------------------


def losses(step: int, names: list[str], *, ranges: bool = True) -> np.ndarray:
    """Return each layer's statistic by bits, averaged over the ranks."""
    by_rank = []
    for rank in range(SIZE):
        alone = local_gradients(rank, (step,), spare=True)
        flat = [tc.to_numpy(alone[name]).reshape(-1) for name in names]
        by_rank.append(
            [reference.statistic(x, NEAREST.bucket_size, ranges=ranges) / x.size for x in flat]
        )
    return reference.reduce_in_order("avg", list(np.array(by_rank, np.float32))) / np.float32(SIZE)


def bits_follow_the_gradients() -> None:
    """Compare statistics, averages, decisions and gradients with the oracle.

    Covers the buckets before and after DDP rebuilds them.
    """
    rules = Rules([(r"spare\.weight", 8)])
    for names, own in ((FREE, None), (FREE[:2], rules)):
        model, state = adapting(rules=own)
        numels = {name: p.numel() for name, p in model.module.named_parameters()}
        bits = {"spare.weight": 8} if own else {}
        for step in range(7):
            if step == 4:  # decided by the statistics of steps 0 and 2
                sums = np.zeros(len(names))
                for measured in (0, 2):
                    sums += losses(measured, names)
                statistics = [numels[n] * s / 2 for n, s in zip(names, sums, strict=True)]
                counts = [numels[name] for name in names]
                found = allocate_bits(statistics, counts, "norm", config=NEAREST)
                assert found != [4] * len(names), "the bits must change, or the test checks nothing"
                bits |= dict(zip(names, found, strict=True))
            model.zero_grad()
            model(images(RANK, step), spare=True).square().sum().backward()
            alone = [local_gradients(r, (step,), spare=True) for r in range(SIZE)]
            want = averaged(
                alone, step=step,
                bits=lambda name, x: bits.get(name, 4 if x.dim() > 1 else 32),  # noqa: B023
            )  # fmt: skip
            same(gradients_of(model), want, (own, step))
        assert state.adaptive.bits == {name: bits[name] for name in names}
        assert state.adaptive.changes == 1


def rates_follow_the_gradients() -> None:
    """Compare rates with the oracle's, and gradients with those of a model with rules."""
    config = Config(compressor="entropy", rate=3, error_feedback=False)
    model, state = adapting(config, bits=adaptive(budget="squared"))
    assert state.adaptive is not None
    for step in range(7):
        model.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
    numels = {name: p.numel() for name, p in model.module.named_parameters()}
    counts = [numels[name] for name in FREE]
    sums = np.zeros(len(FREE))
    for measured_step in (0, 2):
        sums += losses(measured_step, FREE, ranges=False)
    statistics = [n * s / 2 for n, s in zip(counts, sums, strict=True)]
    rates = dict(zip(FREE, allocate_rates(statistics, counts, config=config), strict=True))
    assert set(rates.values()) != {3.0}, "the rates must change, or the test checks nothing"
    assert state.adaptive.bits == rates
    rules = Rules((pattern_of(name), {"rate": rate}) for name, rate in rates.items())
    other, _ = hooked(network(), config, rules=rules)
    other(images(RANK, 6), spare=True).square().sum().backward()
    same(gradients_of(model), gradients_of(other))
    identical_on_all_ranks(gradients_of(model))


def overflow_is_not_counted() -> None:
    model, state = adapting()
    for step in range(5):
        x = images(RANK, step)
        if step == 2 and RANK == 0:
            x[0, 0] = torch.inf
        model.zero_grad()
        model(x, spare=True).square().sum().backward()
    numels = {name: p.numel() for name, p in model.module.named_parameters()}
    counts = [numels[name] for name in FREE]
    statistics = [n * s for n, s in zip(counts, losses(0, FREE).astype(float), strict=True)]
    found = allocate_bits(statistics, counts, "norm", config=NEAREST)
    assert state.adaptive.bits == dict(zip(FREE, found, strict=True))


def clusters_option() -> None:
    model, state = adapting(bits=adaptive(budget="clusters"))
    train(model, range(5), torch.optim.SGD(model.parameters(), 1e-4))
    assert sorted(state.adaptive.bits) == FREE
    assert set(state.adaptive.bits.values()) <= {2, 3, 4}


# ---- checkpoints, mismatched ranks ---------------------------------------------------------------


def resumed_bits_are_equal() -> None:
    """Check states saved while averages are in flight, and between decisions, with feedback too."""
    for config in (NEAREST, Config(bits=3, bucket_size=64, error_feedback=True)):
        for stop in (3, 5):
            names: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
            dist.broadcast_object_list(names)
            model, state = adapting(config)
            optimizer = torch.optim.SGD(model.parameters(), 1e-4)
            train(model, range(stop), optimizer)
            weights = copy.deepcopy(model.module.state_dict())
            torch.save(state.state_dict(), f"{names[0]}/{RANK}.pt")
            train(model, range(stop, 10), optimizer)
            assert state.adaptive.changes

            again, restored = adapting(config)
            again.module.load_state_dict(weights)
            restored.load_state_dict(torch.load(f"{names[0]}/{RANK}.pt"))
            train(again, range(stop, 10), torch.optim.SGD(again.parameters(), 1e-4))
            same(dict(again.module.named_parameters()), dict(model.module.named_parameters()))
            assert restored.adaptive.bits == state.adaptive.bits
            identical_on_all_ranks(dict(model.module.named_parameters()))
            dist.barrier()
            if RANK == 0:
                shutil.rmtree(names[0])


def mismatched_ranks_raise() -> None:
    for other, words in (
        (adaptive(), "'last.weight' (200 values, 3 bits"),
        (adaptive(alpha=1.0 + RANK), "rank 0 has alpha 1.0, rank 1 has 2.0"),
    ):
        other.numels = {"first.weight": 800, "last.weight": 200}
        other.bits = {"first.weight": 4, "last.weight": 3 if RANK == 1 else 5}
        model, _ = adapting(bits=other)
        forward = model(images(RANK), spare=True).square().sum()
        fails(Exception, words, forward.backward)


def invalid_settings() -> None:
    def state(config: Config, bits: AdaptiveBits | None = None, **options: Any) -> None:
        ddp.QuantizedAllreduceState(config=config, adaptive=bits or adaptive(), **options)

    fails(Unsupported, "errors can be predicted for", lambda: state(Config(compressor="topk")))
    fails(InvalidArgument, "below 32", lambda: state(Config(bits=32)))
    fails(
        InvalidArgument,
        "carrier 'c10d' does not support adaptive",
        lambda: state(NEAREST, carrier="c10d"),
    )
    fails(
        InvalidArgument,
        "choices is (2, 8): bits is 8",
        lambda: state(Config(bits=3, compressor="levels"), adaptive(choices=(2, 8))),
    )
    fails(
        InvalidArgument,
        "budget is 'clusters', which chooses bits",
        lambda: state(Config(compressor="entropy"), adaptive(budget="clusters")),
    )
    fails(InvalidArgument, "every is 4 and samples is 5", lambda: adaptive(samples=5))
    fails(InvalidArgument, "budget is 'cubed'", lambda: adaptive(budget="cubed"))


# ---- auto_bits -----------------------------------------------------------------------------------


@contextmanager
def measured(timings: Timings) -> Iterator[None]:
    """Replace the ranks' measurements by these timings."""
    truly, autotune.measured = autotune.measured, lambda *_: timings
    try:
        yield
    finally:
        autotune.measured = truly


def timings_of_link(seconds_a_byte: float) -> Timings:
    """Return timings of a link on which a codec takes 10 us and 1 ns per value."""
    sizes = autotune.SIZES
    bits = {32: 32, 8: 8, 4: 4}
    return Timings(
        sizes,
        {
            b: tuple(
                n * b / 8 * seconds_a_byte + (0 if b == 32 else 1e-5 + 1e-9 * n) for n in sizes
            )
            for b in bits
        },
    )


def auto_bits_decided_once_per_model() -> None:
    for number, (slow, bits) in enumerate(((True, 4), (False, 32))):
        group: Any = dist.new_group(backend="cgx")
        with measured(timings_of_link(1e-7 if slow else 1e-12)):
            model = DistributedDataParallel(network(200), process_group=group)
            state = ddp.QuantizedAllreduceState(group, NEAREST, auto_bits=True)
            model.register_comm_hook(state, ddp.quantized_allreduce_hook)
            twin, _ = hooked(network(200), replace(NEAREST, bits=bits))
            for step in range(2):
                for each in (model, twin):
                    each.zero_grad()
                    each(images(RANK, step), spare=True).square().sum().backward()
                same(gradients_of(model), gradients_of(twin), number)
        assert state.config.bits == bits and state.state_dict()["config"].bits == bits


def auto_bits_of_group_depend_on_size() -> None:
    """Compare with the same group at these bits; small messages are exact."""
    with measured(timings_of_link(1e-7)):
        options = cgx_ops.torch.BackendOptions(NEAREST, compress="all", auto_bits=True)
        group: Any = dist.new_group(backend="cgx", pg_options=options)
    verdict = Verdict.of(timings_of_link(1e-7))
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (500, 1500, 60_000):
            bits = verdict.bits(numel, dtype.itemsize)
            x = [tc.values(rank, numel, dtype) for rank in range(SIZE)]
            got = x[RANK].clone()
            dist.all_reduce(got, group=group)
            want = tc.expected(x, bits, 64, "auto", op="sum", rounding="nearest")
            assert tc.same_bits(got, want), (dtype, numel, bits)
    assert {verdict.bits(n) for n in (500, 60_000)} == {32, 4}
    whole = cgx_ops.Communicator.find(group.group_name).stats()
    assert "4 bits from" in whole.auto, whole.auto
    # A model over the group gets the hook by default, with bits for the model's size.
    model = DistributedDataParallel(network(), process_group=group)
    model(images(RANK), spare=True).square().sum().backward()
    identical_on_all_ranks(gradients_of(model))


def auto_bits_leave_gpu_models_exact() -> None:
    """Check that a model on GPUs gets no bits of the group, but those of rules."""
    with measured(timings_of_link(1e-7)):
        options = cgx_ops.torch.BackendOptions(NEAREST, auto_bits=True)
        group: Any = dist.new_group(backend="cgx", pg_options=options)
    with mock.patch.object(automatic, "_is_on_cpu", return_value=False):
        model = DistributedDataParallel(network(), process_group=group)
        assert cgx_ops.torch.hook_state(model) is None
        cgx_ops.torch.set_quantization_bits("first.weight", 2)
        try:
            ruled = DistributedDataParallel(network(), process_group=group)
            ruled(images(RANK), spare=True).square().sum().backward()
        finally:
            cgx_ops.torch.forget_models()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    bits = {"first.weight": 2}
    same(gradients_of(ruled), averaged(alone, bits=lambda name, _: bits.get(name, 32)))


CHECKS = [bits_follow_the_gradients, rates_follow_the_gradients]
CHECKS += [overflow_is_not_counted, clusters_option]
CHECKS += [resumed_bits_are_equal, mismatched_ranks_raise, invalid_settings]
CHECKS += [auto_bits_decided_once_per_model, auto_bits_of_group_depend_on_size]
CHECKS += [auto_bits_leave_gpu_models_exact]
