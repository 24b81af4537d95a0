"""Losses of training with torchft when replicas are lost, against an undisturbed run.

    python benchmarks/torchft_losses.py --steps 300 --seeds 3

Five replicas train a perceptron on the handwritten digits. In the disturbed runs replicas 3 and 4
are killed (kill -9) at a third of the steps, and replica 4 comes back. Gradients are exact, in 4
bits, or in 2 bits with error feedback. The seed determines the batches. Prints a line of JSON for
each run: the mean training loss of replica 0 over the last 50 steps, and the accuracy. Needs
torchft.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
import argparse
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torchft
from torch import nn
from torchft.coordination import LighthouseServer

from cgx_ops import Config
from cgx_ops.torch import BackendOptions
from cgx_ops.torch.integrations.torchft import DistributedDataParallel, ProcessGroup

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from digits import BATCH, digest, digits, perceptron
from torchft_digits import TIMEOUT, manage, serve_store

SIZE, LOST, BACK, LAST = 5, (3, 4), 4, 50
CONFIGS = {
    "exact": Config(bits=32),
    "4 bits": Config(bits=4),
    "2 bits with feedback": Config(bits=2, compressor="levels"),
}


def replica(
    name: str, index: int, dies: bool, steps: int, seed: int, address: str, pipe: Connection
) -> None:
    """Train one replica and send what it has learnt."""
    torch.set_num_threads(1)
    group = ProcessGroup(BackendOptions(CONFIGS[name]), TIMEOUT)
    model = perceptron()
    inner = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    store, options = serve_store(), {"min_replica_size": 3, "init_sync": False}
    manager = manage(group, model, inner, index, address, store, **options)
    network = DistributedDataParallel(manager, model, group)
    optimizer = torchft.Optimizer(manager, inner)
    images, test_images, labels, test_labels = digits()
    losses, sizes, first = [], [], seed * SIZE * steps
    while manager.current_step() < steps:
        optimizer.zero_grad()
        random = torch.Generator().manual_seed(first + SIZE * manager.current_step() + index)
        batch = torch.randint(len(images), (BATCH,), generator=random)
        loss = nn.functional.cross_entropy(network(images[batch]), labels[batch])
        if dies and manager.current_step() == steps // 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sizes.append(manager.num_participants())
    right = (model(test_images).argmax(1) == test_labels).float().mean().item()
    learnt = {"loss": sum(losses[-LAST:]) / LAST, "accuracy": right,
              "sizes": [size for size, _ in itertools.groupby(sizes)]}  # fmt: skip
    pipe.send((learnt, digest(model)))
    time.sleep(2)  # others may still ask this replica's server
    os._exit(0)


def serve(fewest: int, pipe: Connection) -> None:
    """Serve a lighthouse in a separate process: forks of a process with threads may block."""
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=fewest, join_timeout_ms=10_000, quorum_tick_ms=20,
        heartbeat_timeout_ms=1000,
    )  # fmt: skip
    pipe.send(lighthouse.address())
    signal.pause()


def run(name: str, disturbed: bool, steps: int, seed: int) -> dict[str, Any]:
    """Train all replicas; return what replica 0 has learnt."""
    context = multiprocessing.get_context("fork")  # the imports are done
    mine, theirs = context.Pipe(duplex=False)
    fewest = 3 if disturbed else SIZE
    lighthouse = context.Process(target=serve, args=(fewest, theirs), daemon=True)
    lighthouse.start()
    address = mine.recv()

    def start(index: int, dies: bool) -> tuple[Any, Connection]:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=replica,
            args=(name, index, dies, steps, seed, address, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, mine

    started = [start(i, disturbed and i in LOST) for i in range(SIZE)]
    if disturbed:
        for i in LOST:
            started[i][0].join()
        started[BACK] = start(BACK, dies=False)
        started.pop(min(LOST))
    ended = [pipe.recv() if pipe.poll(300) else None for _, pipe in started]
    for process in (*(process for process, _ in started), lighthouse):
        process.kill()
        process.join()
    assert None not in ended, "a replica did not end"
    learnt, digests = zip(*ended, strict=True)
    return {**learnt[0], "identical": len(set(digests)) == 1}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Losses with lost replicas.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    for seed, name, disturbed in itertools.product(range(options.seeds), CONFIGS, (False, True)):
        facts = {"seed": seed, "gradients": name, "disturbed": disturbed}
        print(json.dumps(facts | run(name, disturbed, options.steps, seed)), flush=True)
