"""Which calls are compressed and which are exact; their values and noise."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from support import torch_cases as tc
from support.torch_codecs import CONFIGS
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Communicator, Config
from cgx_ops.torch import BackendOptions, compressed, uncompressed

from .common import (
    DECISIONS,
    FLOATS,
    NEAREST,
    OPS,
    SIZES,
    Case,
    bytes_sent,
    dist,
    equal_on_all_ranks,
    inputs_of_ranks,
)


def compression(r: int, n: int) -> None:
    for dtype in FLOATS:
        for numel in SIZES:
            for op in ("sum", "avg"):
                mine = inputs_of_ranks(n, numel, dtype)
                x = mine[r].clone()
                with compressed(NEAREST):
                    dist.all_reduce(x, OPS[op])
                want = tc.expected(mine, 4, 512, "auto", op=op)
                assert tc.same_bits(x, want), (dtype, numel, op)
    x = tc.values(r, 1000)
    with compressed(Config(bits=2, bucket_size=64, gather_bits=8, rounding="nearest")):
        dist.all_reduce(x)
    assert tc.same_bits(x, tc.expected(inputs_of_ranks(n, 1000), 2, 64, "auto", gather_bits=8))
    # Only sums are compressed.
    x = tc.values(r, 1000)
    with compressed(NEAREST):
        dist.all_reduce(x, dist.ReduceOp.MAX)
    assert tc.same_bits(x, tc.expected(inputs_of_ranks(n, 1000), 32, op="max"))
    # A tensor that is not contiguous.
    x = tc.values(r, 1200).reshape(30, 40).t()
    with compressed(NEAREST):
        dist.all_reduce(x)
    assert equal_on_all_ranks(x)
    mine = [each.reshape(30, 40).t() for each in inputs_of_ranks(n, 1200)]
    assert tc.same_bits(x.contiguous(), tc.expected(mine, 4, 512, "auto"))


def noise(r: int, n: int) -> None:
    """Check that seeds follow from the options' seed and the group, not from torch's generator."""
    mine = inputs_of_ranks(n, 3000)
    for _ in range(2):
        group = dist.new_group(pg_options=BackendOptions(Config(bits=4), seed=11))
        state = torch.get_rng_state()
        for draw in range(2):
            x = mine[r].clone()
            with compressed():
                dist.all_reduce(x, group=group)
            seeds = [tc.gradient_seed(tc.named_seed(11, group.group_name), draw + 1)] * n
            want = tc.expected(mine, algorithm="auto", rounding="stochastic", seeds=seeds)
            assert tc.same_bits(x, want), draw
        assert torch.equal(state, torch.get_rng_state())
        dist.destroy_process_group(group)


def compressors(r: int, n: int) -> None:
    """Compare every compressor with cgx_ops; a group takes its compressor from the environment."""
    for config in CONFIGS:
        group = dist.new_group(pg_options=BackendOptions(config))
        seed = tc.gradient_seed(tc.named_seed(0, group.group_name), 1)
        x = tc.values(r, 3000)
        comm = Communicator.find(group.group_name)
        want = comm.allreduce(tc.to_numpy(x), "sum", config, seed=seed)
        DECISIONS.taken()
        with compressed():
            dist.all_reduce(x, group=group)
        assert tc.same_bits(x, torch.from_numpy(want)), config
        word = "bits" if config.compressor == "uniform" else config.compressor
        assert f" {word}, inside compressed()" in DECISIONS.taken()[-1], config
        dist.destroy_process_group(group)

    variables = {
        "CGX_COMPRESSOR": "topk",
        "CGX_COMPRESSION_DENSITY": "0.05",
        "CGX_COMPRESSION_VALUE_BITS": "8",
        "CGX_COMPRESSION_BUCKET_SIZE": "100",
    }
    with mock.patch.dict(os.environ, variables):
        options = BackendOptions()
    assert options.config == Config(compressor="topk", density=0.05, value_bits=8, bucket_size=100)
    group = dist.new_group(pg_options=options)
    x = tc.values(r, 3000)
    with compressed():
        dist.all_reduce(x, group=group)
    chosen = x.reshape(30, 100).count_nonzero(1)
    assert (chosen <= 5 * n).all() and (chosen >= 5).all()
    dist.destroy_process_group(group)


def mismatched_compressors(r: int, n: int) -> None:
    """Check that every rank reports both values of a variable that differs."""
    if n == 1:
        return
    for name, texts in (
        ("QUANTIZATION_BITS", ("4", "32")),  # the other ranks would have no hook, and wait
        ("BUCKET_SIZE", ("64", "128")),
    ):
        with mock.patch.dict(os.environ, {f"CGX_COMPRESSION_{name}": texts[r > 0]}):
            options = BackendOptions()
        with pytest.raises(dist.DistBackendError, match=r"rank 0 has (.|\n)*rank 1 .*mpirun -x"):
            dist.new_group(pg_options=options)
    with pytest.raises(dist.DistBackendError, match="rank 0 has compress gradients, rank 1 "):
        dist.new_group(pg_options=BackendOptions(compress="all" if r else "gradients"))
    with pytest.raises(dist.DistBackendError, match="rank 0 has seed 5, rank 1 has 6"):
        dist.new_group(pg_options=BackendOptions(seed=6 if r else 5))
    for compressor, name, texts in (
        ("onebit", "COMPRESSOR", ("levels", "onebit")),
        ("topk", "COMPRESSION_DENSITY", ("0.2", "0.1")),
        ("half", "COMPRESSION_ROUNDING", ("nearest", "stochastic")),
    ):
        variables = {"CGX_COMPRESSOR": compressor, f"CGX_{name}": texts[r > 0]}
        with mock.patch.dict(os.environ, variables):
            config = Config.from_env()
        with pytest.raises(RuntimeError, match=" against ".join(texts)), compressed(config):
            dist.all_reduce(tc.values(r, 3000))


def compressed_operations(r: int, n: int) -> None:
    """Check the rule by the log, the bytes and the values."""
    group = dist.new_group(pg_options=BackendOptions(NEAREST))
    name = group.group_name
    numel = 66_000
    mine = inputs_of_ranks(n, numel)
    exact, quantized = tc.expected(mine, 32), tc.expected(mine, algorithm="auto")
    plain = 4 * numel * 2 * (n - 1) // n  # bytes of an exact scatter-reduce-allgather

    warnings = 0

    def reduced(*around: AbstractContextManager[None]) -> tuple[torch.Tensor, str]:
        nonlocal warnings
        x = mine[r].clone()
        DECISIONS.taken()
        for scope in around:
            scope.__enter__()
        sent = bytes_sent(lambda: dist.all_reduce(x, group=group), name)
        for scope in reversed(around):
            scope.__exit__(None, None, None)
        line, *more = DECISIONS.taken()
        warnings += len(more)
        assert all("compressed()" in warning for warning in more)
        assert ("4 bits" in line) == (sent < plain / 6), (line, sent, plain)
        assert ("exact" in line) == (sent >= plain), (line, sent, plain)
        return x, line

    x, line = reduced()
    assert tc.same_bits(x, exact) and "outside gradient synchronisation" in line
    assert warnings == 1
    reduced()
    x, line = reduced(compressed())
    assert tc.same_bits(x, quantized) and "inside compressed()" in line
    x, line = reduced(compressed(), uncompressed())
    assert tc.same_bits(x, exact) and "inside uncompressed()" in line
    x, line = reduced(uncompressed(), compressed())
    assert tc.same_bits(x, quantized)
    x, line = reduced(compressed(Config(bits=32)))
    assert tc.same_bits(x, exact) and "bits are 32" in line
    assert warnings == 1, "the warning must appear once"

    # Gradients of parameters: hooks on them. Other nodes of backward are statistics, and exact.
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=group)
        return gradient

    class Statistics(torch.autograd.Function):
        """Imitate SyncBatchNorm: an allreduce in forward and one in backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return hook(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return hook(gradients[0])

    def backward(arrange: Callable[[torch.nn.Parameter], torch.Tensor]) -> list[str]:
        parameter = torch.nn.Parameter(torch.ones(numel))
        output = arrange(parameter)
        DECISIONS.taken()
        (output * mine[r]).sum().backward()
        return [line.split(": ")[-1] for line in DECISIONS.taken()]

    completing, outside = "4 bits, autograd is completing gradients", "exact, outside gradient"

    def on_leaf(parameter: torch.nn.Parameter) -> torch.Tensor:
        parameter.register_hook(hook)
        return parameter * 2

    def after_accumulation(parameter: torch.nn.Parameter) -> torch.Tensor:
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=group))
        return parameter * 2

    def on_activation(parameter: torch.nn.Parameter) -> torch.Tensor:
        activation = parameter * 2
        activation.register_hook(hook)
        return activation

    assert backward(on_leaf) == [completing]
    assert backward(after_accumulation) == [completing]
    assert [line.startswith(outside) for line in backward(on_activation)] == [True]
    assert [line.startswith(outside) for line in backward(Statistics.apply)] == [True]
    with uncompressed():
        assert backward(on_leaf) == ["exact, inside uncompressed()"]
    dist.destroy_process_group(group)

    group = dist.new_group(pg_options=BackendOptions(NEAREST, compress="all"))
    name = group.group_name
    x, line = reduced()
    assert tc.same_bits(x, quantized) and "compresses all" in line
    x, line = reduced(uncompressed())
    assert tc.same_bits(x, exact)
    small = torch.ones(15)
    dist.all_reduce(small, group=group)
    assert "fewer elements" in DECISIONS.taken()[0]
    dist.destroy_process_group(group)


