"""Rank program: cgx_ops.torch.all_to_all, and all_to_all_single of the backend "cgx".

    torchrun --nproc-per-node 4 run_torch_all_to_all.py

Compares results and gradients with the oracle, over groups of all sizes, and compiled functions
with eager ones.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import checks
import pytest
import reference
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support import torch_cases as tc
from support.torch_codecs import CONFIGS
from torch.utils.checkpoint import checkpoint

from cgx_ops import Config
from cgx_ops.torch import BackendOptions, all_to_all, compressed
from cgx_ops.torch.backend import groups
from cgx_ops.torch.backend.errors import MismatchError, PeerFailed

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NEAREST = Config(4, 64, "nearest")
ROW = 3


class Group:
    """The ranks 0 to size - 1 of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def splits(self, kind: str, rows: int) -> list[list[int]]:
        """Return the rows that each rank sends to each rank."""
        ranks = range(self.size)
        kinds: dict[str, Callable[[int, int], int]] = {
            "equal": lambda a, b: rows,
            "uneven": lambda a, b: rows * ((3 * a + 5 * b) % 4) // 2,
            "empty": lambda a, b: rows if a == 0 != b else 0,
        }
        return [[kinds[kind](a, b) for b in ranks] for a in ranks]

    def inputs(
        self, splits: list[list[int]], dtype: torch.dtype = torch.float32, call: int = 0
    ) -> list[torch.Tensor]:
        return [
            tc.values(rank, sum(sizes) * ROW, dtype, call).reshape(-1, ROW)
            for rank, sizes in enumerate(splits)
        ]

    def received(self, splits: list[list[int]]) -> list[int]:
        return [sizes[self.rank] for sizes in splits]


def expected(
    xs: Sequence[torch.Tensor], splits: list[list[int]], rank: int, config: Config, **options: Any
) -> torch.Tensor:
    """Return a rank's result, computed by the oracle."""
    segment = reference.Segment(0, 0, config.bits, config.bucket_size)  # pyright: ignore[reportArgumentType]
    elements = [[rows * ROW for rows in sizes] for sizes in splits]
    ys = reference.all_to_all([tc.to_numpy(x) for x in xs], elements, segment, **options)
    return tc.from_numpy(ys[rank]).reshape(-1, ROW)


def turned(splits: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*splits, strict=True)]


# ---- the operator --------------------------------------------------------------------------------


def values(group: Group) -> None:
    seeds = [tc.drawn_seeds(rank)[0] for rank in range(group.size)]
    for kind in ("equal", "uneven", "empty"):
        for rows in (0, 1, 17, 171):
            for dtype in DTYPES:
                for config in (NEAREST, Config(3, 64, "stochastic"), Config(32)):
                    splits = group.splits(kind, rows)
                    xs = group.inputs(splits, dtype)
                    sizes = group.received(splits), splits[group.rank]
                    torch.manual_seed(group.rank)
                    y = all_to_all(
                        xs[group.rank],
                        *(sizes if kind != "equal" else ()),
                        config=config,
                        group=group.group,
                    )
                    want = expected(
                        xs,
                        splits,
                        group.rank,
                        config,
                        rounding=config.rounding or "nearest",
                        seeds=seeds,
                    )
                    assert tc.same_bits(y, want), (group.size, kind, rows, dtype, config)


def compressors(group: Group) -> None:
    """Compare every compressor with numpy."""
    comm = groups.communicator_of(group.group)
    splits = group.splits("uneven", 300)
    x, sizes, received = (
        group.inputs(splits)[group.rank],
        splits[group.rank],
        group.received(splits),
    )
    others = (Config(compressor=name, rounding="nearest") for name in ("entropy", "lossless"))
    for config, call in itertools.product((*CONFIGS, *others), (1, 2)):
        name = f"compressors {config}"
        torch.manual_seed(group.rank)
        y = all_to_all(x, received, sizes, name=name, config=config, group=group.group)
        if config.compressor == "randk":  # equal indices on all ranks, by the number of calls
            seed = tc.gradient_seed(tc.named_seed(0, name), call)
        else:
            seed = tc.drawn_seeds(group.rank)[0]
        want = comm.all_to_all(
            tc.to_numpy(x).reshape(-1, ROW),
            config,
            output_split_sizes=received,
            input_split_sizes=sizes,
            seed=seed,
        )
        assert tc.same_bits(y, tc.from_numpy(want)), config


