"""Rank program: Deep Gradient Compression where ranks share hosts.

    CGX_HOST_ID=... mpirun -np 4 python run_torch_deep_gradient_hosts.py 0,0,1,1

The argument is the host of each rank. What is sparse goes from host to host: each has momenta and
residuals of its ranks' sum, on its first rank.
"""

import sys

import checks
import torch
import torch.distributed as dist
from torch_deep_gradient.common import MATRICES, Followed, hooked
from torch_deep_gradient.values import follow
from torch_training import RANK, SIZE, backward, gathered, train

import cgx_ops.torch
from cgx_ops import Communicator, Config
from cgx_ops.torch.ddp_deep_gradient_hosts import hosts_of

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


def what_is_sent() -> None:
    """Between hosts 68 of 1344 values travel, and their places, behind a header."""
    parted = hosts_of(Communicator.find(dist.group.WORLD.group_name))  # type: ignore[union-attr]
    assert parted is not None
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


def main() -> None:
    dist.init_process_group("cgx")
    found = (as_the_reference, what_is_sent, buckets, what_a_rank_had_is_its_hosts)
    checks.run(checks.named(*found), [])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
