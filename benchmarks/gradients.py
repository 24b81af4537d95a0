"""Capture gradients of four models, for error_by_bytes.py.

    PYTHONPATH=examples/methods python benchmarks/gradients.py [--steps 10 100 1000]

The three models of examples/methods and the transformer of small_tasks.py train without
compression, each with its optimizer, in one process. A capture holds the gradients of all matrices
of one step as one array, in the order of the model's parameters. Vectors are left out, because the
DDP hook sends them exact. Captures are saved below build/gradients/, as MODEL-STEP.npy.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import small_tasks
import torch
from boxes import boxes
from characters import characters
from images import images
from task import Batch, Task, adamw, risen_cosine
from torch import nn
from torch.nn import functional

Floats = npt.NDArray[np.float32]

FOLDER = Path(__file__).resolve().parents[1] / "build" / "gradients"
STEPS = (10, 100, 1000)
RANKS = 2  # a capture is the gradient of one rank: of a batch of that part


def gpt() -> Task:
    """Return the transformer of small_tasks.py, trained with AdamW."""
    small = small_tasks.gpt()

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def score(model: nn.Module, batch: Batch) -> float:
        return 100 * (model(batch[0]).argmax(1) == batch[1]).float().mean().item()

    return Task(
        small.name, small.model, small.draw, small.validation, loss, score, "right %",
        batch=RANKS * small.batch, steps=small.steps, optimizer=adamw, momentum=0, rate=3e-3,
        adam_rate=3e-3, sign_rate=1e-3, schedule=risen_cosine,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Task]] = {
    "images": images,
    "boxes": boxes,
    "characters": characters,
    "gpt": gpt,
}


def captured(task: Task, steps: Sequence[int]) -> Iterator[tuple[int, Floats]]:
    """Train, and return the gradients of some steps; the first step is 1."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), task.rate, task.momentum)
    schedule = task.schedule(optimizer, max(steps))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, max(steps) + 1):
        optimizer.zero_grad()
        task.loss(model, task.draw(task.batch // RANKS, generator)).backward()
        if step in steps:
            found = [p.grad for p in model.parameters() if p.dim() > 1]
            yield step, torch.cat([g.flatten() for g in found if g is not None]).numpy()
        optimizer.step()
        schedule.step()


def load(folder: Path = FOLDER) -> dict[str, Floats]:
    """Return the saved captures by name, such as "gpt, step 100"."""
    named = [(path.stem.rpartition("-"), path) for path in folder.glob("*.npy")]
    order = sorted(named, key=lambda each: (each[0][0], int(each[0][2])))
    return {f"{model}, step {step}": np.load(path) for (model, _, step), path in order}


def main() -> None:
    parser = argparse.ArgumentParser(description="Captures gradients of four models")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--steps", nargs="+", type=int, default=STEPS, help="(default 10 100 1000)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="(default build/gradients)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        for step, gradient in captured(MODELS[name](), options.steps):
            path = options.folder / f"{name}-{step}.npy"
            np.save(path, gradient)
            print(f"{path}: {gradient.size:,} values", flush=True)


if __name__ == "__main__":
    main()
