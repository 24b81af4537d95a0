"""Helpers of the rank programs: examples, a network, and the report that tests read."""

import hashlib
import json

import torch
from torch import nn
from torch.utils.data import TensorDataset

import cgx_ops

EPOCHS, BATCH = 8, 32  # batch of one rank


def examples() -> TensorDataset:
    """Return 512 points with labels of a linear teacher."""
    random = torch.Generator().manual_seed(0)
    points, teacher = (torch.randn(n, 64, generator=random) for n in (512, 10))
    return TensorDataset(points, (points @ teacher.T).argmax(1))


def network() -> nn.Module:
    """Return a perceptron with the same weights on all ranks and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, 10))  # fmt: skip


def digest(model: nn.Module) -> str:
    """Return a hash of all weights' bits."""
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def report(
    losses: list[float], model: nn.Module, resumed: nn.Module, ratio: float | None = None
) -> None:
    """Print the report (conftest.Trained) as the last line."""
    if ratio is None:  # a trainer may have created its own groups
        stats = cgx_ops.stats().values()
        ratio = sum(each.bytes_plain for each in stats) / sum(each.bytes_sent for each in stats)
    facts = {
        "losses": losses,
        "ratio": ratio,
        "digest": digest(model),
        "resumed": digest(resumed),
    }
    print(json.dumps(facts), flush=True)
