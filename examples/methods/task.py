"""What the three examples of this folder have to say: the model, its data and its optimizer."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Batch = tuple[torch.Tensor, ...]  # inputs, then what the model should say of them


@dataclass(frozen=True)
class Task:
    """A model to train, and on what.

    Attributes:
        name: of it.
        model: makes the model, from torch's seed.
        draw: returns a batch of so many examples, by a generator.
        held: examples that no batch has.
        loss: of what the model said of a batch.
        score: of it in percent, and what is counted.
        scored: what `score` counts.
        batch: examples a step, of all ranks together.
        steps: of the whole training.
        optimizer: makes the one that this task is trained with.
        momentum: of that, if it is SGD; methods with a momentum of their own take it over.
        rate: the learning rate, before the schedule.
        schedule: makes the course of the rate over so many steps.
    """

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    held: Batch
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    score: Callable[[nn.Module, Batch], float]
    scored: str
    batch: int
    steps: int
    optimizer: Callable[[Iterable[nn.Parameter], float, float], Optimizer]
    momentum: float
    rate: float
    schedule: Callable[[Optimizer, int], LRScheduler]


def sgd(parameters: Iterable[nn.Parameter], rate: float, momentum: float) -> Optimizer:
    """Return SGD with momentum and a small weight decay."""
    return torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=1e-4)


def adamw(parameters: Iterable[nn.Parameter], rate: float, _: float) -> Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, rate, weight_decay=0.01)


def risen_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return a rate that rises for a twentieth of the steps, and falls to 0 along a cosine."""
    rising = max(1, steps // 20)

    def factor(step: int) -> float:
        rest = max(0, step - rising) / max(1, steps - rising)
        return min(1, (step + 1) / rising) * (1 + math.cos(math.pi * rest)) / 2

    return LambdaLR(optimizer, factor)
