"""State and errors of the hooks.

1. gradients that are zero, not finite, or of 16 bits
2. rebuilt buckets, rules, blocks
3. checkpoints; those for other numbers of ranks are in run_torch_restart.py
4. bad input
"""

from typing import Any

import method_cases
import torch
import torch.distributed as dist
from failing import fails
from method_cases import Method, same
from shared_folder import folder_of_all
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch_training import (
    RANK,
    SIZE,
    backward,
    batch,
    gathered,
    identical_on_all_ranks,
    loss_of,
    network,
    train,
)

import cgx_ops.torch
from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops.torch import ddp

from .common import hooked, watched

MATRICES = {"0.weight", "2.weight", "4.weight"}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def tensors_of_state(state: ddp.PowerSGDState) -> dict[str, Any]:
    kept = {"e": state.residuals.tensors, "q": state.factors.q}
    tensors = {f"{what} {n}": x for what, each in kept.items() for n, x in each.items()}
    return {**tensors, "stats": state.compression_stats()}


METHOD = Method(ddp.power_sgd_hook, ddp.PowerSGDState, hooked, tensors_of_state)


# ---- 1. gradients --------------------------------------------------------------------------------


def zeros() -> None:
    """Check that there is no NaN, and later gradients are averaged correctly."""
    variants: list[dict[str, Any]] = [
        {},
        {"feedback": "torch"},
        {"hook": ddp.batched_power_sgd_hook},
    ]
    for rank in (1, 2, 4):
        for options in variants:
            model, state = hooked(matrix_approximation_rank=rank, **options)
            for step, scale in enumerate((1.0, 1.0, 0.0, 0.0, 1.0, 0.0)):
                backward(model, step, scale)
                got = torch.cat([x.flatten() for x in gradients_of(model).values()])
                assert got.isfinite().all(), (rank, options, step)
                assert got.any() or scale == 0, (rank, options, step)
            assert all(q.isfinite().all() and q.any() for q in state.factors.q.values())


def not_finite() -> None:
    """Check that one rank's NaN appears on every rank, in its layer alone, and not in the state."""
    for hook in (ddp.power_sgd_hook, ddp.batched_power_sgd_hook):
        for feedback in ("local", "torch"):
            model, state, watch = watched(hook, feedback=feedback)
            for step in range(5):
                model.zero_grad()
                loss = loss_of(model, batch(RANK, step))
                if step == 3 and RANK == 0:
                    weight = model.module[2].weight
                    loss = loss + (weight * float("nan")).sum()
                loss.backward()
                for name, average in watch.averages.items():
                    spoilt = step == 3 and (name == "2.weight" or hook != ddp.power_sgd_hook)
                    assert bool(average.isnan().all()) == spoilt, (step, name)
                    assert bool(average.isnan().any()) == spoilt, (step, name)
            assert all(e.isfinite().all() for e in state.residuals.tensors.values())
            assert all(q.isfinite().all() for q in state.factors.q.values())


def sixteen_bits() -> None:
    """Compare with float32 up to the gradients' rounding; residuals are float32."""
    for dtype, u in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-10)):
        half, state, watch = watched(module=network(dtype))
        for step in range(4):
            backward(half, step)
            for name, average in watch.averages.items():
                if name in state.factors.q:
                    given = torch.stack(watch.given[name]) + torch.stack(watch.old[name])
                    e = torch.stack(gathered(state.residuals.tensors[name])).view_as(given)
                    want = (given - e).mean(0)
                    assert ((average - want).abs() <= u * want.abs() + 1e-6).all(), (dtype, name)
        assert {e.dtype for e in state.residuals.tensors.values()} == {torch.float32}
        identical_on_all_ranks(torch.cat([x.flatten().float() for x in watch.averages.values()]))


def inside_torchs_wrapper() -> None:
    """Compare with averaging 16-bit gradients; the model itself is float32."""
    hook: Any = default_hooks.fp16_compress_wrapper(ddp.power_sgd_hook)  # type: ignore[arg-type]
    model, state = hooked(hook=hook)
    weights = train(model, range(5))
    want = train(hooked()[0], range(5))
    # Five steps of 0.05, each off by 2^-11 of a gradient and of an average, which are less than 1.
    assert (weights[-1] - want[-1]).abs().max() <= 5 * 0.05 * 2 * 2.0**-11
    assert not torch.equal(weights[-1], want[-1])
    assert state.factors.q.keys() == MATRICES


# ---- 2. buckets, rules, blocks -------------------------------------------------------------------


def buckets() -> None:
    """Check that there is one message of P and one of Q for any number of layers."""
    for state in method_cases.buckets(METHOD, messages=2):
        assert state.residuals.tensors.keys() == state.factors.q.keys() == MATRICES


def carried_by_torch() -> None:
    for options in ({}, {"factor_bits": 8}):
        method_cases.carried_by_torch(METHOD, **options)


