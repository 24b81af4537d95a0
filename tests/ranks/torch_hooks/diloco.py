"""DiLoCo: an outer loop over ranks that train independently.

1. values, against the reference: bit for bit if the outer steps are exact
2. special settings: averages, DistributedDataParallel
3. models: dtypes, frozen and tied parameters, fragments, optimizers
4. checkpoints
5. NaN and infinities, and bad input
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import reference
import torch
import torch.distributed as dist
from failing import fails
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    RANK,
    SIZE,
    backward,
    gathered,
    identical_on_all_ranks,
    network,
    train,
    weights_of,
)

from cgx_ops import Communicator, Config, InvalidArgument, Rules, Unsupported
from cgx_ops.torch.diloco import DiLoCo, sparse_loco

NEAREST = Config(bits=4, bucket_size=64, rounding="nearest")
EVERYTHING = Rules(exact_vectors=False)
LEVELS = Config(bits=2, compressor="levels", bucket_size=64)
TOPK = Config(compressor="topk", density=0.1, bucket_size=128, residual_decay=0.5)
ENTROPY = Config(compressor="entropy", rate=2)  # small parameters of a message share blocks
EXACT = Config(bits=32)
# Outer steps with exact products: torch's fused ones then round as the reference does.
HALVES: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "nesterov": True}


def halves(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **HALVES)


def of_rate_one(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


# Loops that the tests of JAX use too, by the same names.
IN_BOTH: dict[str, Callable[[nn.Module], DiLoCo]] = {
    "diloco": lambda model: DiLoCo(model, halves, sync_every=5, config=NEAREST),
    "streaming": lambda model: DiLoCo(
        model, halves, sync_every=6, fragments=3, fragment_sync_delay=1, fragment_update_alpha=0.5,
        config=LEVELS,
    ),
    "sparse_loco": lambda model: sparse_loco(model, sync_every=5, density=1 / 32),
}  # fmt: skip


def move(model: nn.Module, step: int) -> None:
    """Change the parameters as an inner step might."""
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    with torch.no_grad():
        for p in model.parameters():
            p += (0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype)


def flat(model: nn.Module) -> dict[str, Any]:
    """Return each parameter as a flat float32 numpy copy."""
    return {
        n: tc.to_numpy(p.detach().float().flatten()).copy() for n, p in model.named_parameters()
    }


# ---- 1. values -----------------------------------------------------------------------------------


def expected(loop: DiLoCo, first: dict[str, Any], **more: Any) -> reference.OuterLoop:
    """Return the reference of a loop whose compression is the same for all parameters."""
    config = loop.exchange.config

    def segment_of(_name: str, numel: int) -> reference.Segment:
        return reference.Segment(
            0, numel, config.bits, config.bucket_size, config.compressor,
            density=config.density or 0.01, rate=config.rate or 2.0, rounding="nearest",
        )  # fmt: skip

    members = [[loop.names[i] for i in places] for places in loop.fragments]
    return reference.OuterLoop(
        first, SIZE, loop.schedule, members, segment_of,
        decay=config.residual_decay, feedback=config.keeps_residuals,
        of_senders=loop.mean_over == "senders", **more,
    )  # fmt: skip


def check_rounds(loop: DiLoCo, model: nn.Module, oracle: reference.OuterLoop, steps: int) -> None:
    for step in range(steps):
        before = flat(model)
        move(model, step)
        after = flat(model)
        for name in before:
            moved = gathered(torch.from_numpy(after[name]))
            for rank, params in enumerate(oracle.params):
                params[name] = tc.to_numpy(moved[rank])
        loop.step()
        oracle.step()
        for name, mine in flat(model).items():
            assert np.array_equal(mine, oracle.params[RANK][name]), (step, name)
    for name, outer in zip(loop.names, loop.outer_parameters, strict=True):
        assert np.array_equal(tc.to_numpy(outer.detach().flatten()), oracle.anchor[name]), name
        identical_on_all_ranks(outer.detach())
    for name, e in loop.exchange.residuals.tensors.items():
        assert np.array_equal(tc.to_numpy(e), oracle.residuals[name][RANK]), name


def matches_reference() -> None:
    """Compare parameters after every step, outer parameters and residuals, bit for bit."""
    halved: Any = halves, {"rate": 0.5, "momentum": 0.5}
    plain: Any = of_rate_one, {"rate": 1.0, "momentum": 0.0}
    cases: Any = (
        (NEAREST, halved, {"sync_every": 3}),
        (LEVELS, halved, {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}),
        (
            NEAREST, halved,
            {"sync_every": 6, "fragments": 3, "fragment_sync_delay": 1,
             "fragment_update_alpha": 0.5},
        ),
        (EXACT, halved, {"sync_every": 4, "fragments": 2}),
        (ENTROPY, halved, {"sync_every": 3}),
        (ENTROPY, halved, {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1}),
        (replace(NEAREST, error_feedback=False), plain, {"sync_every": 1}),
        (TOPK, plain, {"sync_every": 2, "mean_over": "senders"}),
        (TOPK, plain, {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1,
                       "mean_over": "senders"}),
    )  # fmt: skip
    for config, (outer, rates), options in cases:
        model = network()
        loop = DiLoCo(model, outer, config=config, rules=EVERYTHING, **options)
        oracle = expected(loop, flat(model), **rates)
        check_rounds(loop, model, oracle, 2 * options["sync_every"] + 1)


def by_default() -> None:
    """Check the default: Nesterov momentum 0.9, learning rate 0.7, 32 bits."""
    model = network()
    loop = DiLoCo(model, sync_every=2, config=EXACT)
    outer = {n: x.astype(np.float64) for n, x in flat(model).items()}
    momentum = {n: 0 * x for n, x in outer.items()}
    for step in range(40):
        move(model, step)
        everyones = gathered(weights_of(model))
        mean = torch.stack(everyones).double().mean(0).numpy()
        loop.step()
        if step % 2 == 0:
            continue
        start = 0
        for name, a in outer.items():
            delta = a - mean[start : start + a.size]
            start += a.size
            momentum[name] = 0.9 * momentum[name] + delta
            outer[name] = a - 0.7 * (delta + 0.9 * momentum[name])
            # About ten roundings a round, of values below 16; they accumulate over rounds.
            bound = 10 * (step + 1) * 2.0**-24 * 16
            assert np.abs(flat(model)[name] - outer[name]).max() <= bound, (step, name)


# ---- 2. special settings -------------------------------------------------------------------------


def averages() -> None:
    """Check that one step, rate 1 and no momentum average the parameters, up to rounding."""
    model = network()
    loop = DiLoCo(model, of_rate_one, sync_every=1, config=EXACT)
    for step in range(10):
        move(model, step)
        everyones = torch.stack(gathered(weights_of(model))).double()
        loop.step()
        # A difference, a sum of SIZE, a quotient and a difference, of values below 16.
        bound = (SIZE + 3) * 2.0**-24 * 16
        assert (weights_of(model) - everyones.mean(0)).abs().max() <= bound, step


def equals_data_parallel() -> None:
    """Check that these settings with plain SGD equal DistributedDataParallel, up to rounding."""
    model, other = network(), DistributedDataParallel(network())
    loop = DiLoCo(model, of_rate_one, sync_every=1, config=EXACT)
    inner = torch.optim.SGD(model.parameters(), 0.05)
    with loop.after(inner):
        for step in range(20):
            backward(model, step, shift=0.3)
            inner.step()
    train(other, range(20), shift=0.3)
    assert loop.steps == loop.applied == 20
    largest = float(weights_of(model).abs().max())
    # Each step differs by at most the bound in `averages`; the loss is smooth, so steps hardly
    # amplify the difference.
    bound = 20 * (SIZE + 6) * 2.0**-24 * 4 * max(1.0, largest)
    assert (weights_of(model) - weights_of(other.module)).abs().max() <= bound


def trains() -> None:
    """Check that 2 bits with feedback reach the loss of 32 bits, and SparseLoCo comes close."""
    losses = {}
    for name, make in (
        ("exact", lambda model: DiLoCo(model, sync_every=5, config=EXACT)),
        ("2 bits", lambda model: DiLoCo(model, sync_every=5, config=LEVELS)),
        (
            "overlapped",
            lambda model: DiLoCo(
                model, sync_every=10, fragments=2, fragment_sync_delay=2, config=LEVELS
            ),
        ),
        ("sparse", lambda model: sparse_loco(model, sync_every=5, density=0.1)),
    ):
        model = network()
        first = mean_loss(model)
        loop = make(model)
        for step in range(60):
            train(model, range(step, step + 1))
            loop.step()
        loop.restart()
        identical_on_all_ranks(weights_of(model))
        losses[name] = mean_loss(model) / first
    assert losses["exact"] < 0.3, losses
    assert all(loss < losses["exact"] + 0.1 for loss in losses.values()), losses


def mean_loss(model: nn.Module) -> float:
    from torch_training import batch, loss_of

    with torch.no_grad():
        return sum(float(loss_of(model, batch(rank, 10**6))) for rank in range(4)) / 4


# ---- 3. models -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Model with frozen, tied and half-precision parameters, and a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(RANK)  # ranks begin with different weights
        self.first = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)
        self.second = nn.Linear(24, 24, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(24, 8).requires_grad_(False)
        self.to(dtype)


def models() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model: Any = Mixed(dtype)
        left = [model.frozen.weight.clone(), model.norm.running_mean.clone()]
        loop = DiLoCo(model, sync_every=2, config=NEAREST)
        assert loop.names == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
        assert all(a.dtype == torch.float32 for a in loop.outer_parameters)
        trained = torch.cat([p.detach().flatten().float() for p in loop.parameters])
        identical_on_all_ranks(trained)
        for step in range(4):
            with torch.no_grad():
                for p in loop.parameters:
                    p += torch.full_like(p, 0.01 * (RANK + step))
            loop.step()
        for p, outer in zip(loop.parameters, loop.outer_parameters, strict=True):
            assert torch.equal(p, outer.to(dtype))
            identical_on_all_ranks(p.detach().float())
        now = [model.frozen.weight, model.norm.running_mean]
        assert all(map(torch.equal, now, left))
        assert model.second.weight is model.first.weight


def fragments() -> None:
    """Use modules as fragments, and torchft's form of an outer optimizer."""
    model: Any = network()
    outer = torch.optim.SGD(model.parameters(), **HALVES)
    halves_of = [nn.ModuleList([model[0], model[2]]), model[4]]
    loop = DiLoCo(model, outer, sync_every=4, fragments=halves_of, config=NEAREST, rules=EVERYTHING)
    assert loop.outer_optimizer is outer
    assert [sum(loop.parameters[i].numel() for i in f) for f in loop.fragments] == [1200, 200]
    oracle = expected(loop, flat(model), rate=0.5, momentum=0.5)
    check_rounds(loop, model, oracle, 9)

    make: Any = DiLoCo
    fails(InvalidArgument, "no fragment has parameter '4.weight'", lambda: make(
        model, sync_every=2, fragments=[model[0], model[2]]
    ))  # fmt: skip
    fails(InvalidArgument, "is in fragments 0 and 1", lambda: make(
        model, sync_every=2, fragments=[model, model[0]]
    ))  # fmt: skip
    fails(
        InvalidArgument,
        "must be new and have all parameters",
        lambda: make(model, outer, sync_every=2),
    )


