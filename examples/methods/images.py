"""Train an image classifier, a residual network with batch norm, with several methods.

    mpirun -np 2 python examples/methods/images.py --methods exact "4 bits" PowerSGD DGC

The optimizer is SGD with momentum; the learning rate is divided by ten twice. The data are the
handwritten digits of scikit-learn, rotated, scaled and shifted at random, with noise.
"""

import itertools

import torch
from sklearn.datasets import load_digits
from task import Batch, Task, sgd
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from training import main

WIDTHS = (24, 48, 96, 192)
SIZE = 12  # pixels of a side


class Residual(nn.Module):
    """Two convolutions and a 1 x 1 convolution as shortcut; halves width and height."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.beside = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.norms[2](self.beside(x)))


def network() -> nn.Module:
    blocks = (Residual(a, b) for a, b in itertools.pairwise(WIDTHS))
    return nn.Sequential(
        nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(),
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 10),
    )  # fmt: skip


def distorted(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return (n, 8, 8) images as (n, 1, SIZE, SIZE), rotated, scaled and shifted, with noise."""
    angle, scale, x, y = torch.rand(4, len(images), generator=generator) * 2 - 1
    angle, scale = angle * 0.5, 1 + scale * 0.2
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    turn = torch.stack([cosine, -sine, x * 0.25, sine, cosine, y * 0.25], 1).view(-1, 2, 3)
    grid = functional.affine_grid(turn, [len(images), 1, SIZE, SIZE], align_corners=False)
    moved = functional.grid_sample(images[:, None], grid, align_corners=False)
    return moved + 0.15 * torch.randn(moved.shape, generator=generator)


def images() -> Task:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, rest = order[:600], order[600:]

    def draw(count: int, generator: torch.Generator) -> Batch:
        chosen = rest[torch.randint(len(rest), (count,), generator=generator)]
        return distorted(x[chosen], generator), y[chosen]

    def schedule(optimizer: Optimizer, steps: int) -> LRScheduler:
        return MultiStepLR(optimizer, [steps * 6 // 10, steps * 85 // 100], 0.1)

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def score(model: nn.Module, batch: Batch) -> float:
        return 100 * (model(batch[0]).argmax(1) == batch[1]).float().mean().item()

    return Task(
        "images", network, draw, (distorted(x[held], torch.Generator().manual_seed(0)), y[held]),
        loss, score, "right %", batch=32, steps=200, optimizer=sgd, momentum=0.9, rate=0.05,
        adam_rate=3e-3, sign_rate=1e-3, schedule=schedule,
    )  # fmt: skip


if __name__ == "__main__":
    main(images())
