"""Code shared by the PyTorch examples: handwritten digits, a perceptron and a training loop."""

import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

HIDDEN, BATCH, LEARNING_RATE = 256, 32, 0.1


def digits() -> list[torch.Tensor]:
    """Return train and test images (n, 64) in [0, 1], train and test labels (n,)."""
    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.float32) / 16
    parts = train_test_split(images, labels, test_size=1 / 3, random_state=0, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


def perceptron() -> nn.Sequential:
    """Return a model with the same weights on all ranks and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
                         nn.Linear(HIDDEN, 10))  # fmt: skip


class Training:
    """Momentum SGD over every rank's part of each batch, and all that a checkpoint of it needs.

    Rank 0 prints a line of JSON per epoch, with the `bits` of its messages, unless `show` is given.
    """

    def __init__(self, model: nn.Module, rank: int, size: int, epochs: int, bits: int,
                 rate: float = LEARNING_RATE, show: bool | None = None) -> None:  # fmt: skip
        self.bits, self.show = bits, rank == 0 if show is None else show
        self.rank, self.size, self.epochs, self.curve = rank, size, epochs, list[float]()
        self.train_x, self.test_x, self.train_y, self.test_y = digits()
        self.steps = len(self.train_x) // (size * BATCH)  # of an epoch
        self.optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, self.steps * epochs
        )
        self.shuffle = torch.Generator().manual_seed(1)

    def run(self, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], until: int) -> None:
        """Train up to an epoch. step(images, labels) sets gradients and returns the loss."""
        while len(self.curve) < until:
            order = torch.randperm(len(self.train_x), generator=self.shuffle)
            mine = order[: self.steps * self.size * BATCH].view(self.steps, self.size, BATCH)
            losses = []
            for batch in mine[:, self.rank]:
                self.optimizer.zero_grad()
                losses.append(step(self.train_x[batch], self.train_y[batch]).item())
                self.optimizer.step()
                self.schedule.step()
            self.curve.append(float(np.mean(losses)))
            if self.show:
                facts = {"bits": self.bits, "epoch": len(self.curve), "loss": self.curve[-1]}
                print(json.dumps(facts), flush=True)

    def accuracy(self, model: nn.Module) -> float:
        """Return the fraction of test images that are classified correctly."""
        with torch.no_grad():
            return (model(self.test_x).argmax(1) == self.test_y).float().mean().item()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for load_state_dict()."""
        state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
                 "shuffle": self.shuffle.get_state(), "curve": self.curve}  # fmt: skip
        return copy.deepcopy(state)  # a copy: further training must not change it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where state_dict() was called."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.shuffle.set_state(state["shuffle"])
        self.curve = list(state["curve"])


def digest(model: nn.Module) -> str:
    """Return a hash of all weights' bits."""
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def same_on_all_ranks(text: str) -> bool:
    """Return whether all ranks of torch.distributed passed the same text."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return len(set(everyone)) == 1
