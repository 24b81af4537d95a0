"""Rank program: a run with Deep Gradient Compression goes on on another number of ranks.

    mpirun -np 2 python run_torch_deep_gradient_restart.py FOLDER save
    mpirun -np 4 python run_torch_deep_gradient_restart.py FOLDER load     # and any other number

What is pending, the mean of the ranks' residuals, is what was pending; so is the mean momentum.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from failing import fails
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch_deep_gradient.common import hooked
from torch_power_sgd.common import RANK, SIZE, backward, gathered, identical_on_all_ranks, train

from cgx_ops.torch import ddp


def means(state: ddp.DeepGradientState) -> dict[str, torch.Tensor]:
    """Return the means of the ranks' momenta and residuals, in float64."""
    return {
        f"{what} {name}": torch.stack(gathered(x)).double().mean(0)
        for what in ("residuals", "momenta")
        for name, x in sorted(getattr(state, what).tensors.items())
    }


def save(folder: Path) -> None:
    model, state = hooked()
    train(model, range(5), shift=0.3)
    torch.save(state, folder / f"own-{RANK}.pt")
    before = means(state)
    state.consolidate()
    after = means(state)
    for name, x in before.items():
        # A sum of two numbers, divided: as many roundings.
        assert ((after[name] - x).abs() <= x.abs() * 2.0**-22 + 1e-30).all(), name
    dcp_save({"cgx": state}, checkpoint_id=folder / "dcp")
    if RANK == 0:
        torch.save(state.state_dict(), folder / "consolidated.pt")
        torch.save(after, folder / "pending.pt")


def load(folder: Path) -> None:
    want = torch.load(folder / "pending.pt")
    for form in ("torch", "dcp"):
        model, state = hooked()
        if form == "torch":
            state.load_state_dict(torch.load(folder / "consolidated.pt"))
        else:
            state.consolidate()  # asks for those of all ranks
            dcp_load({"cgx": state}, checkpoint_id=folder / "dcp")
        assert state.steps == 5
        found = means(state)
        assert want.keys() == found.keys()
        assert all(torch.equal(x, want[name]) for name, x in found.items())
        # Gradients of zero: averages and what is pending then are what was pending, and momentum.
        backward(model, 0, scale=0.0)
        left = means(state)
        for name, p in model.module.named_parameters():
            assert p.grad is not None
            u, v = want[f"momenta {name}"], want.get(f"residuals {name}", torch.zeros(p.numel()))
            got = p.grad.double().flatten() + left.get(f"residuals {name}", torch.zeros(p.numel()))
            bound = (SIZE + 3) * 2.0**-24 * (u.abs() + v.abs())
            assert ((got - v - 0.9 * u).abs() <= bound + 2.0**-24 * u.abs()).all(), name
        identical_on_all_ranks(train(model, range(5, 8))[-1])

    # What was not consolidated is two ranks' own.
    model, state = hooked()
    state.load_state_dict(torch.load(folder / f"own-{RANK % 2}.pt").state_dict())
    fails(Exception, "of 2, and this is rank", lambda: backward(model, 0))


def main() -> None:
    dist.init_process_group("cgx")
    {"save": save, "load": load}[sys.argv[2]](Path(sys.argv[1]))
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
