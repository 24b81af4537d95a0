"""Rank program: an outer loop whose members change, without a launcher.

    run_torch_diloco_members.py PORT STEPS [DIES_AT]

A store listens at PORT of this machine; members join by torch's elastic rendezvous. The member
with DIES_AT is killed in the synchronization after that step, while the others wait for it. The
remaining members continue and admit new ones, until there are MEMBERS and STEPS are done, at least
AFTERWARDS of them in the last group. Prints the outcome as JSON.
"""

import datetime
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from cgx_ops import Config
from cgx_ops.torch.averaging.exchange import Exchange
from cgx_ops.torch.diloco import DiLoCo

EVERY, MEMBERS, AFTERWARDS = 4, 3, 40


def rendezvous(port: int) -> Any:
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "members", min_nodes=1, max_nodes=4, local_addr="127.0.0.1",
        is_host=False, join_timeout=60, last_call_timeout=2, keep_alive_interval=1,
    )  # fmt: skip
    backend, store = create_backend(parameters)
    return create_handler(store, backend, parameters)


def join(handler: Any) -> int:
    """Join the members that are present as the default group; return their number."""
    if dist.is_initialized():
        dist.destroy_process_group()
    met = handler.next_rendezvous()
    dist.init_process_group(
        "cgx", store=met.store, rank=met.rank, world_size=met.world_size,
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    return met.world_size


def has_waiting_members(handler: Any) -> bool:
    """Return whether a process waits to be admitted; the same on all ranks."""
    waiting = torch.tensor(float(handler.num_nodes_waiting()))
    dist.all_reduce(waiting, dist.ReduceOp.MAX)
    return bool(waiting)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    port, steps, *dies = map(int, sys.argv[1:])
    handler = rendezvous(port)
    sizes = [join(handler)]
    torch.manual_seed(os.getpid())  # a new member's initial weights are replaced
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    loop = DiLoCo(model, sync_every=EVERY, config=Config(bits=4))
    begun_at = joined_at = loop.steps
    inner = torch.optim.SGD(model.parameters(), 0.05)
    generator = torch.Generator().manual_seed(os.getpid())
    losses, failures = [], []
    while sizes[-1] < MEMBERS or loop.steps < max(steps, joined_at + AFTERWARDS):
        x = torch.randn(64, 64, generator=generator)
        loss = (model(x) - x[:, :8]).square().sum(1).mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
        losses.append(loss.item())
        if loop.steps + 1 in dies:
            # Die before the start: afterwards the values may already arrive.
            setattr(Exchange, "start", die)  # noqa: B010
        before = [outer.detach().clone() for outer in loop.outer_parameters]
        try:
            loop.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, loop.outer_parameters))
            failures.append(str(error))
            changes = True
        else:
            changes = loop.steps % EVERY == 0 and has_waiting_members(handler)
        if changes:
            sizes.append(join(handler))
            loop.regroup()
            joined_at = loop.steps
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    found = {
        "sizes": sizes, "begun_at": begun_at, "applied": loop.applied, "failures": failures,
        "first": losses[0], "last": losses[-1], "equal": [torch.equal(mine, x) for x in everyones],
        "learnt": sum(losses[-8:]) / 8,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