def strided(group: Group) -> None:
    x = torch.arange(24.0 * group.size).reshape(4, 6 * group.size).t()
    y = all_to_all(x, bits=32, group=group.group)
    assert y.shape == x.shape and y.is_contiguous()


# ---- gradients -----------------------------------------------------------------------------------


def gradients(group: Group) -> None:
    """Check that gradients go back to the senders: exact by default, or in grad_config."""
    splits = group.splits("uneven", 40)
    back = turned(splits)
    upward = group.inputs(back, call=1)
    for config in (None, Config(8, 64, "nearest")):
        x = group.inputs(splits)[group.rank].requires_grad_()
        y = all_to_all(
            x,
            group.received(splits),
            splits[group.rank],
            config=NEAREST,
            grad_config=config,
            group=group.group,
        )
        y.backward(upward[group.rank])
        want = expected(upward, back, group.rank, config or Config(32))
        assert x.grad is not None and tc.same_bits(x.grad, want), config


def gradients_match_torch(group: Group) -> None:
    """Compare first and second exact derivatives with torch's."""
    splits = group.splits("uneven", 20)
    sizes = group.received(splits), splits[group.rank]
    found = []
    for function in (
        lambda x: all_to_all(x, *sizes, bits=32, group=group.group),
        lambda x: functional.all_to_all_single_autograd(x, *sizes, group.group),
    ):
        x = group.inputs(splits)[group.rank].requires_grad_()
        y = function(x)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append([y.detach(), first.detach(), second])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def noise_of_gradients(group: Group) -> None:
    """Check that checkpointing, whose first forward may record no gradient, repeats all noise."""
    splits = group.splits("uneven", 50)
    sizes = group.received(splits), splits[group.rank]
    noisy = Config(2, 64, "stochastic")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = all_to_all(2 * x, *sizes, config=noisy, grad_config=noisy, group=group.group)
        return torch.nn.functional.dropout(y.square()).sum()

    results: list[Any] = []
    again = (partial(checkpoint, function, use_reentrant=each) for each in (True, False))
    for how in (function, *again):
        torch.manual_seed(group.rank)
        x = group.inputs(splits)[group.rank].requires_grad_()
        how(x).backward()  # type: ignore[operator]
        results.append(x.grad)
    assert all(tc.same_bits(results[0], each) for each in results[1:])


# ---- vmap and compilers --------------------------------------------------------------------------


def mapped(group: Group) -> None:
    """Check that vmap makes a call of each slice."""
    splits = group.splits("equal", 40)
    xs = [group.inputs(splits, call=i) for i in range(3)]
    slices = torch.stack([each[group.rank] for each in xs])
    y = torch.vmap(lambda x: all_to_all(x, config=NEAREST, group=group.group))(slices)
    for i, each in enumerate(xs):
        assert tc.same_bits(y[i], expected(each, splits, group.rank, NEAREST)), i


