"""Handwritten digits with a mixture of experts, whose tokens travel in a few bits.

    mpirun -np 2 python examples/experts.py          # 32 bits (exact), then 8 and 4

Each rank has one expert. A gate sends every token to one expert (top-1 routing), which takes at
most `CAPACITY` times its fair share of a rank's tokens; the others pass unchanged. `all_to_all`
sends tokens to the experts and back, and their gradients, in `bits` bits. All other layers are
replicas, with exact averages of gradients. Rank 0 prints a line of JSON per epoch and per result.
"""

import argparse
import json
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from digits import HIDDEN, Training, digest, same_on_all_ranks
from torch import nn

from cgx_ops import Communicator, Config
from cgx_ops.torch import all_reduce, all_to_all

CAPACITY, BALANCE = 1.25, 0.01  # BALANCE: weight of the loss that spreads tokens evenly


class Experts(nn.Module):
    """Adds to each token the output of its expert, (n, HIDDEN) to (n, HIDDEN).

    The last call's `imbalance` is at least 1, and 1 if all experts get equally many tokens. `kept`
    is the part of the tokens within the capacity.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size, self.config = dist.get_world_size(), config
        self.gate = nn.Linear(HIDDEN, self.size)
        experts = [
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(self.size)
        ]
        self.expert = experts[dist.get_rank()]  # the ranks' random numbers stay equal
        self.imbalance, self.kept = torch.ones(()), 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        chances = self.gate(tokens).softmax(1)
        chance, chosen = chances.max(1)
        wanted = chosen.bincount(minlength=self.size)
        self.imbalance = self.size * (wanted / len(tokens) * chances.mean(0)).sum()

        # The first tokens of each expert, up to its capacity, in the experts' order.
        order = chosen.argsort(stable=True)
        place = torch.arange(len(tokens)) - (wanted.cumsum(0) - wanted)[chosen[order]]
        capacity = math.ceil(CAPACITY * len(tokens) / self.size)
        order = order[place < capacity]
        self.kept = len(order) / len(tokens)

        sent = wanted.clamp(max=capacity)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        outward, inward = sent.tolist(), received.tolist()
        found = self.expert(self.exchanged(tokens[order], inward, outward))
        found = self.exchanged(found, outward, inward) * chance[order, None]
        return tokens.index_add(0, order, found)

    def exchanged(self, tokens: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        return all_to_all(tokens, received, sent, config=self.config, grad_config=self.config)


def train(bits: int, epochs: int, seed: int) -> dict[str, Any]:
    """Train one model; return its accuracy, traffic, times and loss curve."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    experts = Experts(Config(bits))
    model = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), experts, nn.Linear(HIDDEN, 10))
    own = set(experts.expert.parameters())
    training = Training(model, rank, size, epochs, bits)
    kept = list[float]()

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        (loss + BALANCE * experts.imbalance).backward()
        kept.append(experts.kept)
        for parameter in model.parameters():
            assert parameter.grad is not None
            if parameter in own:  # holds the sum over the ranks' tokens
                parameter.grad /= size
            else:
                parameter.grad = all_reduce(parameter.grad, "avg", bits=32)
        return loss

    world = dist.group.WORLD
    assert world is not None
    communicator = Communicator.find(world.group_name)
    sent, start = communicator.bytes_sent, time.perf_counter()
    training.run(step, until=epochs)
    seconds = time.perf_counter() - start
    bytes_per_step = (communicator.bytes_sent - sent) / (training.steps * epochs)
    accuracy = training.accuracy(model)
    replicas = nn.ModuleList([model[0], experts.gate, model[3]])
    return {"framework": "torch experts", "bits": bits, "accuracy": accuracy,
            "losses": training.curve, "bytes_per_step": bytes_per_step, "seconds": seconds,
            "kept": sum(kept) / len(kept),
            "identical": same_on_all_ranks(digest(replicas))}  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Digits with a mixture of experts.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 8, 4])
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    arguments = parser.parse_args()
    dist.init_process_group("cgx")
    for bits in arguments.bits:
        result = train(bits, arguments.epochs, arguments.seed)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
