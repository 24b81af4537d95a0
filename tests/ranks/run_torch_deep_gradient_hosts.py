"""Rank program: Deep Gradient Compression where ranks share hosts.

    CGX_HOST_ID=... mpirun -np 4 python run_torch_deep_gradient_hosts.py 0,0,1,1

The argument is the host of each rank. What is sparse goes from host to host: each has momenta and
residuals of its ranks' sum, on its first rank.
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


def as_the_reference() -> None:
    comm = Communicator.find(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    assert (comm.host, comm.hosts) == (HOSTS[RANK], len(set(HOSTS)))
    follow(20, hosts=HOSTS)
    follow(20, hosts=HOSTS, nesterov=True, warmup_steps=10, density=0.01)


def parted_hosts() -> Hosts:
    parted = hosts_of(Communicator.find(dist.group.WORLD.group_name))  # type: ignore[union-attr]
    assert parted is not None
    return parted


def what_is_sent() -> None:
    """Between hosts 68 of 1344 values travel, and their places, behind a header."""
    parted = parted_hosts()
    assert (parted.firsts is None) == (HOSTS.index(HOSTS[RANK]) != RANK)
    if parted.firsts is not None:
        before, (model, _) = parted.firsts.bytes_sent, hooked()
        backward(model, 0)
        assert 68 * 4 < parted.firsts.bytes_sent - before < 68 * 6 + 300
    else:
        backward(hooked()[0], 0)


def buckets() -> None:
    """Many at once; blocks; a NaN leaves no trace."""
    want = train(hooked()[0], range(4))
    assert torch.equal(train(hooked(wrapper={"bucket_cap_mb": 0.001})[0], range(4))[-1], want[-1])
    followed = Followed(hosts=HOSTS)
    with cgx_ops.torch.uncompressed():
        backward(followed.model, 0, scale=float("nan") if RANK == 1 else 1.0)
    assert all(x.isnan().all() for x in followed.average.values())
    assert not any(x.any() for x in followed.state.residuals.tensors.values())
    assert all(x.isfinite().all() for x in followed.state.momenta.tensors.values())


def what_a_rank_had_is_its_hosts() -> None:
    """What each rank has had of its own becomes its host's: the average loses nothing of it."""
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
    """Has a layer that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = network(), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        x = self.used(x)
        return x + self.spare(x) if spare else x


def what_is_gathered_in_a_step_without_the_layer() -> None:
    """What each rank has of it becomes its host's, and stays so."""
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
    """Each host is late with another model's sums; results are as of one after the other."""
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


def ranks_that_disagree() -> None:
    """All are told at once, and why: where hosts do, and where the ranks of one do."""
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
    backward(ranks_do, 2)  # the group lives on


def a_rank_that_cannot_start() -> None:
    """All are told at once, also over the other hosts; what follows the next messages fits."""
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


def a_rank_that_fails() -> None:
    """All ranks raise, whether the first rank of a host fails between messages, or another."""
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


def groups_that_are_made_anew() -> None:
    """A new default group has hosts of its own; those of the one before are closed."""
    parted = parted_hosts()
    dist.destroy_process_group()
    dist.init_process_group("cgx")
    backward(hooked()[0], 0)
    assert parted.local.closed and parted_hosts() is not parted


def main() -> None:
    dist.init_process_group("cgx")
    checks.run(
        checks.named(
            as_the_reference, what_is_sent, buckets, what_a_rank_had_is_its_hosts,
            what_is_gathered_in_a_step_without_the_layer, models_in_one_backward,
            ranks_that_disagree, a_rank_that_cannot_start, a_rank_that_fails,
            groups_that_are_made_anew,
        ),
        sys.argv[2:],
    )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
