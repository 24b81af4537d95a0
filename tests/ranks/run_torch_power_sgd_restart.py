"""Rank program: a run with PowerSGD goes on on another number of ranks.

    mpirun -np 2 python run_torch_power_sgd_restart.py FOLDER save
    mpirun -np 4 python run_torch_power_sgd_restart.py FOLDER load     # and any other number

What is pending, the mean of the ranks' residuals, is what was pending; each Q goes on.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from failing import fails
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch_power_sgd.common import RANK, backward, gathered, hooked, train

from cgx_ops.torch import ddp


def pending(state: ddp.PowerSGDState) -> dict[str, torch.Tensor]:
    """Return the mean of the ranks' residuals, in float64."""
    items = sorted(state.residuals.tensors.items())
    return {name: torch.stack(gathered(e)).double().mean(0) for name, e in items}


def save(folder: Path) -> None:
    model, state = hooked()
    train(model, range(5), shift=0.3)
    torch.save(state, folder / f"own-{RANK}.pt")
    before = pending(state)
    state.consolidate()
    for name, e in state.residuals.tensors.items():
        # A sum of two numbers, divided: as many roundings.
        assert ((e.double() - before[name]).abs() <= before[name].abs() * 2.0**-22 + 1e-30).all()
    after = pending(state)
    dcp_save({"cgx": state}, checkpoint_id=folder / "dcp")
    if RANK == 0:
        torch.save(state.state_dict(), folder / "consolidated.pt")
        torch.save((after, state.factors.q), folder / "pending.pt")


def load(folder: Path) -> None:
    want, factors = torch.load(folder / "pending.pt")
    for form in ("torch", "dcp"):
        model, state = hooked()
        if form == "torch":
            state.load_state_dict(torch.load(folder / "consolidated.pt"))
        else:
            state.consolidate()  # asks for residuals of all ranks
            dcp_load({"cgx": state}, checkpoint_id=folder / "dcp")
        assert state.steps == 5
        assert want.keys() == factors.keys() == state.factors.q.keys()
        assert all(torch.equal(x, want[name]) for name, x in pending(state).items())
        assert all(torch.equal(q, factors[name]) for name, q in state.factors.q.items())
        # Gradients of zero: averages and what is pending then are what was pending.
        backward(model, 0, scale=0.0)
        left = pending(state)
        for name, parameter in model.module.named_parameters():
            if name in want:
                given = parameter.grad.flatten().double() + left[name]
                largest = want[name].norm()  # of a column, at most
                assert ((given - want[name]).abs() <= 64 * 2.0**-24 * largest).all(), name

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
