"""Rank program: Deep Gradient Compression with several ranks per host.

    CGX_HOST_ID=... mpirun -np 4 python run_torch_deep_gradient_hosts.py 0,0,1,1

The argument lists the host of each rank. Sparse messages travel between hosts: the first rank of
a host has the momenta and residuals of the sum over the host's ranks.
"""

import contextlib
import sys
import time
from typing import Any
from unittest import mock

import checks
import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_deep_gradient.common import MATRICES, Followed, hooked
from torch_deep_gradient.values import follow
from torch_training import (
    RANK,
    SIZE,
    backward,
    batch,
    gathered,
    loss_of,
    network,
    refused_start,
    train,
)

import cgx_ops.torch
from cgx_ops import Communicator, Config
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp.deep_gradient import hook as ddp_deep_gradient
from cgx_ops.torch.ddp.deep_gradient import hosts as ddp_deep_gradient_hosts
from cgx_ops.torch.ddp.deep_gradient.hook import _Exchange
from cgx_ops.torch.ddp.deep_gradient.hosts import Hosts, hosts_of

HOSTS = [int(host) for host in sys.argv[1].split(",")]


def pending(state: object) -> dict[str, torch.Tensor]:
    """Return the means of the ranks' momenta and residuals, in float64."""
    return {
        f"{what} {name}": torch.stack(gathered(getattr(state, what).tensors[name])).double().mean(0)
        for what in ("residuals", "momenta")
        for name in sorted(MATRICES)
    }


