"""Small models to train, for compressors.py and adamw.py, on data that every installation has.

digits      a perceptron on scikit-learn's handwritten digits
characters  a perceptron that predicts the next character of Python's help texts
            (pydoc_data.topics) from the CONTEXT characters before it
gpt         a transformer that predicts the next character of the same texts
code        a transformer of 0.63 million parameters, on Python's standard library
"""

import itertools
import math
import pydoc_data.topics
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

CONTEXT, EMBEDDING, HIDDEN = 16, 32, 256
HEADS = 4
RATE = 0.1

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs, labels


@dataclass(frozen=True)
class Task:
    """A model, its data and its training.

    Attributes:
        name: shown in tables.
        model: returns the model; call torch.manual_seed() before.
        draw: returns a batch of a size, drawn by a generator.
        validation: held-out examples.
        batch: examples for each rank and step.
        steps: steps of the training.
        rate: the initial learning rate of SGD.
        decay: AdamW's weight decay.
        floor: AdamW's final rate, as a fraction of its peak rate.
        norm: AdamW's maximum gradient norm; larger gradients are clipped.
    """

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    validation: Batch
    batch: int
    steps: int
    rate: float
    decay: float = 0.01
    floor: float = 0
    norm: float = math.inf


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


def _topics() -> str:
    return "\n".join(pydoc_data.topics.topics.values())


def _codes(text: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return character codes for training and for validation, and the size of the alphabet."""
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    train, held = codes.tensor_split([len(codes) * 9 // 10])
    return train, held, len(alphabet)


def characters() -> Task:
    train, held, symbols = _codes(_topics())

    def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        begins = torch.randint(len(source) - CONTEXT, (count, 1), generator=generator)
        window = source[begins + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, -1]

    return Task(
        "characters",
        lambda: nn.Sequential(
            nn.Embedding(symbols, EMBEDDING),
            nn.Flatten(),
            *perceptron(CONTEXT * EMBEDDING, HIDDEN, symbols),
        ),
        lambda count, generator: windows(train, count, generator),
        windows(held, 2048, torch.Generator().manual_seed(0)),
        batch=64,
        steps=800,
        rate=RATE,
    )


class Transformer(nn.Module):
    """Returns scores of the next character for each position, (n, symbols, context)."""

    def __init__(self, symbols: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.scores = nn.Linear(width, symbols)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        found = self.layers(self.symbols(texts) + self.positions, mask, is_causal=True)
        return self.scores(found).transpose(1, 2)


def _language(
    name: str,
    text: str,
    *,
    context: int,
    width: int,
    layers: int,
    batch: int,
    steps: int,
    **recipe: float,
) -> Task:
    """Return a task for a transformer: the next character after each one of a text.

    `recipe` has AdamW's fields of the task.
    """
    train, held, symbols = _codes(text)

    def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        begins = torch.randint(len(source) - context, (count, 1), generator=generator)
        window = source[begins + torch.arange(context + 1)]
        return window[:, :-1], window[:, 1:]

    return Task(
        name,
        lambda: Transformer(symbols, context, width, layers),
        lambda count, generator: windows(train, count, generator),
        windows(held, 256, torch.Generator().manual_seed(0)),
        batch=batch,
        steps=steps,
        rate=RATE,
        **recipe,
    )


def gpt() -> Task:
    return _language("gpt", _topics(), context=32, width=64, layers=2, batch=32, steps=200)


def code(context: int = 96, width: int = 128, layers: int = 3, batch: int = 12) -> Task:
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    text = "".join(module.read_text(errors="ignore") for module in modules)[:3_000_000]
    return _language(
        "code",
        text,
        context=context,
        width=width,
        layers=layers,
        batch=batch,
        steps=800,
        decay=0.1,  # and the others: as transformers are usually trained
        floor=0.1,
        norm=1.0,
    )