def bytes_sent() -> None:
    """Check that a round in 2 bits sends a sixteenth plus headers, and other steps send nothing."""
    world: Any = dist.group.WORLD
    comm = Communicator.find(world.group_name)
    model = nn.Linear(512, 512, bias=False)
    loop = DiLoCo(model, sync_every=3, config=Config(bits=2, compressor="levels"))
    sent = []
    for _ in range(6):
        before = comm.bytes_sent
        loop.step()
        sent.append(comm.bytes_sent - before)
    assert sent[0] == sent[1] == sent[3] == sent[4] == 0
    assert sent[2] == sent[5]
    exact = 4 * model.weight.numel() * 2 * (SIZE - 1) / SIZE
    assert exact / 16 <= sent[2] <= exact / 16 * (1 + 16 / 1024) + 500 * SIZE, (sent, exact)


# ---- 4. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    """Resume bit for bit while a fragment is in flight."""
    options: dict[str, Any] = {
        "sync_every": 6, "fragments": 2, "fragment_sync_delay": 2, "config": LEVELS,
        "fragment_update_alpha": 0.25,
    }  # fmt: skip

    def in_place(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer that changes gradients in place, as PyTorch's do on GPUs."""
        return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True, foreach=True)

    def run(model: nn.Module, loop: DiLoCo, steps: range) -> None:
        for step in steps:
            move(model, step)
            loop.step()

    for form in ("torch", "dcp", "memory"):
        with folder_of_all() as folder:
            model = network()
            loop = DiLoCo(model, in_place, **options)
            run(model, loop, range(7))  # sent after step 7, applied after step 9
            file = f"{folder}/{RANK}.pt"
            saved, weights = loop.state_dict(), copy.deepcopy(model.state_dict())
            if form == "dcp":
                dcp_save({"loop": loop}, checkpoint_id=folder)
            else:
                torch.save(saved, file)
            run(model, loop, range(7, 20))

            for _ in range(2):  # all of it belongs to the state
                again = network()
                restored = DiLoCo(again, in_place, **options)
                run(again, restored, range(5))
                if form == "dcp":
                    dcp_load({"loop": restored}, checkpoint_id=folder)
                elif form == "torch":
                    restored.load_state_dict(torch.load(file))  # weights_only, torch's default
                else:
                    restored.load_state_dict(saved)
                again.load_state_dict(weights)
                run(again, restored, range(7, 20))
                assert torch.equal(weights_of(again), weights_of(model)), form
                assert (restored.steps, restored.applied) == (loop.steps, loop.applied)
                for name, e in loop.exchange.residuals.tensors.items():
                    assert torch.equal(restored.exchange.residuals.tensors[name], e), (form, name)


