"""Train a language model, a transformer on characters of Python's help texts, with several methods.

    mpirun -np 2 python examples/methods/characters.py --methods exact "4 bits" PowerSGD DGC

The optimizer is AdamW; the learning rate has a linear warm-up and a cosine decay to 0.
"""

import pydoc_data.topics

import torch
from task import Batch, Task, adamw, risen_cosine
from torch import nn
from torch.nn import functional
from training import main

CONTEXT, WIDTH, HEADS, LAYERS = 32, 128, 4, 2


class Transformer(nn.Module):
    """Returns scores of the next character at each position, (n, CONTEXT, symbols)."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
        self.scores = nn.Linear(WIDTH, symbols)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        found = self.layers(self.symbols(texts) + self.places, mask, is_causal=True)
        return self.scores(found)


def characters() -> Task:
    text = "\n".join(pydoc_data.topics.topics.values())
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    train, held = codes.tensor_split([len(codes) * 9 // 10])

    def windows(source: torch.Tensor, count: int, generator: torch.Generator) -> Batch:
        begins = torch.randint(len(source) - CONTEXT, (count, 1), generator=generator)
        window = source[begins + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def score(model: nn.Module, batch: Batch) -> float:
        return 100 * (model(batch[0]).argmax(2) == batch[1]).float().mean().item()

    return Task(
        "characters", lambda: Transformer(len(alphabet)),
        lambda count, generator: windows(train, count, generator),
        windows(held, 200, torch.Generator().manual_seed(0)),
        loss, score, "right %", batch=16, steps=250, optimizer=adamw, momentum=0, rate=3e-3,
        adam_rate=3e-3, sign_rate=1e-3, schedule=risen_cosine,
    )  # fmt: skip


if __name__ == "__main__":
    main(characters())
