"""Time a step of DistributedDataParallel with cgx, gloo and torch's compression hooks.

    python benchmarks/hosts.py --rate 1gbit -- python benchmarks/ddp_step.py [--link-rate 1gbit]
    torchrun --nnodes 2 ... benchmarks/ddp_step.py      # on each host: cgx over TCP, without MPI

The model is fixed (steps.py): 25.2 million parameters, plain SGD, one thread per rank. The batch is
chosen so that forward, backward and update take about 100 ms (--compute-ms). DDP has torch's
default settings, with the exceptions in ddp_contenders.py.
"""

import ddp_contenders
import torch
import torch.distributed as dist
from steps import WIDTH, Step, calibrate, measured, parser_of, publish, report_of
from torch import nn

# Steps before timing: PowerSGD compresses from the third step on, DDP rebuilds its buckets after
# the first, and the backend cgx attaches its hook in the first.
WARM_UP = 3


def perceptron(layers: int) -> nn.Sequential:
    blocks = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks[:-1])


def step_of(model: nn.Module, batch: int) -> Step:
    """Return a training step: forward, backward, update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    options = parser_of("A step of DDP: cgx beside gloo and torch's hooks").parse_args()
    torch.set_num_threads(1)
    contenders = ddp_contenders.start()

    def alone(batch: int) -> Step:
        return step_of(perceptron(options.layers), batch)

    batch = calibrate(alone, options.compute_ms / 1e3, first=32)
    steps = {}
    for name, wrap in contenders.items():
        steps[name] = step_of(wrap(perceptron(options.layers)), batch)
        for _ in range(WARM_UP):
            steps[name]()
    found = measured(alone(batch), steps, rounds=options.rounds, budget=options.budget)
    publish(report_of("DDP step", found, batch, options), options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