def resumed_on_other_rank_count() -> None:
    """Check that the mean of the residuals is preserved on any number of ranks."""
    model = network()
    loop = DiLoCo(model, of_rate_one, sync_every=1, config=LEVELS)
    move(model, 0)
    loop.step()
    pending = {
        name: torch.stack(gathered(e)).double().mean(0)
        for name, e in loop.exchange.residuals.tensors.items()
    }
    own = loop.state_dict()
    loop.consolidate()
    saved = loop.state_dict()
    alone: Any = dist.new_group([0], backend="cgx")
    if RANK == 0:
        other = DiLoCo(network(), of_rate_one, sync_every=1, config=LEVELS, process_group=alone)
        other.load_state_dict(saved)
        other.restart()
        before = [a.detach().clone() for a in other.outer_parameters]
        other.step()  # no parameter changed, so only the pending correction is averaged
        for name, outer, a in zip(other.names, other.outer_parameters, before, strict=True):
            want = a.double().flatten() - pending[name] if name in pending else a.double().flatten()
            bound = SIZE * 2.0**-22 * max(1.0, float(want.abs().max()))
            assert (outer.detach().double().flatten() - want).abs().max() <= bound, name
        if SIZE > 1:
            other.load_state_dict(own)
            fails(InvalidArgument, f"of rank 0 of {SIZE}", other.step)
    dist.barrier()


