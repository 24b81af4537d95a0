"""Replica of a torchft job over the backend "cgx": a process with RANK trains a small model."""

# pyright: reportMissingImports=false
import datetime
import os
import sys
import time

import torch
import torchft
from common import BATCH, EPOCHS, examples, network, report
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader

from cgx_ops import Config
from cgx_ops.torch import BackendOptions
from cgx_ops.torch.integrations.torchft import DistributedDataParallel, ProcessGroup


def main(lighthouse: str) -> None:
    replica = int(os.environ["RANK"])
    timeout = datetime.timedelta(seconds=60)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = network()

    group = ProcessGroup(BackendOptions(Config(bits=4)), timeout)
    manager = torchft.Manager(
        pg=group,
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            inner.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        replica_id=f"replica_{replica}",
        lighthouse_addr=lighthouse,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    ddp = DistributedDataParallel(manager, model, group)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = torchft.Optimizer(manager, inner)

    losses = []
    order = torch.Generator().manual_seed(replica)
    loader = DataLoader(examples(), batch_size=BATCH, shuffle=True, generator=order)
    while len(losses) < EPOCHS:
        total = 0.0
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(points), labels)
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        losses.append(total)
    report(losses, model, model)
    sys.stdout.flush()
    time.sleep(2)  # the other replica may still ask this one's server
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[2])