def compiled(group: Group) -> None:
    """Compile with sizes that are constants, and with sizes that are read from a tensor."""
    splits = group.splits("uneven", 40)
    sizes = [torch.tensor(each) for each in (group.received(splits), splits[group.rank])]

    def constant(x: torch.Tensor) -> torch.Tensor:
        known = [each.tolist() for each in sizes]
        return all_to_all(2 * x, *known, config=NEAREST, grad_config=NEAREST, group=name) * 2

    def routed(x: torch.Tensor, counts: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        y = all_to_all(2 * x, counts.tolist(), own.tolist(), config=NEAREST, group=name)
        return 2 * y

    name = group.group.group_name
    pairs: list[tuple[Any, Any, list[torch.Tensor]]] = [
        (constant, torch.compile(constant, fullgraph=True), []),
        (routed, torch.compile(routed, dynamic=True), sizes),
    ]
    for function, compiled_function, rest in pairs:
        results = []
        for how in (function, compiled_function):
            x = group.inputs(splits)[group.rank].requires_grad_()
            y = how(x, *rest)
            y.sum().backward()
            results.append([y.detach(), x.grad])
        assert all(map(tc.same_bits, *results)), function.__name__


# ---- the backend ---------------------------------------------------------------------------------


def backend() -> None:
    """Compare all_to_all_single inside and outside compressed() with the oracle."""
    options = BackendOptions(Config(8, 64, rounding="nearest"))
    world = dist.new_group(backend="cgx", pg_options=options)
    assert isinstance(world, dist.ProcessGroup)
    group = Group(world)
    for dtype in DTYPES:
        for kind in ("equal", "uneven", "empty"):
            splits = group.splits(kind, 100)
            xs = group.inputs(splits, dtype)
            received = group.received(splits)
            for scope, config in (
                (None, Config(32)),
                (compressed(), Config(8, 64)),
                (compressed(NEAREST), NEAREST),
            ):
                y = torch.empty(sum(received), ROW, dtype=dtype)
                sizes = (None, None) if kind == "equal" else (received, splits[group.rank])
                arguments: Any = (y, xs[group.rank], *sizes, group.group)
                if scope is None:
                    dist.all_to_all_single(*arguments)
                else:
                    with scope:
                        work = dist.all_to_all_single(*arguments, async_op=True)
                    assert work is not None
                    work.wait()
                assert tc.same_bits(y, expected(xs, splits, group.rank, config)), (dtype, kind)
    # Other dtypes go to gloo, and the output may have any strides.
    counts = torch.arange(group.size) + 10 * group.rank
    out = torch.empty_like(counts)
    with compressed():
        dist.all_to_all_single(out, counts, group=group.group)
    assert out.tolist() == [10 * rank + group.rank for rank in range(group.size)]
    whole = torch.zeros(group.size, 2)
    dist.all_to_all_single(whole.t()[0], torch.ones(group.size), group=group.group)
    assert whole[:, 0].tolist() == [1.0] * group.size and not whole[:, 1].any()
    # Outputs that autograd would not let anyone write to.
    leaf = torch.nn.Parameter(torch.zeros(group.size, 2))
    with torch.inference_mode():
        inference = torch.zeros(group.size, 2)
    for whole in (leaf, inference):
        work = dist.all_to_all_single(
            whole.detach()[:, 0] if whole is inference else whole.t()[0],
            torch.ones(group.size), group=group.group, async_op=True,
        )  # fmt: skip
        assert work is not None
        work.wait()
        assert whole[:, 0].tolist() == [1.0] * group.size and not whole[:, 1].any()
    bad_blocks_of_the_backend(group)
    dist.destroy_process_group(world)


def bad_blocks_of_the_backend(group: Group) -> None:
    x, twos = torch.ones(2 * group.size), [2] * (group.size - 1)
    for wrong, text in (
        ([3, *twos], "Split sizes doesn't match"),
        ([-2, 6, *twos[1:]], "must be (at least 0|non-negative)"),  # torch's, from 2.15 on
    ):
        raised = pytest.raises((RuntimeError, ValueError), match=text)
        if group.rank != 0:
            raised = pytest.raises(PeerFailed, match=f"rank 0 takes no part.*{text}")
        with raised:
            sizes = wrong if group.rank == 0 else None
            dist.all_to_all_single(x.clone(), x, None, sizes, group=group.group)
    with pytest.raises(RuntimeError, match=r"refer to a single memory location|takes no part"):
        dist.all_to_all_single(x, x, group=group.group)
    with pytest.raises(MismatchError, match="bits"):  # one rank is outside of compressed()
        if group.rank == 0:
            dist.all_to_all_single(x.clone(), x, group=group.group)
        else:
            with compressed():
                dist.all_to_all_single(x.clone(), x, group=group.group)


# ---- bad calls -----------------------------------------------------------------------------------


def bad_calls() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, ops = torch.ones(2 * size, 3), torch.ops.cgx
    zeros = [0] * (size - 2)
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (
            lambda: all_to_all(x[1:]),
            ValueError,
            rf"shape \[{2 * size - 1}, 3\].*ranks do not divide.*pass output",
        ),
        (lambda: all_to_all(x, [2]), ValueError, f"output_split_sizes has 1 .*{size} ranks"),
        (lambda: all_to_all(x, None, [9, *zeros, -1]), ValueError, "at least 0"),
        (
            lambda: all_to_all(x, None, [9, *zeros, 1]),
            ValueError,
            f"add up to 10, but x has {2 * size} rows",
        ),
        (lambda: all_to_all(x[0, 0]), ValueError, "scalar"),
        (lambda: all_to_all(x.long()), TypeError, "quantized_all_to_all: the tensor is Long"),
        (lambda: all_to_all(x, bits=9), ValueError, "quantized_all_to_all: bits is 9"),
        (lambda: all_to_all(x, group="nobody"), ValueError, "'nobody'"),
        (
            lambda: all_to_all(x, grad_config=8),  # type: ignore[arg-type]
            ValueError,
            "grad_config is 8; it must be a cgx_ops.Config",
        ),
        (
            lambda: ops.quantized_all_to_all(x, carrier="c10d"),
            NotImplementedError,
            "carrier 'c10d' supports quantized_allreduce only",
        ),
    ]
    for call, kind, text in bad:
        with pytest.raises(kind, match=text):
            call()
    # On one rank only: the others learn the reason and go on.
    raised = pytest.raises(ValueError, match="input_split_sizes add up to")
    if rank != 1:
        raised = pytest.raises(PeerFailed, match=r"rank 1 takes no part.*input_split_sizes add up")
    with raised:
        all_to_all(x, None, [2] * (size - 1) + [3 if rank == 1 else 2])
    wrong: list[tuple[torch.Tensor, type[Exception], str]] = [
        (x[0, 0], ValueError, "x is a scalar"),
        (x.long(), TypeError, "the tensor is Long"),
    ]
    for theirs, kind, text in wrong:
        raised = pytest.raises(kind, match=text)
        if rank != 1:
            raised = pytest.raises(PeerFailed, match=f"rank 1 takes no part.*{text}")
        with raised:
            all_to_all(theirs if rank == 1 else x)
    with pytest.raises(
        MismatchError, match=r"elements of a block or row (3 against 6|6 against 3)"
    ):
        all_to_all(torch.ones(size, 6) if rank == 1 else x)
    sent = [2] * size if rank != 1 else [1, 3] + [2] * (size - 2)
    with pytest.raises(MismatchError, match="rank 1 sends 3 elements to rank 0, which expects 6"):
        all_to_all(x, None, sent)
    # A tensor without data is not sent, so it is refused on its own rank only.
    if rank == 0:
        with pytest.raises(ValueError, match="do not divide"):
            all_to_all(x[1:].to("meta"))
        assert all_to_all(x.to("meta")).shape == x.shape
    assert tc.same_bits(all_to_all(x, bits=32), x)


def skipped() -> None:
    """Stand in for the checks on a rank outside of the group."""


CHECKS = [
    values,
    compressors,
    strided,
    gradients,
    gradients_match_torch,
    noise_of_gradients,
    mapped,
]
ON_TWO = [compiled]


def main() -> None:
    dist.init_process_group("gloo")
    tc.forget_compiled_graphs()
    world = dist.get_world_size()
    made = [dist.new_group(list(range(size))) for size in range(1, world + 1)]
    by_name: dict[str, checks.Check] = {}
    for size, members in enumerate(made, 1):
        mine = Group(members) if isinstance(members, dist.ProcessGroup) else None
        for check in CHECKS + (ON_TWO if size == 2 else []):
            on_group = partial(check, mine) if mine and dist.get_rank() < size else skipped
            by_name[f"{check.__name__} on {size}"] = on_group
    checks.run(by_name | checks.named(backend, bad_calls), sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
