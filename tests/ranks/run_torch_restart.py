"""Rank program: resume runs with per-rank state on a different number of ranks.

    mpirun -np 2 python run_torch_restart.py FOLDER save
        mpirun -np 4 python run_torch_restart.py FOLDER load     # or any other number

The pending correction, which the next average will contain, is the mean of the ranks' residuals.
The momentum is the mean of their momenta. Checkpoints are saved per rank and consolidated, by
torch.save and by torch.distributed.checkpoint.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist
import torch_deep_gradient.state
import torch_power_sgd.state
from failing import fails
from method_cases import Method, same
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, SIZE, backward, gathered, identical_on_all_ranks, network, train

from cgx_ops import Config
from cgx_ops.torch import ddp

Tensors = dict[str, torch.Tensor]


def means_of(method: Method, state: Any) -> Tensors:
    """Return the ranks' mean of each tensor of the state, in float64."""
    tensors = {n: x for n, x in method.kept(state).items() if isinstance(x, torch.Tensor)}
    return {n: torch.stack(gathered(x)).double().mean(0) for n, x in sorted(tensors.items())}


def save(method: Method, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    model, state = method.hooked()
    train(model, range(5), shift=0.3)
    torch.save(state, folder / f"own-{RANK}.pt")
    before = means_of(method, state)
    state.consolidate()
    after = means_of(method, state)
    assert before.keys() == after.keys()
    for name, mean in before.items():
        # A sum of `SIZE` numbers, divided: that many roundings.
        bound = mean.abs() * SIZE * 2.0**-23
        assert ((after[name] - mean).abs() <= bound + 1e-30).all(), name
        identical_on_all_ranks(method.kept(state)[name])
    assert all(residual.any() for residual in state.residuals.tensors.values())
    dcp_save({"cgx": state}, checkpoint_id=folder / "dcp")
    if RANK == 0:
        torch.save(state.state_dict(), folder / "consolidated.pt")
        torch.save(after, folder / "means.pt")
    backward(model, 5)
    assert not state.residuals.consolidated, "after a step, ranks have separate residuals again"
    assert f"rank {RANK} of {SIZE}" in state.state_dict()["residuals"]


def load(method: Method, goes_on: Callable[[nn.Module, Tensors, Tensors], None], folder: Path):
    want = torch.load(folder / "means.pt")
    for form in ("torch", "dcp"):
        model, state = method.hooked()
        if form == "torch":
            state.load_state_dict(torch.load(folder / "consolidated.pt"))
        else:
            state.consolidate()  # requests a consolidated checkpoint
            dcp_load({"cgx": state}, checkpoint_id=folder / "dcp")
        assert state.steps == 5
        same(means_of(method, state), want, form)
        # With zero gradients, the next average and the new pending correction add up to the old
        # one.
        backward(model, 0, scale=0.0)
        goes_on(model.module, want, means_of(method, state))
        identical_on_all_ranks(train(model, range(5, 8))[-1])

    # The unconsolidated checkpoint belongs to two ranks.
    model, state = method.hooked()
    state.load_state_dict(torch.load(folder / f"own-{RANK % 2}.pt").state_dict())
    words = f"of 2, but this is rank {RANK} of {SIZE}"
    fails(Exception, words, lambda: backward(model, 0))


# ---- the methods ---------------------------------------------------------------------------------


def quantized(module: nn.Module | None = None) -> Any:
    model = DistributedDataParallel(module or network())
    config = Config(bits=1, compressor="levels", bucket_size=64)
    state = ddp.QuantizedAllreduceState(config=config)
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)
    return model, state


QUANTIZED = Method(
    ddp.quantized_allreduce_hook,
    ddp.QuantizedAllreduceState,
    quantized,
    lambda state: {f"e {name}": e for name, e in state.residuals.tensors.items()},
)


def averages_of(model: nn.Module) -> Tensors:
    named = model.named_parameters()
    return {name: p.grad.double().flatten() for name, p in named if p.grad is not None}


def check_quantized(model: nn.Module, old: Tensors, new: Tensors) -> None:
    for name, average in averages_of(model).items():
        if f"e {name}" in old:
            mean, left = old[f"e {name}"], new[f"e {name}"]
            # Each rank's value passes at most 2 (SIZE + 3) operations of fp32, each with an error
            # of at most 2^-24 times the sum over all ranks.
            largest = SIZE * (average.abs() + mean.abs() + left.abs())
            bound = 2 * (SIZE + 3) * 2.0**-24 * largest
            assert ((average + left - mean).abs() <= bound).all(), name


def check_power_sgd(model: nn.Module, old: Tensors, new: Tensors) -> None:
    for name, average in averages_of(model).items():
        if f"e {name}" in old:
            mean, left = old[f"e {name}"], new[f"e {name}"]
            largest = mean.norm()  # upper bound for a column
            assert ((average + left - mean).abs() <= 64 * 2.0**-24 * largest).all(), name


def check_deep_gradient(model: nn.Module, old: Tensors, new: Tensors) -> None:
    for name, average in averages_of(model).items():
        zeros = torch.zeros_like(average)
        u, v = old[f"u {name}"], old.get(f"v {name}", zeros)
        left = new.get(f"v {name}", zeros)
        bound = (SIZE + 3) * 2.0**-24 * (u.abs() + v.abs()) + 2.0**-24 * u.abs()
        assert ((average + left - v - 0.9 * u).abs() <= bound).all(), name


METHODS = {
    "quantized": (QUANTIZED, check_quantized),
    "power_sgd": (torch_power_sgd.state.METHOD, check_power_sgd),
    "deep_gradient": (torch_deep_gradient.state.METHOD, check_deep_gradient),
}


def main() -> None:
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("cgx")
    checks.run(
        {
            f"{phase} {name}": partial(save, method, folder / name)
            if phase == "save"
            else partial(load, method, goes_on, folder / name)
            for name, (method, goes_on) in METHODS.items()
        },
        sys.argv[3:],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