# ---- 5. NaN and infinities, and bad input --------------------------------------------------------


def not_finite() -> None:
    """Check that it appears on every rank."""
    for config in (NEAREST, LEVELS, TOPK, EXACT):
        model = network()
        loop = DiLoCo(model, sync_every=1, config=config)
        if RANK == SIZE - 1:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("nan")
        loop.step()
        assert not weights_of(model).isfinite().all(), config


def bad_input() -> None:
    make: Any = DiLoCo
    model = network()

    def of(**options: Any) -> Callable[[], Any]:
        return lambda: make(model, **{"sync_every": 4, **options})

    for options, words in (
        ({"sync_every": 0}, "sync_every is 0"),
        ({"fragments": 3}, "fragments must divide it"),
        ({"fragments": 4}, "there are 3 layers"),
        ({"fragment_sync_delay": 4}, "fragment_sync_delay is 4"),
        ({"fragment_update_alpha": 2}, "from 0 to 1"),
        ({"mean_over": "all"}, "mean_over is 'all'"),
        ({"mean_over": "senders"}, "use Config(compressor='topk')"),
        ({"mean_over": "senders", "config": replace(TOPK, error_feedback=False)}, "with error"),
        ({"carrier": "mpi"}, "carrier is 'mpi'"),
        ({"config": 4}, "config is 4"),
    ):  # fmt: skip
        fails(InvalidArgument, words, of(**options))
    fails(TypeError, "is torch.float64", lambda: make(network(torch.float64), sync_every=2))
    model.requires_grad_(False)
    fails(InvalidArgument, "no parameter requires a", of())
    model.requires_grad_(True)
    assert len(of(fragments=np.int64(2))().fragments) == 2
    loop = DiLoCo(model, sync_every=2)
    fails(InvalidArgument, "['steps']", lambda: loop.load_state_dict({"steps": 1}))
    other = DiLoCo(nn.Linear(4, 4), sync_every=2).state_dict()
    fails(InvalidArgument, "does not have: 'bias'", lambda: loop.load_state_dict(other))
    other = DiLoCo(network(), sync_every=4, config=TOPK).state_dict()
    sparse = sparse_loco(network(), sync_every=4)
    fails(InvalidArgument, "'ranks' in the checkpoint and", lambda: sparse.load_state_dict(other))
    assert sparse.exchange.config.algorithm == "one_shot"
    loop.step()
    with mock.patch.object(loop.exchange, "average", side_effect=Unsupported("why")):
        fails(Unsupported, "why", loop.step)  # no rank is lost, so regroup() would not help


def mismatched_settings() -> None:
    """Check that every rank raises, with both values."""
    if SIZE == 1:
        return
    last = RANK == SIZE - 1
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sync_every": 4 if last else 2}, "rank 0 has sync_every 2, rank"),
        ({"config": LEVELS if last else NEAREST}, "has config"),
        ({"outer_optimizer": halves if last else None}, "has outer_optimizer SGD"),
    ]
    make: Any = DiLoCo
    for options, words in cases:
        given = {"sync_every": 2} | options
        fails(InvalidArgument, words, lambda o=given: make(network(), **o))
    wide = nn.Linear(24, 25 if last else 24)
    fails(InvalidArgument, "parameter 0 weight float32[24, 24]", lambda: DiLoCo(wide, sync_every=2))


CHECKS = [matches_reference, by_default, averages, equals_data_parallel, trains, models, fragments]
CHECKS += [
    bytes_sent,
    resumed,
    resumed_on_other_rank_count,
    not_finite,
    bad_input,
    mismatched_settings,
]
