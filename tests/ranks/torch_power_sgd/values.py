"""Values of averages and residuals.

1. PyTorch's trajectory
2. the reference's averages and residuals
3. gradients are conserved; residuals stay bounded
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from reference import PowerSGD, given_up, given_up_bound
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as pytorch
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, SIZE, backward, gathered, identical_on_all_ranks, network, train

from cgx_ops import Config
from cgx_ops.methods import low_rank
from cgx_ops.torch import ddp

from .common import hooked, watched

# ---- 1. PyTorch's trajectory ---------------------------------------------------------------------


def pytorchs_trajectory(*variants: dict[str, Any]) -> None:
    """Compare the weights of 100 steps with PyTorch's, up to rounding noise.

    The tolerance is 1e-5, or ten times the noise of PyTorch's own run. Error feedback and warm
    start amplify rounding errors, more so for singular values close to each other (for features of
    one size, from 2^-22 to 1e-2 in 100 steps). Features therefore decay here. The noise is measured
    by a second run of PyTorch from weights that are larger by 2^-22: the largest difference at any
    step before.
    """
    gloo = dist.new_group(backend="gloo")

    def pytorchs(larger: float, options: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
        module = network()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 1 + larger
        model = DistributedDataParallel(module, process_group=gloo)
        state = pytorch.PowerSGDState(gloo, **options)
        model.register_comm_hook(state, pytorch.powerSGD_hook)
        return train(model, range(100), 0.02, shift=0.1, decay=0.1), state

    for own in variants:
        options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, **own}
        want, theirs = pytorchs(0, options)
        model, ours = hooked(feedback="torch", **options)
        got = train(model, range(100), 0.02, shift=0.1, decay=0.1)
        farthest = 0.0
        for x, y, z in zip(got, want, pytorchs(2.0**-22, options)[0], strict=True):
            farthest = max(farthest, float((z - y).norm()))
            assert (x - y).norm() <= max(1e-5 * y.norm(), 10 * farthest), own
        assert (want[-1] - want[0]).norm() > 0.1 * want[0].norm(), "the model must train"
        assert farthest < 1e-3 * want[-1].norm(), (own, "the comparison must be meaningful")
        assert ours.compression_stats() == theirs.compression_stats()
        identical_on_all_ranks(got[-1])


def pytorchs_trajectory_by_default() -> None:
    pytorchs_trajectory({})


def pytorchs_trajectory_with_its_options() -> None:
    pytorchs_trajectory(
        {"matrix_approximation_rank": 1},
        {"matrix_approximation_rank": 4, "random_seed": 7, "batch_tensors_with_same_shape": True},
        {"warm_start": False},
        {"use_error_feedback": False},
    )


# ---- 2. the reference ----------------------------------------------------------------------------


def matches_reference() -> None:
    """Compare with the reference, with different data on each rank."""
    cases: list[tuple[Literal["local", "torch"], int]] = [("local", 1), ("local", 3), ("torch", 2)]
    for feedback, rank in cases:
        model, state, watch = watched(feedback=feedback, matrix_approximation_rank=rank)
        references: dict[str, PowerSGD] = {}
        for step in range(8):
            backward(model, step, shift=0.3)
            for name, given in watch.given.items():
                average = watch.averages[name].numpy()
                if name not in state.factors.q:
                    want = torch.stack(given + (watch.old[name] if step >= 2 else [])).sum(0) / SIZE
                    assert torch.allclose(torch.from_numpy(average), want, rtol=1e-5, atol=1e-6)
                    continue
                rows, columns = given[0].shape
                if name not in references:
                    first = low_rank.first_q(0, name, 0, columns, rank)
                    references[name] = PowerSGD(SIZE, rows, first, feedback)
                    if feedback == "torch":  # drawn differently; PyTorch itself is the oracle
                        references[name].q = state.factors.q[name].double().numpy()
                        references[name].residuals = [g.double().numpy() - average for g in given]
                        continue
                want = references[name].step([g.numpy() for g in given])
                # Each of a few products rounds by 2^-24 of at most 24 terms; singular values of P
                # differ by a factor below 100.
                close = 100 * 24 * 2.0**-24
                size = abs(want).max() + abs(references[name].residuals[RANK]).max()
                assert abs(average - want).max() <= close * size, (feedback, rank, step, name)
                residual = state.residuals.tensors[name].view(rows, columns).numpy()
                assert abs(residual - references[name].residuals[RANK]).max() <= close * size
        assert references.keys() == {"0.weight", "2.weight", "4.weight"} - (
            {"4.weight"} if rank == 3 else set()
        )


def batched_matches_reference() -> None:
    """Check that a bucket is one matrix, whose padding is zero in each step."""
    cases: list[Literal["local", "torch"]] = ["local", "torch"]
    for feedback in cases:
        model, state, watch = watched(ddp.batched_power_sgd_hook, feedback=feedback)
        reference = None
        for step in range(7):
            watch.given.clear()  # in the order of the bucket
            backward(model, step, shift=0.3)
            if step < 2:
                continue
            flat = [torch.cat([g[r].flatten() for g in watch.given.values()]) for r in range(SIZE)]
            numel, side = len(flat[0]), 38
            assert (side - 1) ** 2 < numel < side**2
            squares = [torch.zeros(side * side) for _ in flat]
            for square, values in zip(squares, flat, strict=True):
                square[:numel] = values
            gradients = [square.view(side, side).numpy() for square in squares]
            average = torch.cat([watch.averages[name].flatten() for name in watch.given]).numpy()
            residual = torch.cat([state.residuals.tensors[name] for name in watch.given]).numpy()
            ((name, q),) = state.factors.q.items()
            if reference is None:
                first = low_rank.first_q(0, name, 0, side, 2)
                reference = PowerSGD(SIZE, side, first, feedback)
                if feedback == "torch":  # drawn as in PyTorch
                    reference.q = q.double().numpy()
                    for kept, mine in zip(
                        reference.residuals, gathered(torch.from_numpy(residual)), strict=True
                    ):
                        kept.reshape(-1)[:numel] = mine
                    continue
            want = reference.step(gradients).reshape(-1)[:numel]
            for kept in reference.residuals:
                kept.reshape(-1)[numel:] = 0
            # As above, for products of 38 terms.
            close = 100 * side * 2.0**-24 * (abs(want).max() + abs(residual).max())
            assert abs(average - want).max() <= close, (feedback, step)
            mine = reference.residuals[RANK].reshape(-1)[:numel]
            assert abs(residual - mine).max() <= close, (feedback, step)


# ---- 3. conservation -----------------------------------------------------------------------------


def conservation() -> None:
    """Check each step: gradients plus old residuals = averages (as sums) plus new residuals."""
    topk = Config(compressor="topk", density=0.1, bucket_size=64)
    variants: list[dict[str, Any]] = [
        {"batch_tensors_with_same_shape": True},
        {"factor_bits": 8},
        {"factor_bits": 16, "min_compression_rate": 5, "config": topk},
        {"hook": ddp.batched_power_sgd_hook},
        {"module": network(torch.bfloat16)},
        {"module": network(torch.float16)},
    ]
    for options in variants:
        model, state, watch = watched(**options)
        module = options.get("module")
        rounded = (
            0.0
            if module is None
            else 2.0**-9
            if module[0].weight.dtype == torch.bfloat16
            else 2.0**-11
        )
        for step in range(5):
            backward(model, step, shift=0.3)
            new = {n: gathered(e) for n, e in sorted(state.residuals.tensors.items())}
            for name, given in watch.given.items():
                gradients = [g.reshape(len(g), -1).numpy() for g in given]
                shape = gradients[0].shape
                old = [e.reshape(shape).numpy() for e in watch.old[name]]
                left = [e.reshape(shape).numpy() for e in new.get(name, watch.old[name])]
                average = watch.averages[name].reshape(shape).numpy()
                if step < 2:
                    old = left
                lost = given_up(gradients, old, average, left)
                bound = given_up_bound(gradients, old, 2, rounded)
                if "hook" in options:  # columns do not belong to single layers
                    bound += bound.max() * 24
                assert (abs(lost) <= bound + 1e-7 * rounded).all(), (options, step, name)
        assert any(e.any() for e in state.residuals.tensors.values())


def residuals_stay_bounded() -> None:
    """Check over 1,000 steps with constant weights that residuals are bounded; PyTorch's grow."""
    norms: dict[str, list[float]] = {}
    for feedback in ("local", "torch"):
        model, state = hooked(feedback=feedback)
        norms[feedback] = []
        for step in range(1002):
            backward(model, step % 10, shift=1.0)
            if step in (501, 1001):
                squares = [e.square().sum() for e in state.residuals.tensors.values()]
                norms[feedback].append(float(torch.stack(squares).sum().sqrt()))
    (halfway, end), (halfway_torch, end_torch) = norms["local"], norms["torch"]
    assert end < 1.25 * halfway, norms
    assert end_torch > 1.9 * halfway_torch and end_torch > 50 * end, norms


CHECKS = [pytorchs_trajectory_by_default, matches_reference, batched_matches_reference]
CHECKS += [conservation]
CHECKS += [pytorchs_trajectory_with_its_options, residuals_stay_bounded]