def matches_reference() -> None:
    comm = Communicator.find(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    assert (comm.host, comm.hosts) == (HOSTS[RANK], len(set(HOSTS)))
    follow(20, hosts=HOSTS)
    follow(20, hosts=HOSTS, nesterov=True, warmup_steps=10, density=0.01)


def parted_hosts() -> Hosts:
    parted = hosts_of(Communicator.find(dist.group.WORLD.group_name))  # type: ignore[union-attr]
    assert parted is not None
    return parted


def bytes_sent() -> None:
    """Check that hosts exchange 68 of 1344 values, and their indices, behind a header."""
    parted = parted_hosts()
    assert (parted.firsts is None) == (HOSTS.index(HOSTS[RANK]) != RANK)
    if parted.firsts is not None:
        before, (model, _) = parted.firsts.bytes_sent, hooked()
        backward(model, 0)
        assert 68 * 4 < parted.firsts.bytes_sent - before < 68 * 6 + 300
    else:
        backward(hooked()[0], 0)


def buckets() -> None:
    """Check many buckets in flight, block selection, and that a NaN leaves the state clean."""
    want = train(hooked()[0], range(4))
    assert torch.equal(train(hooked(wrapper={"bucket_cap_mb": 0.001})[0], range(4))[-1], want[-1])
    followed = Followed(hosts=HOSTS)
    with cgx_ops.torch.uncompressed():
        backward(followed.model, 0, scale=float("nan") if RANK == 1 else 1.0)
    assert all(x.isnan().all() for x in followed.average.values())
    assert not any(x.any() for x in followed.state.residuals.tensors.values())
    assert all(x.isfinite().all() for x in followed.state.momenta.tensors.values())


def rank_state_moves_to_host() -> None:
    """Check that each rank's state moves to its host, and the average loses none of it."""
    model, alone = hooked(config=Config(compressor="topk", algorithm="one_shot"))
    train(model, range(4))
    assert all(v.any() for v in alone.residuals.tensors.values())
    model, state = hooked()
    state.load_state_dict(alone.state_dict() | {"config": state.config})
    before = pending(state)
    with cgx_ops.torch.uncompressed():
        backward(model, 0, scale=0.0)
    after = pending(state)
    for name, p in model.module.named_parameters():
        if name in MATRICES:
            assert p.grad is not None
            u, v = before[f"momenta {name}"], before[f"residuals {name}"]
            bound = 2 * (SIZE + 3) * 2.0**-24 * (u.abs().max() + v.abs().max()) * SIZE
            got = p.grad.double().flatten()
            assert (got - v - 0.9 * u).abs().max() <= bound, name
            assert (after[f"momenta {name}"] - 0.9 * u).abs().max() <= bound, name
            assert not after[f"residuals {name}"].any()


class Unused(nn.Module):
    """Model with a layer that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = network(), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        x = self.used(x)
        return x + self.spare(x) if spare else x


def unused_layer_state_moves_to_host() -> None:
    """Check that the state of an unused layer moves to the host, and stays there."""
    torch.manual_seed(0)
    model, state = hooked(Unused(), wrapper={"find_unused_parameters": True}, momentum=0.0)
    for step in range(3):
        backward(model, step)
    state.consolidate()
    kept = state.residuals.tensors["spare.weight"]
    before = torch.stack(gathered(kept)).double().sum(0)
    assert before.any()
    model.zero_grad()
    model(batch(RANK, 3), spare=False).square().sum().backward()
    assert kept.any() == (HOSTS.index(HOSTS[RANK]) == RANK)
    after = torch.stack(gathered(kept)).double().sum(0)
    assert (after - before).abs().max() <= SIZE * 2.0**-24 * before.abs().max()


def models_in_one_backward() -> None:
    """Check interleaved models: results are the same as for one after the other.

    Each host delays the sums of a different model.
    """
    add, late = _Exchange._add, [False]

    def later(exchange: Any) -> None:
        if late[0] and exchange.state is states[HOSTS[RANK] % 2]:
            time.sleep(0.05)
        add(exchange)

    gradients: list[list[torch.Tensor]] = []
    with mock.patch.object(_Exchange, "_add", later):
        for together in (True, False):
            pairs = [hooked(momentum=0.0) for _ in range(2)]
            models, states = zip(*pairs, strict=True)
            late[0] = together
            gradients.append([])
            for step in range(3):
                for model in models:
                    model.zero_grad()
                losses = [loss_of(m, batch(RANK, 10 * i + step)) for i, m in enumerate(models)]
                for loss in [losses[0] + losses[1]] if together else losses:
                    loss.backward()
                found = [p.grad for model in models for p in model.parameters()]
                gradients[-1] += [g.clone() for g in found if g is not None]
    assert all(map(torch.equal, *gradients))


def mismatched_ranks() -> None:
    """Check that all ranks get the error immediately if hosts, or ranks of one host, mismatch."""
    add_up = Hosts._add_up

    def short(self: Hosts, x: torch.Tensor, segments: Any, name: str, *more: Any) -> dist.Work:
        cut = RANK == SIZE - 1 and name == "deep_gradient/0"
        return add_up(self, x, segments[:-1] if cut else segments, name, *more)

    hosts_do = hooked(density=0.1 if HOSTS[RANK] else 0.05)[0]
    ranks_do = hooked()[0]
    backward(ranks_do, 0)
    begin = time.monotonic()
    fails(RuntimeError, "density 0.05 against 0.1", lambda: backward(hosts_do, 0))
    with mock.patch.object(Hosts, "_add_up", short):
        fails(
            RuntimeError, "disagree on collective 'deep_gradient/0'", lambda: backward(ranks_do, 1)
        )
    assert time.monotonic() - begin < 20
    dist.barrier()
    backward(ranks_do, 2)  # the group is still usable


def start_fails_on_one_rank() -> None:
    """Check that ranks on all hosts get the error immediately, and later messages match."""
    for place in (0, SIZE - 1):
        model = hooked()[0]
        backward(model, 0)
        begin, start = time.monotonic(), ddp_deep_gradient_hosts.start
        own = refused_start if place == RANK else start
        with mock.patch.object(ddp_deep_gradient_hosts, "start", own):
            fails(RuntimeError, "no thread", lambda model=model: backward(model, 1))
        assert time.monotonic() - begin < 20
        dist.barrier()
        backward(model, 2)


def failure_on_one_rank() -> None:
    """Check that all ranks raise if the first rank of a host, or another rank, fails."""
    places: tuple[tuple[int, Any, str], ...] = (
        (0, _Exchange, "_add"), (1, ddp_deep_gradient, "_clipped")
    )  # fmt: skip
    for place, of, name in places:
        model = hooked()[0]
        backward(model, 0)
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            if place == RANK:
                accident = ValueError("an accident")
                stack.enter_context(mock.patch.object(of, name, side_effect=accident))
            fails(RuntimeError, "an accident", lambda model=model: backward(model, 1))
        assert time.monotonic() - begin < 20
        dist.barrier()
        backward(model, 2)


def state_of_another_rank() -> None:
    """Check that all ranks raise if one rank loads another rank's state; the right one works."""
    for place in (0, 1):
        model, state = hooked()
        backward(model, 0)
        saved = state.state_dict()
        state.load_state_dict(saved)
        if place == RANK:
            state.residuals.owner, state.residuals.loaded = (2, 7), True
        begin, words = time.monotonic(), "the residuals are those of rank 2 of 7"
        fails(Exception, words, lambda model=model: backward(model, 1))
        assert time.monotonic() - begin < 20
        dist.barrier()
        state.load_state_dict(saved)
        again = DistributedDataParallel(network())  # torch's reducer cannot continue
        again.register_comm_hook(state, ddp.deep_gradient_hook)
        backward(again, 2)


def recreated_groups() -> None:
    """Check that a new default group gets new hosts, and the previous ones are closed."""
    parted = parted_hosts()
    dist.destroy_process_group()
    dist.init_process_group("cgx")
    backward(hooked()[0], 0)
    assert parted.local.closed and parted_hosts() is not parted


def main() -> None:
    dist.init_process_group("cgx")
    checks.run(
        checks.named(
            matches_reference, bytes_sent, buckets, rank_state_moves_to_host,
            unused_layer_state_moves_to_host, models_in_one_backward,
            mismatched_ranks, start_fails_on_one_rank, failure_on_one_rank,
            state_of_another_rank, recreated_groups,
        ),
        sys.argv[2:],
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
