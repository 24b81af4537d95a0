"""QuantizedModelAverager, alone and in torch's PostLocalSGDOptimizer.

1. values, against the reference, to the bit
2. torch's optimizer and hook around it
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
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    RANK,
    SIZE,
    batch,
    gathered,
    identical_on_all_ranks,
    loss_of,
    network,
    train,
    weights_of,
)

from cgx_ops import Communicator, Config, InvalidArgument
from cgx_ops._core.call import call_seed
from cgx_ops.torch.averaging import QuantizedModelAverager

FOUR_BITS = Config(bits=4, bucket_size=64)
ONE_BIT = Config(bits=1, compressor="levels", bucket_size=64)  # with error feedback


# ---- 1. values -----------------------------------------------------------------------------------


def mean_of(
    rows: list[torch.Tensor], config: Config, step: int, place: int, residuals: list[Any] | None
) -> torch.Tensor:
    """Return the reference's mean of one parameter's differences."""
    world: Any = dist.group.WORLD
    segment = reference.Segment(
        0, rows[0].numel(), 32 if rows[0].dim() <= 1 else config.bits, config.bucket_size,
        compressor=config.compressor,
    )  # fmt: skip
    seed = call_seed(0, f"QuantizedModelAverager/{place}", step, world.group_name)
    mean = reference.allreduce(
        [tc.to_numpy(row) for row in rows], [segment], op="avg", algorithm="sra",
        rounding="stochastic" if config.compressor == "uniform" else "nearest",
        seeds=[seed] * SIZE, residuals=residuals,
    )  # fmt: skip
    return torch.from_numpy(mean).view(rows[0].shape)


def matches_reference() -> None:
    """Compare the last average and the mean difference; 16-bit parameters are rounded once."""
    for config, dtype in (
        (FOUR_BITS, torch.float32),
        (ONE_BIT, torch.float32),
        (ONE_BIT, torch.bfloat16),
    ):
        model = network(dtype)
        parameters = list(model.parameters())
        averager = QuantizedModelAverager(2, 1, config=config)
        last: list[torch.Tensor] = []
        lost = [[np.zeros(p.numel(), np.float32) for _ in range(SIZE)] for p in parameters]
        for step in range(8):
            train(model, range(step, step + 1))
            before = [gathered(p.detach().float()) for p in parameters]
            averager.average_parameters(model.parameters())
            if step % 2 == 0:
                assert all(
                    torch.equal(p.float(), b[RANK]) for p, b in zip(parameters, before, strict=True)
                )
                continue
            if not last:
                last = [torch.stack(rows).sum(0) / SIZE for rows in before]
            else:
                last = [
                    x
                    + mean_of(
                        [row - x for row in rows], config, step // 2, i,
                        lost[i] if config is ONE_BIT and x.dim() > 1 else None,
                    )
                    for i, (x, rows) in enumerate(zip(last, before, strict=True))
                ]  # fmt: skip
            for i, (p, x) in enumerate(zip(parameters, last, strict=True)):
                assert tc.same_bits(p.detach(), x.to(dtype)), (config, dtype, step, i)
        residuals = averager.exchange.residuals.tensors
        matrices = [str(i) for i, p in enumerate(parameters) if p.dim() > 1]
        assert list(residuals) == (matrices if config is ONE_BIT else [])
        for name, e in residuals.items():
            assert np.array_equal(tc.to_numpy(e), lost[int(name)][RANK]), (config, name)


def exact_matches_pytorch() -> None:
    """Compare 32 bits with PeriodicModelAverager, up to the rounding of differences."""
    models, averagers = (network(), network()), (
        QuantizedModelAverager(3, config=Config(bits=32)),
        PeriodicModelAverager(3),
    )  # fmt: skip
    for step in range(9):
        train(models[0], range(step, step + 1), shift=0.3)
        models[1].load_state_dict(models[0].state_dict())
        for p in models[1].parameters():
            p.grad = torch.zeros_like(p)  # torch skips parameters without a gradient
        largest = max(float(x.abs().max()) for x in gathered(weights_of(models[0])))
        for model, averager in zip(models, averagers, strict=True):
            averager.average_parameters(model.parameters())
        # Here a difference, a sum of SIZE, a quotient and a sum are rounded; torch rounds two of
        # these.
        bound = (2 * SIZE + 6) * 2.0**-24 * 2 * largest
        assert (weights_of(models[0]) - weights_of(models[1])).abs().max() <= bound, step


# ---- 2. torch's optimizer and hook ---------------------------------------------------------------


def post_local(
    config: Config = ONE_BIT, carrier: Any = "native", group: Any = None
) -> tuple[Any, Any, QuantizedModelAverager]:
    """Return a model, its optimizer and its averager; the first two steps average gradients."""
    model = DistributedDataParallel(network())
    state = PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = QuantizedModelAverager(3, 2, group, config=config, carrier=carrier)
    local = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    return model, PostLocalSGDOptimizer(local, averager), averager


def run(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, batch(RANK, step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def post_local_sgd() -> None:
    """Check that parameters are equal exactly after an average, and that training matches exact."""
    first, ends = 0.0, {}
    for name, config in (("exact", Config(bits=32)), ("1 bit", ONE_BIT), ("4 bits", FOUR_BITS)):
        model, optimizer, averager = post_local(config)
        losses: list[float] = []
        for step in range(30):
            losses += run(model, optimizer, range(step, step + 1))
            everyones = gathered(weights_of(model))
            equal = all(torch.equal(x, everyones[0]) for x in everyones)
            assert equal == (step <= 2 or (step - 2) % 3 == 0), (name, step)
        assert averager.step == 30
        means = torch.stack(gathered(torch.tensor(losses))).mean(0)
        first, ends[name] = float(means[0]), float(means[-1])
    for name, loss in ends.items():
        assert abs(loss - ends["exact"]) <= 0.02 * first, (name, first, ends)
    assert ends["exact"] < 0.2 * first, (first, ends)


def bytes_sent() -> None:
    world: Any = dist.group.WORLD
    comm = Communicator.find(world.group_name)
    model = network()
    averager = QuantizedModelAverager(1, config=ONE_BIT)
    sent = []
    for _ in range(3):
        before = comm.bytes_sent
        averager.average_parameters(model.parameters())
        sent.append(comm.bytes_sent - before)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() <= 1)
    exact = 4 * (matrices + vectors) * 2 * (SIZE - 1) / SIZE
    assert 0.9 * exact <= sent[0] <= 1.1 * exact + 500 * SIZE, (sent, exact)
    assert (
        sent[1]
        == sent[2]
        <= exact * (vectors + matrices * 1.3 / 32) / (vectors + matrices) + (500 * SIZE)
    ), (sent, exact)


def carried_by_torch() -> None:
    """Check that carrier="c10d" over gloo gives the same bits."""
    gloo = dist.new_group(backend="gloo")
    found = []
    for options in ({}, {"carrier": "c10d", "group": gloo}):
        model, optimizer, _ = post_local(**options)
        run(model, optimizer, range(12))
        found.append(weights_of(model))
    assert torch.equal(*found)


# ---- 3. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    """Resume in the middle of a period, bit for bit."""
    for form in ("torch", "dcp"):
        with folder_of_all() as folder:
            model, optimizer, averager = post_local()
            run(model, optimizer, range(10))
            file = f"{folder}/{RANK}.pt"
            saved = copy.deepcopy([model.module.state_dict(), optimizer.state_dict()])
            if form == "dcp":
                dcp_save({"averager": averager}, checkpoint_id=folder)
            else:
                torch.save(averager.state_dict(), file)
            run(model, optimizer, range(10, 18))

            again, other, restored = post_local()
            run(again, other, range(4))
            if form == "dcp":
                dcp_load({"averager": restored}, checkpoint_id=folder)
            else:
                restored.load_state_dict(torch.load(file))
            again.module.load_state_dict(saved[0])
            other.load_state_dict(saved[1])
            run(again, other, range(10, 18))
            assert torch.equal(weights_of(again), weights_of(model)), form
            for name, e in averager.exchange.residuals.tensors.items():
                assert torch.equal(restored.exchange.residuals.tensors[name], e), (form, name)


def resumed_on_other_rank_count() -> None:
    model, optimizer, averager = post_local()
    run(model, optimizer, range(12))
    own = averager.state_dict()
    pending = {
        name: torch.stack(gathered(e)).double().mean(0)
        for name, e in averager.exchange.residuals.tensors.items()
    }
    averager.consolidate()
    for name, e in averager.exchange.residuals.tensors.items():
        identical_on_all_ranks(e)
        assert ((e.double() - pending[name]).abs() <= SIZE * 2.0**-23 * pending[name].abs()).all()
    alone: Any = dist.new_group([0], backend="cgx")
    if RANK == 0:
        other = QuantizedModelAverager(1, process_group=alone, config=ONE_BIT)
        other.load_state_dict(averager.state_dict())
        before = weights_of(model)
        other.average_parameters(model.parameters())
        # Only one rank sends values, so the pending correction is there immediately.
        want = before + torch.cat(
            [
                pending.get(str(i), torch.zeros(p.numel())).float()
                for i, p in enumerate(model.parameters())
            ]
        )
        assert torch.allclose(weights_of(model), want, rtol=0, atol=1e-6)
        other.load_state_dict(own)
        fails(
            InvalidArgument,
            f"of rank 0 of {SIZE}",
            lambda: other.average_parameters(model.parameters()),
        )
    dist.barrier()


# ---- 4. bad input --------------------------------------------------------------------------------


def bad_input() -> None:
    make: Any = QuantizedModelAverager
    for period, warmup, words in (
        (0, 0, "period is 0"),
        (-2, 0, "period is -2"),
        (1.5, 0, "period is 1.5"),
        (4, -1, "warmup_steps is -1"),
    ):
        fails(InvalidArgument, words, lambda p=period, w=warmup: make(p, w))
    fails(InvalidArgument, "carrier is 'mpi'", lambda: make(1, carrier="mpi"))
    fails(InvalidArgument, "config is 4", lambda: make(1, config=4))

    def average(*parameters: nn.Parameter) -> None:
        make(1, config=ONE_BIT).average_parameters(iter(parameters))

    def of(dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.zeros(4, 8, dtype=dtype))

    fails(TypeError, "parameter 1 of shape (4, 8) is torch.complex64", lambda: average(
        of(torch.float32), of(torch.complex64)
    ))  # fmt: skip
    fails(TypeError, "is torch.float64; train it in", lambda: average(of(torch.float64)))
    sparse = nn.Parameter(torch.eye(4).to_sparse())
    fails(TypeError, "torch.sparse_coo; only dense", lambda: average(sparse))
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    fails(InvalidArgument, "no parameter requires a", lambda: average(frozen))

    averager = make(1, config=ONE_BIT)
    averager.average_parameters(network().parameters())
    fails(InvalidArgument, "another model's", lambda: averager.average_parameters([of(torch.half)]))
    fails(InvalidArgument, "['step']", lambda: averager.load_state_dict({"step": 3}))


def mismatched_settings() -> None:
    """Check that every rank raises for different parameters, and if only some ranks resumed."""
    if SIZE == 1:
        return
    for fault, words in (("fewer", "numel"), ("anew", "number of segments")):
        group: Any = dist.new_group(backend="cgx")
        averager = QuantizedModelAverager(1, process_group=group, config=ONE_BIT)
        parameters = list(network().parameters())
        if fault == "anew":
            averager.average_parameters(parameters)
        if RANK == 1:
            averager.last.tensors = []
            parameters = parameters[1:] if fault == "fewer" else parameters
        fails(RuntimeError, words, lambda a=averager, p=parameters: a.average_parameters(p))


def synchronized() -> None:
    """Check that all ranks continue from the one that is ahead.

    Rank 1 has not finished the last average, and the last of three or more ranks is new.
    """
    if SIZE == 1:
        return

    def moved(steps: int) -> None:
        for _ in range(steps):
            with torch.no_grad():
                for p in model.parameters():
                    p += (RANK + 1) * torch.randn_like(p)
            averager.average_parameters(model.parameters())

    model, averager = network(), QuantizedModelAverager(2, config=ONE_BIT)
    moved(4)
    earlier, weights = averager.state_dict(), weights_of(model)
    moved(1)
    average, step = weights_of(model), averager.step  # equal on all ranks
    if RANK == 1:
        averager.load_state_dict(earlier)
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
    if RANK == SIZE - 1 > 1:
        model, averager = network(), QuantizedModelAverager(2, config=ONE_BIT)
    behind = RANK == 1 or RANK == SIZE - 1 > 1
    averager.synchronize(model.parameters())
    assert bool(averager.exchange.residuals.tensors) != behind
    assert torch.equal(weights_of(model), average) and averager.step == step
    moved(2)
    assert all(torch.equal(x, weights_of(model)) for x in gathered(weights_of(model)))
    mine = list(model.parameters())[RANK == 1 :]
    fails(InvalidArgument, "parameters:", lambda: averager.synchronize(mine))


CHECKS = [matches_reference, exact_matches_pytorch, post_local_sgd, bytes_sent, carried_by_torch]
CHECKS += [resumed, resumed_on_other_rank_count, bad_input, mismatched_settings, synchronized]
