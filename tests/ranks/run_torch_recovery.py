"""Rank program: the loop of docs/guides/torch/elastic.md trains on without a lost rank.

    RANK=... WORLD_SIZE=6 run_torch_recovery.py FOLDER CONFIG     # from torch 2.14 on

Processes 0 to 4 train a model with DDP in 4 bits, or in 2 bits with error feedback. Process 3 dies
in backward, when some buckets of the step may have been averaged. Later process 2 dies in the same
way, and process 5 joins the others. In the end all their weights are equal. The loss is printed
beside that of exact training of five ranks that are never lost. They differ by the compression and
by the samples of lost ranks, so only a fall to a half is required.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import run_torch_reconfigure as group
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.torch.ddp import QuantizedAllreduceState, quantized_allreduce_hook

dist = group.dist
RANK, FIRST = group.RANK, range(5)
CONFIGS = {"4-bits": Config(4), "2-bits-feedback": Config(compressor="levels", bits=2)}
STEPS, NEWCOMER, JOINS = 120, 5, 60  # the step in which the newcomer joins
DIES = {3: 20, 2: 40}  # the step in which a process dies
MEMBERS = {20: (0, 1, 2, 4), 40: (0, 1, 4), JOINS: (0, 1, 4, NEWCOMER)}  # from this step on


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4)
    )


def samples(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 32, generator=generator)
    return x, torch.tanh(x[:, :4] - x[:, 4:8])


EVERYTHING = [samples(seed) for seed in range(10)]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = EVERYTHING[(rank + len(FIRST) * step) % len(EVERYTHING)]
    return nn.functional.mse_loss(model(x), y)


def total(model: nn.Module) -> float:
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(x), y).item() for x, y in EVERYTHING]
    return sum(losses) / len(losses)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def undisturbed() -> float:
    """Return the loss of five ranks that are never lost, exact, in this process."""
    model = made()
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sum((loss_of(model, rank, step) for rank in FIRST), torch.zeros(()))
        (loss / len(FIRST)).backward()
        optimizer.step()
    return total(model)


def wrapped(module: nn.Module, state: QuantizedAllreduceState) -> DistributedDataParallel:
    """Return a DDP model of several buckets."""
    model = DistributedDataParallel(module, bucket_cap_mb=0.02)
    model.register_comm_hook(state, quantized_allreduce_hook)
    return model


def synchronized(state: QuantizedAllreduceState, optimizer: Any, step: int) -> int:
    """Send process 0's states to all members, and return its step."""
    sent: list[Any] = [step, optimizer.state_dict(), state.joining_state_dict()]
    dist.broadcast_object_list(sent, src=0)
    optimizer.load_state_dict(sent[1])
    if RANK == NEWCOMER and step < 0:
        state.load_state_dict(sent[2])
    return sent[0]


def main() -> None:
    dist.init_process_group(
        "cgx", rank=RANK, world_size=group.SIZE, store=group.store, timeout=group.LIMIT,
        enable_reconfigure=True,
    )  # fmt: skip
    module = made()
    first = total(module)
    optimizer = optimizer_of(module)
    state = QuantizedAllreduceState(config=CONFIGS[sys.argv[2]])
    step = 0
    if RANK == NEWCOMER:
        group.connect(JOINS, MEMBERS[JOINS])
        model = wrapped(module, state)
        step = synchronized(state, optimizer, -1)
    else:
        group.connect(1, FIRST)
        model = wrapped(module, state)

    def die_in_backward(gradient: torch.Tensor) -> None:
        if step == DIES.get(RANK):
            os.kill(os.getpid(), signal.SIGKILL)

    module.get_parameter("2.weight").register_hook(die_in_backward)  # the later layer is first
    changes, lost = dict(MEMBERS), False
    while step < STEPS:
        try:
            if lost:
                uuid = min(changes)
                assert 0 <= step - uuid <= 1, (step, uuid)
                group.connect(uuid, changes.pop(uuid))
                module, kept = model.module, cgx_ops.torch.hook_state(model)
                assert kept is state
                model = wrapped(module, state)
                step = synchronized(state, optimizer, step)
                lost = False
            if step == JOINS and JOINS in changes and RANK != NEWCOMER:
                raise RuntimeError("a rank wants to join")
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        except RuntimeError as error:
            print(f"process {RANK}, step {step}, next members {changes}: {error}", flush=True)
            lost = True
            continue
        optimizer.step()
        step += 1
    made_by_all = dist.new_group()  # the newcomer has made fewer groups
    count = torch.ones(1)
    dist.all_reduce(count, group=made_by_all)
    assert count == len(MEMBERS[JOINS]), count
    weights = torch.cat([each.detach().flatten() for each in module.parameters()])
    group.store.set(f"weights {RANK}", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    digests = {group.store.get(f"weights {rank}") for rank in MEMBERS[JOINS]}
    assert len(digests) == 1, "weights differ"
    last = total(module)
    other = f"; undisturbed and exact: {undisturbed():.4f}" if RANK == 0 else ""
    print(f"loss {first:.4f} to {last:.4f}{other}")
    assert last < first / 2
    group.meet("trained", MEMBERS[JOINS])
    dist.destroy_process_group()
    print("OK", flush=True)


if __name__ == "__main__":
    main()