def channels_last() -> None:
    """Check that a channels-last convolution is factored in its memory order."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(6, 12, 3), nn.Flatten(), nn.Linear(12, 2))
    model, state = hooked(module.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    for step in range(4):
        torch.manual_seed(10 * step + RANK)
        x = torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)
        model(x).square().sum().backward()
    assert state.factors.q["0.weight"].shape == (54, 2)


def rules_and_blocks() -> None:
    rules = Rules([(r"2\.weight", 32)])
    model, state = hooked(rules=rules)
    train(model, range(3))
    assert state.factors.q.keys() == MATRICES - {"2.weight"}
    before = {name: e.clone() for name, e in state.residuals.tensors.items()}
    with cgx_ops.torch.uncompressed():
        backward(model, 3)
    same(state.residuals.tensors, before)
    alone = network()
    alone.load_state_dict(model.module.state_dict())
    backward(alone, 3)
    for name, x in gradients_of(alone).items():
        mean = torch.stack(gathered(x)).mean(0)
        assert torch.allclose(gradients_of(model.module)[name], mean, rtol=1e-5, atol=1e-7), name
    # A rule added later applies from the next step on.
    model, state = hooked(rules=Rules())
    train(model, range(3))
    before = {name: q.clone() for name, q in state.factors.q.items()}
    assert state.rules is not None
    state.rules = state.rules.with_first((r"2\.weight", 32))
    backward(model, 3)
    kept = {name for name, q in state.factors.q.items() if torch.equal(q, before[name])}
    assert kept == {"2.weight"}
    # Layers that are not factored use the config, with residuals.
    model, state = hooked(min_compression_rate=5, config=Config(bits=1, compressor="levels"))
    train(model, range(4))
    assert state.factors.q.keys() == {"0.weight", "2.weight"}
    assert state.residuals.tensors.keys() == MATRICES
    # Without feedback.
    model, state = hooked(use_error_feedback=False)
    train(model, range(4))
    assert not state.residuals.tensors


# ---- 3. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    variants: list[dict[str, Any]] = [
        {"factor_bits": 8},
        {"feedback": "torch"},
        {"warm_start": False},
    ]
    for options in variants:
        method_cases.resumed(METHOD, 7, **options)


def groups_of_a_mesh() -> None:
    """Check that each group has separate residuals and Q, also in a checkpoint of all ranks."""
    groups: list[Any] = [dist.new_group([rank], backend="gloo") for rank in range(SIZE)]

    def fresh(filled: bool, consolidated: bool) -> ddp.PowerSGDState:
        state = ddp.PowerSGDState(groups[RANK], carrier="c10d")
        if filled:
            x = torch.full((4,), float(RANK))
            state.residuals.claim(*state.place)
            state.residuals.of("w", x).copy_(x)
            state.factors.q["w"] = x.clone()
        if consolidated:
            state.consolidate()
        return state

    for consolidated in (False, True):
        saved, loaded = fresh(True, consolidated), fresh(False, consolidated)
        with folder_of_all() as folder:
            dcp_save({"cgx": saved}, checkpoint_id=folder)
            dcp_load({"cgx": loaded}, checkpoint_id=folder)
        for kept in (loaded.residuals.tensors, loaded.factors.q):
            assert kept["w"].tolist() == [RANK] * 4, kept
    # Also on the default group, whose state has no name.
    anywhere = ddp.PowerSGDState()
    anywhere.load_state_dict(saved.state_dict())
    assert anywhere.residuals.tensors["w"].tolist() == [RANK] * 4


# ---- 4. bad input --------------------------------------------------------------------------------


def bad_arguments() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank is 0; it must be an integer"),
        ({"matrix_approximation_rank": 1.5}, "matrix_approximation_rank is 1.5"),
        (
            {"start_powerSGD_iter": 1},
            "start_powerSGD_iter is 1; with use_error_feedback or warm_st",
        ),
        ({"feedback": "mean"}, "feedback is 'mean'; it must be 'local' or 'torch'"),
        ({"min_compression_rate": 0}, "min_compression_rate is 0; it must be a number above 0"),
        ({"orthogonalization_epsilon": -1}, "orthogonalization_epsilon is -1"),
        ({"random_seed": -1}, "random_seed is -1; it must be 0 to 2**32 - 1"),
        ({"factor_bits": 4}, "factor_bits is 4; it must be one of 32, 16, 8"),
        ({"carrier": "mpi"}, "carrier is 'mpi'; it must be 'native' or 'c10d'"),
        ({"config": 4}, "config is 4; it must be a cgx_ops.Config"),
    ]
    for options, words in refused:
        fails(InvalidArgument, words, lambda own=options: ddp.PowerSGDState(**own))
    assert ddp.PowerSGDState(start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)


def bad_gradients() -> None:
    method_cases.bad_gradients(METHOD)


def bad_states() -> None:
    # State of another model: a matrix of another shape, or of another size.
    model, state = hooked()
    train(model, range(3))
    for change, words in (
        (lambda s: s.factors.q.update({"2.weight": torch.ones(5, 2)}), "shape (5, 2); it must"),
        (lambda s: s.residuals.tensors.update({"2.weight": torch.ones(5)}), "has 5 elements"),
    ):
        other, broken = hooked()
        broken.load_state_dict(state.state_dict())
        change(broken)
        fails(Exception, words, lambda m=other: backward(m, 0))
    other, broken = hooked()
    state.residuals.owner = RANK, 7  # as saved in another job
    broken.load_state_dict(state.state_dict())
    fails(Exception, f"those of rank {RANK} of 7", lambda: backward(other, 0))
    method_cases.bad_states(METHOD)


CHECKS = [
    zeros,
    not_finite,
    sixteen_bits,
    inside_torchs_wrapper,
    buckets,
    carried_by_torch,
    channels_last,
    rules_and_blocks,
    resumed,
]
CHECKS += [groups_of_a_mesh, bad_arguments, bad_gradients, bad_states]
