"""Two perceptrons to train, for compressors.py, on what every installation has.

digits      scikit-learn's handwritten digits
characters  the next character of Python's own help texts (pydoc_data.topics) from the CONTEXT
            before it
"""

import itertools
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn

CONTEXT, EMBEDDING, HIDDEN = 16, 32, 256
RATE = 0.1

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, labels


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: of it.
        model: makes the model, after torch.manual_seed().
        draw: returns a batch of so many examples, by a generator.
        validation: examples that no batch has.
        batch: examples a rank and step.
        steps: of the whole training.
        rate: of learning, at first.
    """

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    validation: Batch
    batch: int
    steps: int
    rate: float


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def digits() -> Task:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, rest = order[:360], order[360:]

    def draw(count: int, generator: torch.Generator) -> Batch:
        chosen = rest[torch.randint(len(rest), (count,), generator=generator)]
        return x[chosen], y[chosen]

    return Task(
        "digits",
        lambda: perceptron(64, HIDDEN, HIDDEN, 10),
        draw,
        (x[held], y[held]),
        batch=32,
        steps=400,
        rate=RATE,
    )


def characters() -> Task:
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    train, held = codes.tensor_split([len(codes) * 9 // 10])

    def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        begins = torch.randint(len(source) - CONTEXT, (count, 1), generator=generator)
        window = source[begins + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, -1]

    return Task(
        "characters",
        lambda: nn.Sequential(
            nn.Embedding(len(alphabet), EMBEDDING),
            nn.Flatten(),
            *perceptron(CONTEXT * EMBEDDING, HIDDEN, len(alphabet)),
        ),
        lambda count, generator: windows(train, count, generator),
        windows(held, 2048, torch.Generator().manual_seed(0)),
        batch=64,
        steps=800,
        rate=RATE,
    )
