"""Rank program: error feedback under torchft loses nothing when a replica dies and another joins.

    run_torchft_feedback.py FOLDER LIGHTHOUSE       # 4 processes with RANK

Processes 0, 1 and 2 train. At step DIES process 2 ends while the others wait for it in the
allreduce. Then process 3 joins. Each process saves its sums, from which the test computes what was
conserved.
"""

# pyright: reportMissingImports=false
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torchft
from torch._C._distributed_c10d import TCPStore

from cgx_ops import Config
from cgx_ops.torch import BackendOptions, hook_state
from cgx_ops.torch.integrations.torchft import DistributedDataParallel, ProcessGroup

VICTIM, NEW, DIES, JOINED, NUMEL = 2, 3, 10, 20, 1000
PROCESS, FOLDER, LIGHTHOUSE = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2]
TIMEOUT = timedelta(seconds=60)


class Given(torch.nn.Module):
    """A layer whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUMEL // 20, 20))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def values(step: int) -> torch.Tensor:
    random = np.random.default_rng([PROCESS, step])
    return torch.from_numpy(random.standard_normal((NUMEL // 20, 20)).astype(np.float32))


def main() -> None:
    if PROCESS == NEW:
        while not (FOLDER / f"{VICTIM}.npz").exists():
            time.sleep(0.1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    config = Config(bits=2, compressor="levels", bucket_size=64)
    group = ProcessGroup(BackendOptions(config), TIMEOUT)
    layer = Given()
    manager = torchft.Manager(
        group, layer.load_state_dict, layer.state_dict, min_replica_size=2, timeout=TIMEOUT,
        quorum_timeout=TIMEOUT, rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, lighthouse_addr=LIGHTHOUSE, replica_id=f"replica_{PROCESS}",
        hostname="localhost",
    )  # fmt: skip
    model = DistributedDataParallel(manager, layer, group)
    state = hook_state(model)
    assert state is not None
    given, applied, largest = (np.zeros(NUMEL) for _ in range(3))
    sizes: list[int] = []

    def residual() -> np.ndarray:
        state.state_dict()  # uses the residuals of the last step if it was committed
        kept = state.residuals.tensors.get("weight")
        return np.zeros(NUMEL) if kept is None else kept.double().numpy()

    def save() -> None:
        np.savez(
            FOLDER / f"{PROCESS}.npz", given=given, applied=applied, residual=residual(),
            largest=largest, sizes=sizes, steps=manager.current_step(),
        )  # fmt: skip

    while sizes[-JOINED:] != [3] * JOINED:  # only possible with the new process
        manager.start_quorum()
        layer.weight.grad = None
        gradient = values(manager.current_step())
        if PROCESS == VICTIM and manager.current_step() == DIES:
            manager.wait_quorum()
            time.sleep(0.5)  # the others wait in the allreduce
            save()
            os._exit(0)
        model(gradient).backward()
        took_part, size = manager.is_participating(), manager.num_participants()
        if not manager.should_commit():
            continue
        average = layer.weight.grad
        assert average is not None
        if took_part:
            given += gradient.flatten().double().numpy()
        total = size * average.flatten().double().numpy()
        applied += total
        largest = np.maximum(largest, np.abs(total) + np.abs(residual()))
        sizes.append(size)
    save()
    time.sleep(2)  # others may still ask this replica's server
    os._exit(0)


if __name__ == "__main__":
    main()
