"""OneBitAdam and Signum.

1. values: bitwise equal to the reference; conservation; carrier="c10d"
2. convergence, and elements without gradients
3. checkpoints
4. bad input
"""

import copy
from typing import Any

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
    batch,
    gathered,
    identical_on_all_ranks,
    loss_of,
    network,
    weights_of,
)

from cgx_ops import Communicator, Config, InvalidArgument
from cgx_ops.torch.ddp import CommHookType
from cgx_ops.torch.optim import OneBitAdam, Signum

SHIFT = 0.1  # between ranks' data
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01, "warmup_steps": 10}
MAKERS: dict[str, Any] = {
    "one_bit_adam": lambda params, **options: OneBitAdam(params, **ADAM | options),
    "signum": lambda params, **options: Signum(
        params, **{"lr": 0.002, "weight_decay": 0.01, **options}
    ),
}


def backward(model: nn.Module, step: int) -> float:
    model.zero_grad()
    loss = loss_of(model, batch(RANK, step, SHIFT))
    loss.backward()
    return float(loss.detach())


def run(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
    return losses


# ---- 1. values -----------------------------------------------------------------------------------


def reference_of(name: str, x: torch.Tensor) -> Any:
    start = tc.to_numpy(x)
    if name == "signum":
        return reference.Signum(SIZE, start, lr=0.002, decay=0.01)
    own = {"bits": 1, "compressor": "levels"} if x.dim() > 1 else {"bits": 32}
    segment = reference.Segment(0, x.numel(), **own)  # type: ignore[arg-type]
    return reference.OneBitAdam(SIZE, start, lr=0.01, warmup=10, decay=0.01, segment=segment)


def matches_reference() -> None:
    """Compare 50 steps: states and residuals bit for bit, parameters up to a square root."""
    for name, make in MAKERS.items():
        model = network()
        named = list(model.named_parameters())
        wants = [reference_of(name, p) for _, p in named]
        optimizer = make(model.parameters())
        for step in range(50):
            backward(model, step)
            for (_, p), want in zip(named, wants, strict=True):
                assert p.grad is not None
                want.step([tc.to_numpy(g) for g in gathered(p.grad)])
            optimizer.step()
            for i, ((of, p), want) in enumerate(zip(named, wants, strict=True)):
                state, x = optimizer.state[p], tc.to_numpy(p)
                if name == "signum":
                    assert np.array_equal(x, want.x), (step, of)
                    assert np.array_equal(tc.to_numpy(state["momentum_buffer"]), want.momenta[RANK])
                    continue
                assert (np.abs(x - want.x) <= want.off).all(), (step, of)
                assert np.array_equal(tc.to_numpy(state["exp_avg"]), want.m), (step, of)
                assert np.array_equal(tc.to_numpy(state["exp_avg_sq"]), want.v), (step, of)
                residual = optimizer.exchange.residuals.tensors.get(str(i))
                if residual is not None:
                    assert np.array_equal(tc.to_numpy(residual), want.residuals[RANK]), (step, of)
        identical_on_all_ranks(weights_of(model))
        kept = {str(i) for i, (_, p) in enumerate(named) if p.dim() > 1}
        assert optimizer.exchange.residuals.tensors.keys() == (
            kept if name == "one_bit_adam" else set()
        )


def conservation() -> None:
    """Check that momenta plus old residuals equal the average (as a sum) plus new residuals."""
    model = network()
    optimizer = MAKERS["one_bit_adam"](model.parameters(), betas=(0.5, 0.999))
    parameters = list(model.parameters())
    for step in range(16):
        backward(model, step)
        old = optimizer.exchange.residuals.tensors
        given, before = [], []
        for i, p in enumerate(parameters):
            assert p.grad is not None
            own = optimizer.state[p]["exp_avg"] * 0.5 + p.grad * 0.5
            given.append([g.double() for g in gathered(own)])
            e = old.get(str(i), torch.zeros(p.numel())).view(p.shape)
            before.append([x.double() for x in gathered(e)])
        optimizer.step()
        if step < 10:
            assert not old
            continue
        for i, p in enumerate(parameters):
            now = optimizer.exchange.residuals.tensors.get(str(i), torch.zeros(p.numel()))
            left = torch.stack([x.double() for x in gathered(now.view(p.shape))]).sum(0)
            values = [g + e for g, e in zip(given[i], before[i], strict=True)]
            lost = torch.stack(values).sum(0) - left - SIZE * optimizer.state[p]["exp_avg"].double()
            # Roundings per value: the sum with its residual, minus the decoded value, the ranks'
            # sum, the quotient, and the same for the encoded average. Each is at most 2^-24 of the
            # sum of all of them and the scales, which are means of magnitudes.
            scale = torch.stack(values).abs().sum(0).max()
            assert (lost.abs() <= (2 * SIZE + 8) * 2.0**-24 * 4 * scale).all(), (step, i)


def carried_by_torch() -> None:
    """Check that carrier="c10d" over gloo gives the same bits, also inside of DDP."""
    gloo: Any = dist.new_group(backend="gloo")
    for name, make in MAKERS.items():
        model = network()
        run(model, make(model.parameters()), range(14))
        other = network()
        run(other, make(other.parameters(), carrier="c10d", process_group=gloo), range(14))
        assert torch.equal(weights_of(other), weights_of(model)), name
        wrapped = DistributedDataParallel(network())
        CommHookType.NOOP.register(wrapped)
        run(wrapped, make(wrapped.parameters()), range(14))
        assert torch.equal(weights_of(wrapped), weights_of(model)), name


def bytes_sent() -> None:
    """Check that a step sends one message: after the warm-up one bit per value, and scales."""
    if SIZE == 1:
        return
    world: Any = dist.group.WORLD
    comm = Communicator.find(world.group_name)
    for name, make in MAKERS.items():
        model = network()
        optimizer = make(model.parameters())
        sent = []
        for step in range(12):
            backward(model, step)
            before = comm.bytes_sent, comm.collectives
            optimizer.step()
            after = comm.bytes_sent, comm.collectives
            sent.append(after[0] - before[0])
            assert after[1] - before[1] == 1 or step == 0, name  # the first call compares the ranks
        vectors = sum(p.numel() for p in model.parameters() if p.dim() <= 1)
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        whole = 2 * (SIZE - 1) / SIZE
        least = whole * (matrices / 8 + (4 * vectors if name == "one_bit_adam" else vectors / 8))
        assert least <= sent[-1] <= 1.15 * least + 700 * SIZE, (name, sent, least)
        assert name == "signum" or sent[-1] < 0.25 * sent[1], sent


# ---- 2. convergence ------------------------------------------------------------------------------


def convergence() -> None:
    """Check that one bit with both feedbacks trains like exact momentum; votes train, too."""
    ends: dict[str, float] = {}
    first = 0.0
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("exact", "one_bit_adam", {"config": Config(bits=32)}),
        ("one bit", "one_bit_adam", {}),
        ("votes", "signum", {}),
    ]
    for what, name, options in variants:
        model = network()
        rate: dict[str, Any] = {"lr": 0.003, "warmup_steps": 30} if name == "one_bit_adam" else {}
        losses = run(model, MAKERS[name](model.parameters(), **rate, **options), range(120))
        means = torch.stack(gathered(torch.tensor(losses))).mean(0)
        first, ends[what] = float(means[0]), float(means[-5:].mean())
    assert ends["exact"] < 0.05 * first, (first, ends)
    assert abs(ends["one bit"] - ends["exact"]) < 0.01 * first, (first, ends)
    assert ends["votes"] < 0.2 * first, (first, ends)


