"""Rank program: a run with error feedback goes on on another number of ranks.

    mpirun -np 2 python run_torch_restart.py FOLDER save
    mpirun -np 4 python run_torch_restart.py FOLDER load     # and any other number

What is pending, the correction that the next average will contain, is the mean of the ranks'
residuals. Saved are checkpoints as the ranks have them and consolidated ones, by torch.save and by
torch.distributed.checkpoint.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from failing import fails
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch_ddp.common import RANK, SIZE, gradients_of, hooked, images, network, same

from cgx_ops import Config
from cgx_ops.torch import ddp

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)


def pending(state: ddp.QuantizedAllreduceState) -> dict[str, torch.Tensor]:
    """Return the mean of the ranks' residuals, in float64."""
    means = {}
    for name, residual in state.residuals.tensors.items():
        everyones = [torch.empty_like(residual) for _ in range(SIZE)]
        dist.all_gather(everyones, residual)
        means[name] = torch.stack(everyones).double().mean(0)
    return means


def save(folder: Path) -> None:
    model, state = hooked(network(), LEVELS)
    for step in range(3):
        model(images(RANK, step), spare=True).square().sum().backward()
    torch.save(state, folder / f"own-{RANK}.pt")
    before = pending(state)
    state.consolidate()
    for name, residual in state.residuals.tensors.items():
        # A sum of `SIZE` numbers, divided: as many roundings.
        bound = before[name].abs() * SIZE * 2.0**-23
        assert ((residual.double() - before[name]).abs() <= bound + 1e-30).all()
        assert residual.any()
    after = pending(state)
    for name, residual in state.residuals.tensors.items():
        assert torch.equal(after[name].float(), residual), "equal on all ranks"
    dcp_save({"cgx": state}, checkpoint_id=folder / "dcp")
    if RANK == 0:
        torch.save(state.state_dict(), folder / "consolidated.pt")
        torch.save(after, folder / "pending.pt")
    model.zero_grad()
    model(images(RANK, 3), spare=True).square().sum().backward()
    assert not state.residuals.consolidated, "ranks have their own again"
    assert f"rank {RANK} of {SIZE}" in state.state_dict()["residuals"]


def load(folder: Path) -> None:
    want = torch.load(folder / "pending.pt")
    for form in ("torch", "dcp"):
        model, state = hooked(network(), LEVELS)
        if form == "torch":
            state.load_state_dict(torch.load(folder / "consolidated.pt"))
        else:
            state.consolidate()  # asks for residuals of all ranks
            dcp_load({"cgx": state}, checkpoint_id=folder / "dcp")
        assert state.steps == 3
        same(pending(state), want, form)

        # Gradients of zero: averages and what is pending then are what was pending.
        x = torch.zeros(8, 20)
        (model(x, spare=True) * 0).sum().backward()
        averages, left = gradients_of(model), pending(state)
        for name, mean in want.items():
            given = averages[name].flatten().double() + left[name]
            # Each rank's value passes at most 2 (SIZE + 3) operations of fp32, each off by 2^-24 of
            # a number that is no larger than all ranks' together.
            largest = SIZE * (averages[name].flatten().abs() + mean.abs() + left[name].abs())
            bound = 2 * (SIZE + 3) * 2.0**-24 * largest
            assert ((given - mean).abs() <= bound).all(), (form, name)

    # What was not consolidated is two ranks' own.
    model, state = hooked(network(), LEVELS)
    state.load_state_dict(torch.load(folder / f"own-{RANK % 2}.pt").state_dict())
    loss = model(images(RANK), spare=True).square().sum()
    fails(Exception, f"of 2, and this is rank {RANK} of {SIZE}", loss.backward)


def main() -> None:
    dist.init_process_group("cgx")
    {"save": save, "load": load}[sys.argv[2]](Path(sys.argv[1]))
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
