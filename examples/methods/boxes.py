"""Train a detector of squares, rings and crosses, with several methods.

    mpirun -np 2 python examples/methods/boxes.py --methods exact "4 bits" PowerSGD DGC

The model has convolutions at three scales, a feature pyramid, and a wide layer over the whole
picture. Its tensors have between 4 and 262,144 elements. For each cell of 4 x 4 pixels it predicts
the kind of object at the middle of the cell and the distances to its sides. The optimizer is SGD
with momentum; the learning rate has a linear warm-up and a cosine decay. Pictures are generated.
"""

import torch
from task import Batch, Task, risen_cosine, sgd
from torch import nn
from torch.nn import functional
from training import main

SIZE, CELL, THINGS = 32, 4, 2  # width of a picture, width of a cell, objects per picture
CELLS = SIZE // CELL
KINDS = 3  # squares, rings, crosses; class 3 is the background


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class Detector(nn.Module):
    """Scores of kinds and distances of sides, (n, KINDS + 1 + 4, CELLS, CELLS)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(1, 16, 2), block(16, 32, 2))  # CELLS
        self.middle = nn.Sequential(block(32, 64, 2), block(64, 64))  # CELLS / 2
        self.coarse = nn.Sequential(block(64, 128, 2), block(128, 128))  # CELLS / 4
        self.whole = nn.Sequential(
            nn.Flatten(), nn.Linear(128 * (CELLS // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, 32)
        )
        self.laterals = nn.ModuleList(nn.Conv2d(width, 32, 1) for width in (32, 64, 128))
        self.smooth = nn.Sequential(block(32, 32), block(32, 32))
        self.kinds = nn.Conv2d(32, KINDS + 1, 1)
        self.sides = nn.Conv2d(32, 4, 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        fine = self.stem(pictures)
        middle = self.middle(fine)
        coarse = self.coarse(middle)
        found = self.laterals[2](coarse) + self.whole(coarse)[:, :, None, None]
        found = functional.interpolate(found, scale_factor=2) + self.laterals[1](middle)
        found = functional.interpolate(found, scale_factor=2) + self.laterals[0](fine)
        found = self.smooth(found)
        return torch.cat([self.kinds(found), self.sides(found)], 1)


def draw(count: int, generator: torch.Generator) -> Batch:
    """Return pictures (n, 1, SIZE, SIZE), kinds (n, CELLS, CELLS), sides (n, 4, CELLS, CELLS).

    Sides are distances from a cell's middle, as parts of SIZE: left, top, right, bottom.
    """
    pixels = torch.arange(SIZE) + 0.5
    middles = (torch.arange(CELLS) + 0.5) * CELL
    pictures = 0.25 * torch.randn(count, SIZE, SIZE, generator=generator)
    kinds = torch.full((count, CELLS, CELLS), KINDS)
    sides = torch.zeros(count, 4, CELLS, CELLS)
    for _ in range(THINGS):
        kind = torch.randint(KINDS + 1, (count, 1, 1), generator=generator)  # KINDS: not there
        half, a, b = torch.rand(3, count, 1, 1, generator=generator)
        half = 4 + 4 * half
        x, y = half + a * (SIZE - 2 * half), half + b * (SIZE - 2 * half)

        across, down = (pixels - x).abs(), (pixels[:, None] - y).abs()
        square = torch.maximum(across, down) < half
        far = across**2 + down**2
        ring = (far < half**2) & (far > half**2 / 4)
        cross = square & (torch.minimum(across, down) < half / 3)
        shape = torch.stack([square, ring, cross, torch.zeros_like(square)])
        pictures += 1.5 * shape[kind[:, 0, 0], torch.arange(count)]

        left, top = middles - (x - half), middles[:, None] - (y - half)
        right, bottom = x + half - middles, y + half - middles[:, None]
        distances = torch.broadcast_tensors(left, top, right, bottom)
        inside = (torch.stack(distances).amin(0) > 0) & (kind < KINDS)
        kinds = torch.where(inside, kind, kinds)
        sides = torch.where(inside[:, None], torch.stack(distances, 1) / SIZE, sides)
    return pictures[:, None], kinds, sides


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    pictures, kinds, sides = batch
    outputs = model(pictures)
    there = (kinds < KINDS)[:, None]
    far = functional.smooth_l1_loss(outputs[:, KINDS + 1 :], sides, beta=0.05, reduction="none")
    return functional.cross_entropy(outputs[:, : KINDS + 1], kinds) + (
        (far * there).sum() / (4 * there.sum()).clamp(min=1)
    )


def score(model: nn.Module, batch: Batch) -> float:
    """Return the percentage of object cells with the right kind and an overlap of at least half."""
    pictures, kinds, sides = batch
    outputs = model(pictures)
    boxes = outputs[:, KINDS + 1 :].clamp(min=0)
    least, most = torch.minimum(boxes, sides), torch.maximum(boxes, sides)
    common, area = ((side[:, 0] + side[:, 2]) * (side[:, 1] + side[:, 3]) for side in (least, most))
    found = (outputs[:, : KINDS + 1].argmax(1) == kinds) & (common > 0.5 * area)
    return 100 * found[kinds < KINDS].float().mean().item()


def boxes() -> Task:
    return Task(
        "boxes", Detector, draw, draw(400, torch.Generator().manual_seed(0)),
        loss, score, "found %", batch=16, steps=250, optimizer=sgd, momentum=0.9, rate=0.1,
        adam_rate=3e-3, sign_rate=1e-3, schedule=risen_cosine,
    )  # fmt: skip


if __name__ == "__main__":
    main(boxes())
