"""Task: the model, data and optimizer of one of the three examples in this folder."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Batch = tuple[torch.Tensor, ...]  # inputs, then labels


@dataclass(frozen=True)
class Task:
    """A model, its data and its training.

    Attributes:
        name: shown in tables, and the name of the output files.
        model: returns the model, initialized from torch's global seed.
        draw: returns a batch of a size, drawn by a generator.
        held: held-out examples.
        loss: returns the loss of a model on a batch.
        score: returns the score of a model on a batch, in percent.
        scored: unit of the score, shown in tables.
        batch: examples in a step, of all ranks together.
        steps: steps of the training.
        optimizer: returns the optimizer of parameters, a learning rate and a momentum.
        momentum: momentum of SGD. Methods with momentum, such as DGC, use it instead of SGD.
        rate: peak learning rate of `optimizer`.
        adam_rate: peak learning rate of AdamW and of its compressed forms.
        sign_rate: peak learning rate of SigNUM.
        schedule: returns the learning rate schedule of an optimizer over a number of steps.
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
    adam_rate: float
    sign_rate: float
    schedule: Callable[[Optimizer, int], LRScheduler]


def sgd(parameters: Iterable[nn.Parameter], rate: float, momentum: float) -> Optimizer:
    """Return SGD with momentum and a small weight decay."""
    return torch.optim.SGD(parameters, rate, momentum=momentum, weight_decay=1e-4)


def adamw(parameters: Iterable[nn.Parameter], rate: float, _: float) -> Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(parameters, rate, weight_decay=0.01)


def risen_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Return a schedule with linear warm-up for 5 % of the steps, then a cosine to 0."""
    rising = max(1, steps // 20)

    def factor(step: int) -> float:
        rest = max(0, step - rising) / max(1, steps - rising)
        return min(1, (step + 1) / rising) * (1 + math.cos(math.pi * rest)) / 2

    return LambdaLR(optimizer, factor)