def without_gradients() -> None:
    """Check that unused rows do not move, and a rank without a gradient counts as zero."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 32)
    start = table.weight.detach().clone()
    optimizer = OneBitAdam(table.parameters(), lr=0.01, warmup_steps=3)
    for step in range(12):
        table.zero_grad(set_to_none=True)
        if RANK == 0:
            table(torch.tensor([step % 4, 5])).square().sum().backward()
        optimizer.step()
    never = [4, 6, 7, 8, 9]
    seen = [0, 1, 2, 5]
    assert torch.equal(table.weight[never], start[never])
    moved = (table.weight.detach() - start)[seen].abs()
    # A large move is expected after so short a warm-up; divided by eps it would be a million.
    assert moved.min() > 0 and moved.max() < 1000, (moved.min(), moved.max())
    identical_on_all_ranks(table.weight.detach().flatten())
    table.weight.requires_grad_(False)
    frozen = table.weight.clone()
    optimizer.step()
    assert torch.equal(table.weight, frozen)
    table.weight.requires_grad_(True)
    # Votes have no zero: elements without votes alternate.
    voting = Signum(table.parameters(), lr=0.01)
    before = table.weight.detach().clone()
    for _ in range(2):
        table.zero_grad(set_to_none=True)
        voting.step()
    assert (table.weight.detach() - before).abs().max() <= 1e-6


def not_finite() -> None:
    """Check that one rank's NaN appears on every rank."""
    for make in MAKERS.values():
        for at in (2, 12):
            model = network()
            optimizer = make(model.parameters())
            run(model, optimizer, range(at))
            backward(model, at)
            weight = next(model.parameters())
            assert weight.grad is not None
            if RANK == SIZE - 1:
                weight.grad[0, 0] = float("nan")
            optimizer.step()
            assert weight[0, 0].isnan()
            assert all(e.isfinite().all() for e in optimizer.exchange.residuals.tensors.values())


