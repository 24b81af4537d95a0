"""Several models, or loops, on one group at the same time.

A second message starts when the first one is complete, on any thread: here each rank delays a
different model's. Results must equal those of models that run one after the other.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, batch, loss_of, network, weights_of

from cgx_ops.planner import Plan
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging.state import AveragingState
from cgx_ops.torch.diloco import DiLoCo, sparse_loco

CARRIERS = ("native", "c10d")


def options_of(carrier: str) -> dict[str, Any]:
    gloo: Any = dist.new_group(backend="gloo") if carrier == "c10d" else None
    return {"carrier": carrier, "process_group": gloo}


def late_on_rank(rank: int, state: AveragingState) -> None:
    """Delay the second message on one rank."""
    average = state.average

    def start(*arguments: Any, then: Any = lambda *_: None, **options: Any) -> Any:
        def later(*of: Any) -> None:
            time.sleep(0.05)
            then(*of)

        return average(*arguments, then=later, **options)

    if rank == RANK:
        state.average = start  # type: ignore[method-assign]


def gradients_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None])


def models_in_one_backward() -> None:
    for carrier in CARRIERS:
        options = options_of(carrier)
        gradients: list[list[torch.Tensor]] = []
        for together in (True, False):
            models = []
            for i in range(2):
                models.append(DistributedDataParallel(network()))
                state = ddp.PowerSGDState(start_powerSGD_iter=2, **options)
                models[-1].register_comm_hook(state, ddp.power_sgd_hook)
                late_on_rank(i, state)
            gradients.append([])
            for step in range(5):
                for model in models:
                    model.zero_grad()
                losses = [loss_of(m, batch(RANK, 10 * i + step)) for i, m in enumerate(models)]
                for loss in [losses[0] + losses[1]] if together else losses:
                    loss.backward()
                gradients[-1] += map(gradients_of, models)
        for step, (got, want) in enumerate(zip(*gradients, strict=True)):
            assert torch.equal(got, want), (carrier, step)


def loops_in_flight() -> None:
    """Use sparse_loco, whose second message has the number of ranks that sent each value."""
    for carrier in CARRIERS:
        options = options_of(carrier)
        weights: list[list[torch.Tensor]] = []
        for together in (True, False):
            pairs: list[tuple[nn.Module, DiLoCo]] = []
            for i in range(2):
                model = network()
                loop = sparse_loco(
                    model, sync_every=2, fragment_sync_delay=1, density=0.05, **options
                )
                late_on_rank(i, loop.exchange)
                pairs.append((model, loop))
            in_order = [(step, i) for step in range(8) for i in range(2)]
            for step, i in in_order if together else sorted(in_order, key=lambda each: each[1]):
                model, loop = pairs[i]
                generator = torch.Generator().manual_seed(1000 * step + 10 * RANK + i)
                with torch.no_grad():
                    for p in model.parameters():
                        p += 0.1 * torch.randn(p.shape, generator=generator)
                loop.step()
            weights.append([weights_of(model) for model, _ in pairs])
        assert all(map(torch.equal, *weights)), carrier


def plans_compared_by_two_models() -> None:
    """Check that equal plans are not blamed if messages failed for another reason."""
    named = list(network().named_parameters())
    names, numels = tuple(n for n, _ in named), tuple(p.numel() for _, p in named)
    every = tuple(reversed(range(len(names))))
    bits = (4,) * len(names)
    plans = [Plan(names, numels, bits, groups) for groups in ((every,), (every[:2], every[2:]))]
    states: list[ddp.PlannedAllreduceState] = []
    group: Any = dist.new_group(backend="cgx")
    for plan in plans:
        model = DistributedDataParallel(network(), process_group=group)
        states.append(ddp.PlannedAllreduceState(plan, group))
        model.register_comm_hook(states[-1], ddp.planned_allreduce_hook)
        loss_of(model, batch(RANK, 0)).backward()
    failure, told = RuntimeError("a message failed"), {}

    def explain(i: int) -> Callable[[], None]:
        def run() -> None:
            told[i] = states[i].explained(failure, plans[i])

        return run

    order = [0, 1] if RANK == 0 else [1, 0]
    threads = [threading.Thread(target=explain(i)) for i in order]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(60)
    assert told == {0: failure, 1: failure}, told


CHECKS = [models_in_one_backward, loops_in_flight, plans_compared_by_two_models]
