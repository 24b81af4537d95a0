"""Handwritten digits with a transformer whose layers are divided among the ranks.

    mpirun -np 2 python examples/tensor_parallel.py          # 32 bits (exact), then 8 and 4

Tensor parallelism as in Megatron-LM: each rank has some of the attention heads and some of the
hidden units, and `all_reduce` sums the ranks' outputs of each layer in `bits` bits. Its gradient is
the same sum, so that backward sends as many messages as forward. All ranks train on the same
batches. The whole model is one compiled graph. Rank 0 prints a line of JSON per epoch and result.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from digits import Training, digest, same_on_all_ranks
from torch import nn

from cgx_ops import Communicator, Config
from cgx_ops.torch import all_reduce

TOKENS, WIDTH, HEADS, HIDDEN, LAYERS = 8, 64, 8, 256, 2
LEARNING_RATE = 0.02


def columns(inputs: int, outputs: int, parts: int = 1) -> nn.Linear:
    """Return this rank's outputs of a layer that computes `parts` values of each output."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = nn.Linear(inputs, parts * outputs)  # equal on all ranks
    own = nn.Linear(inputs, parts * outputs // size, device="meta").to_empty(device="cpu")
    for name, values in whole.named_parameters():
        chosen = values.detach().unflatten(0, (parts, size, -1))[:, rank].flatten(0, 1)
        own.get_parameter(name).data.copy_(chosen)
    return own


def rows(inputs: int, outputs: int) -> nn.Linear:
    """Return this rank's inputs of a layer; the ranks' outputs have to be summed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = nn.Linear(inputs, outputs, bias=False)
    own = nn.Linear(inputs // size, outputs, bias=False, device="meta").to_empty(device="cpu")
    own.weight.data.copy_(whole.weight.detach().chunk(size, 1)[rank])
    return own


class Layer(nn.Module):
    """Attention and a perceptron, (n, TOKENS, WIDTH) to the same shape."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.heads = HEADS // dist.get_world_size()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projections, self.out = columns(WIDTH, WIDTH, parts=3), rows(WIDTH, WIDTH)
        self.wide, self.narrow = columns(WIDTH, HIDDEN), rows(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projections(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        found = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )
        x = x + all_reduce(self.out(found.transpose(1, 2).flatten(2)), config=self.config)
        hidden = nn.functional.gelu(self.wide(self.norms[1](x)))
        return x + all_reduce(self.narrow(hidden), config=self.config)


class Model(nn.Module):
    """Scores of the ten digits, (n, 64) to (n, 10). A token is a row of the image."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Linear(64 // TOKENS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.layers = nn.Sequential(*(Layer(config) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.embedding(images.unflatten(1, (TOKENS, -1))) + self.positions
        return self.head(self.layers(tokens).mean(1))

    def replicated(self) -> list[nn.Parameter]:
        """Return the parameters that all ranks have."""
        whole = [self.embedding, self.head, *(layer.norms for layer in self.layers)]
        return [self.positions, *(p for module in whole for p in module.parameters())]


def train(bits: int, epochs: int, seed: int, backend: str) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = Model(Config(bits))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    training = Training(model, 0, 1, epochs, bits, rate=LEARNING_RATE, show=rank == 0)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(compiled(images), labels)
        # The gradient of a sum over ranks adds the gradients of all ranks' losses, which are equal.
        (loss / size).backward()
        for parameter in model.replicated():  # has the part of this rank's heads and units
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, bits=32)
        return loss

    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator.find(world.group_name)
    sent, start = communicator.bytes_sent, time.perf_counter()
    training.run(step, until=epochs)
    seconds = time.perf_counter() - start
    bytes_per_step = (communicator.bytes_sent - sent) / (training.steps * epochs)
    accuracy = training.accuracy(model)
    replicas = nn.ParameterList(model.replicated())
    return {"framework": "torch tensor parallel", "bits": bits, "accuracy": accuracy,
            "losses": training.curve, "bytes_per_step": bytes_per_step, "seconds": seconds,
            "identical": same_on_all_ranks(digest(replicas))}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with tensor parallelism.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = train(bits, arguments.epochs, arguments.seed, arguments.backend)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