def sixteen_bits() -> None:
    """Check that the state is float32, and parameters are rounded once."""
    for name, make in MAKERS.items():
        model = network(torch.bfloat16)
        optimizer = make(model.parameters())
        run(model, optimizer, range(12))
        assert {x.dtype for s in optimizer.state.values() for x in s.values()} == {torch.float32}
        assert next(model.parameters()).dtype == torch.bfloat16, name
        identical_on_all_ranks(weights_of(model))


# ---- 3. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    """Resume bit for bit, from the warm-up and from after it."""
    for name, make in MAKERS.items():
        for at, form, dtype in (
            (6, "torch", torch.float32),
            (13, "torch", torch.bfloat16),
            (13, "dcp", torch.float32),
        ):
            with folder_of_all() as folder:
                model = network(dtype)
                optimizer = make(model.parameters())
                run(model, optimizer, range(at))
                weights = copy.deepcopy(model.state_dict())
                if form == "dcp":
                    dcp_save({"optimizer": optimizer}, checkpoint_id=folder)
                else:
                    torch.save(optimizer.state_dict(), f"{folder}/{RANK}.pt")
                copied = copy.deepcopy((model, optimizer))
                run(model, optimizer, range(at, at + 8))
                run(*copied, range(at, at + 8))
                assert torch.equal(weights_of(copied[0]), weights_of(model)), (name, at)

                again = network(dtype)
                other = make(again.parameters())
                run(again, other, range(11))
                if form == "dcp":
                    dcp_load({"optimizer": other}, checkpoint_id=folder)
                else:
                    other.load_state_dict(torch.load(f"{folder}/{RANK}.pt"))
                again.load_state_dict(weights)
                run(again, other, range(at, at + 8))
                assert torch.equal(weights_of(again), weights_of(model)), (name, at, form)
                for e, own in zip(
                    other.exchange.residuals.tensors.values(),
                    optimizer.exchange.residuals.tensors.values(),
                    strict=True,
                ):
                    assert torch.equal(e, own)


def resumed_on_other_rank_count() -> None:
    alone: Any = dist.new_group([0], backend="cgx")
    for name, make in MAKERS.items():
        model = network()
        optimizer = make(model.parameters())
        run(model, optimizer, range(13))
        own = copy.deepcopy(optimizer.state_dict())
        optimizer.consolidate()
        for e in optimizer.exchange.residuals.tensors.values():
            identical_on_all_ranks(e)
        for state in optimizer.state.values():
            for x in state.values():
                identical_on_all_ranks(x.flatten())
        consolidated = copy.deepcopy(optimizer.state_dict())
        for saved in (own, consolidated):  # a loaded state is saved again in its original form
            optimizer.load_state_dict(saved)
            assert optimizer.state_dict()["own"].keys() == saved["own"].keys(), name
        if RANK == 0:
            other = make(model.parameters(), process_group=alone)
            other.load_state_dict(optimizer.state_dict())
            backward(model, 13)
            other.step()
            if name == "one_bit_adam" and SIZE > 1:
                other.load_state_dict(own)
                fails(InvalidArgument, f"of rank 0 of {SIZE}", other.step)
            elif SIZE > 1:
                words = f"the state is that of rank 0 of {SIZE}, but this is rank 0 of 1"
                fails(InvalidArgument, words, lambda o=other, s=own: o.load_state_dict(s))
        dist.barrier()