def data_parallel(r: int, n: int) -> None:
    """Check that DDP's reducer compresses only inside compressed(), in all configurations.

    Uses a torch hook, because DDP gets the hook of cgx_ops.torch.ddp by default over this backend.
    Collectives of such a hook are exact outside of compressed().
    """
    group = dist.new_group(pg_options=BackendOptions(NEAREST))
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.01},
    )
    for options in choices:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(50, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 40)
        )
        ddp = DistributedDataParallel(model, process_group=group, **options)
        ddp.register_comm_hook(group, allreduce_hook)
        DECISIONS.taken()
        for step in range(3):
            if step > 0:  # static_graph requires a complete first backward
                with ddp.no_sync():
                    ddp(tc.values(r, 400, call=step).reshape(8, 50)).sum().backward()
                assert not DECISIONS.taken(), "no_sync"
            with compressed():
                ddp(tc.values(r, 400, call=step).reshape(8, 50)).sum().backward()
            lines = DECISIONS.taken()
            assert lines and all("4 bits, inside" in line for line in lines), (options, lines)
            for parameter in model.parameters():
                assert equal_on_all_ranks(parameter.grad), options
            ddp.zero_grad()
        ddp(tc.values(r, 400).reshape(8, 50)).sum().backward()
        lines = DECISIONS.taken()
        assert lines and all("exact, a user's communication hook" in line for line in lines), lines
    # The gradient of one bucket, bit for bit: the hook divides by n first.
    layer = torch.nn.Linear(100, 70, bias=False)
    ddp = DistributedDataParallel(layer, process_group=group)
    ddp.register_comm_hook(group, allreduce_hook)
    with compressed():
        ddp(tc.values(r, 100).reshape(1, 100)).sum().backward()
    mine = [x.repeat(70) / n for x in inputs_of_ranks(n, 100)]
    want = tc.expected(mine, algorithm="auto").reshape(70, 100)
    gradient = layer.weight.grad
    assert gradient is not None and tc.same_bits(gradient, want)
    dist.destroy_process_group(group)
    # Without any hook: the default group is exact, so DDP gets none.
    layer = torch.nn.Linear(100, 70, bias=False)
    ddp = DistributedDataParallel(layer)
    with compressed(NEAREST):
        ddp(tc.values(r, 100).reshape(1, 100)).sum().backward()
    mine = [x.repeat(70) * (1.0 / n) for x in inputs_of_ranks(n, 100)]  # the reducer multiplies
    want = tc.expected(mine, algorithm="auto").reshape(70, 100)
    gradient = layer.weight.grad
    assert gradient is not None and tc.same_bits(gradient, want)


CHECKS: tuple[Case, ...] = (
    compression,
    noise,
    compressors,
    mismatched_compressors,
    compressed_operations,
    data_parallel,
)