# ---- 4. bad input --------------------------------------------------------------------------------


def bad_settings() -> None:
    params = list(network().parameters())
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("one_bit_adam", {"warmup_steps": 0}, "warmup_steps is 0; it must be an integer of at"),
        ("one_bit_adam", {"warmup_steps": -3}, "warmup_steps is -3"),
        ("one_bit_adam", {"warmup_steps": 2.5}, "warmup_steps is 2.5"),
        ("one_bit_adam", {"betas": (1.0, 0.9)}, "betas[0] is 1.0; it must be at least 0 and less"),
        ("one_bit_adam", {"eps": 0.0}, "eps is 0.0; it must be more than 0"),
        ("one_bit_adam", {"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ("one_bit_adam", {"config": 4}, "config is 4"),
        ("one_bit_adam", {"config": Config(compressor="sign")}, "have no magnitude"),
        ("signum", {"momentum": 1.0}, "momentum is 1.0"),
        ("signum", {"weight_decay": -1.0}, "weight_decay is -1.0"),
        ("signum", {"carrier": "x"}, "carrier is 'x'"),
    ]
    for name, options, words in bad:
        fails(InvalidArgument, words, lambda n=name, o=options: MAKERS[n](params, **o))
    for make in MAKERS.values():
        for dtype in (torch.complex64, torch.float64):
            parameter = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
            fails(TypeError, f"is {dtype}", lambda m=make, p=parameter: m([p]))
        sparse = nn.Embedding(20, 8, sparse=True)
        optimizer = make(sparse.parameters())
        sparse(torch.tensor([1])).sum().backward()
        fails(TypeError, "sparse=False", optimizer.step)


def bad_states() -> None:
    adam, signum = (make(network().parameters()) for make in MAKERS.values())
    fails(InvalidArgument, "the state belongs to a Signum", lambda: adam.load_state_dict(
        signum.state_dict()
    ))  # fmt: skip
    other = MAKERS["one_bit_adam"](nn.Linear(3, 3).parameters())
    fails(InvalidArgument, "another model's", lambda: other.load_state_dict(adam.state_dict()))
    first, *others = network().parameters()
    grouped = MAKERS["one_bit_adam"]([{"params": [first]}, {"params": others}])
    grouped.step()
    fails(InvalidArgument, "the state have [6] parameters", lambda: grouped.load_state_dict(
        adam.state_dict()
    ))  # fmt: skip
    assert grouped.exchange.steps == 1, "half of it was loaded"
    exact = torch.optim.Adam(network().parameters())
    fails(
        InvalidArgument,
        "'exchange' is missing",
        lambda: adam.load_state_dict(exact.state_dict()),
    )
    adam.step()
    own = {"params": [nn.Parameter(torch.zeros(3))]}
    fails(InvalidArgument, "before the first", lambda: adam.add_param_group(own))


def mismatched_settings() -> None:
    """Check that every rank raises."""
    if SIZE == 1:
        return
    for make in MAKERS.values():
        model = network()
        with torch.no_grad():
            next(model.parameters()).add_(0.1 * RANK)
        fails(InvalidArgument, "rank 0 has parameter 0 of shape", make(model.parameters()).step)
        optimizer = make(network().parameters(), lr=0.1 + RANK)
        fails(InvalidArgument, "rank 0 has group 0's lr 0.1, rank", optimizer.step)


CHECKS = [matches_reference, conservation, carried_by_torch, bytes_sent, convergence]
CHECKS += [without_gradients, not_finite, sixteen_bits, resumed, resumed_on_other_rank_count]
CHECKS += [bad_settings, bad_states, mismatched_settings]
