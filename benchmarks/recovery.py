"""How long process groups take to detect a killed rank, and to rebuild without it.

    python benchmarks/recovery.py torchft --rounds 20      # if it is installed
    python benchmarks/recovery.py reconfigure --rounds 20  # from torch 2.14 on

Each round forks three processes per group, which connect and start an allreduce of 1 MiB. One of
them is killed (kill -9) while the others wait for it. Reports medians in milliseconds over rounds
and survivors: from the kill to the exception ("detect"), to configure the two survivors
("rebuild"), and their first allreduce. Groups alternate.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
import argparse
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as distributed
from torch.distributed import ReduceOp

from cgx_ops import Config
from cgx_ops.torch import BackendOptions

dist: Any = distributed  # its annotations refer to torch internals
SIZE, NUMEL, TIMEOUT = 3, 1 << 18, timedelta(seconds=30)
VICTIM = SIZE - 1


def options(transport: Literal["SHM", "TCP"]) -> BackendOptions:
    return BackendOptions(Config(bits=4), compress="all", transport=transport)


class Reconfigured:
    """A default group with the interface of torchft's process groups."""

    def __init__(self, backend: str, chosen: BackendOptions | None = None) -> None:
        self._backend, self._chosen = backend, chosen

    def configure(self, address: str, _: str, rank: int, size: int) -> None:
        """Connect the ranks; `address` is that of the store, host:port/place/number."""
        where, place, number = address.split("/")
        if not dist.is_initialized():
            host, port = where.split(":")
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
            self._store = dist.PrefixStore(place, store)
            dist.init_process_group(
                self._backend, store=self._store, rank=rank, world_size=size, timeout=TIMEOUT,
                pg_options=self._chosen, enable_reconfigure=True,
            )  # fmt: skip
        self._store.set(f"{number}/{rank}", dist._get_reconfigure_handle())
        handles = [self._store.get(f"{number}/{peer}").decode() for peer in range(size)]
        dist._reconfigure(int(number), handles, timeout=TIMEOUT).wait()

    def allreduce(self, tensors: list[torch.Tensor], op: Any) -> Any:
        return dist.all_reduce(tensors[0], op, async_op=True)

    def abort(self) -> None:
        dist.destroy_process_group()


def of_torchft() -> dict[str, Callable[[], Any]]:
    from torchft.process_group import ProcessGroupGloo

    from cgx_ops.torch.integrations.torchft import ProcessGroup

    return {
        "gloo": lambda: ProcessGroupGloo(TIMEOUT),
        "cgx, TCP": lambda: ProcessGroup(options("TCP"), TIMEOUT),
        "cgx, shared memory": lambda: ProcessGroup(options("SHM"), TIMEOUT),
    }


def of_torch() -> dict[str, Callable[[], Any]]:
    return {
        "gloo": lambda: Reconfigured("gloo"),
        "cgx, TCP": lambda: Reconfigured("cgx", options("TCP")),
        "cgx, shared memory": lambda: Reconfigured("cgx", options("SHM")),
    }


GROUPS = {"torchft": of_torchft, "reconfigure": of_torch}


def survive(make: Callable[[], Any], port: int, place: str, rank: int, pipe: Connection) -> None:
    """Run one process of a round; survivors send their times in seconds."""
    torch.set_num_threads(1)
    group = make()
    group.configure(f"localhost:{port}/{place}/1", str(rank), rank, SIZE)
    x = torch.ones(NUMEL)
    for _ in range(3):
        group.allreduce([x], ReduceOp.SUM).wait()
    if rank == VICTIM:
        time.sleep(0.2)  # the others wait in the next call
        killed = time.monotonic()
        store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
        store.set(f"{place}/killed", str(killed))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.allreduce([x], ReduceOp.SUM).wait()
    except RuntimeError:
        detected = time.monotonic()
    else:
        raise AssertionError("the allreduce ended without the victim")
    group.configure(f"localhost:{port}/{place}/2", str(rank), rank, SIZE - 1)
    rebuilt = time.monotonic()
    group.allreduce([x], ReduceOp.SUM).wait()
    reduced = time.monotonic()
    store = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    killed = float(store.get(f"{place}/killed"))
    pipe.send((detected - killed, rebuilt - detected, reduced - rebuilt))
    group.abort()
    os._exit(0)


def serve(pipe: Connection) -> None:
    """Serve a store in a separate process: forks of a process with threads may block."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    signal.pause()


def measure(groups: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians by group."""
    context = multiprocessing.get_context("fork")  # the imports are done
    mine, theirs = context.Pipe(duplex=False)
    context.Process(target=serve, args=(theirs,), daemon=True).start()
    port = mine.recv()
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in groups}
    for index in range(rounds):
        for number, (name, make) in enumerate(groups.items()):
            started = []
            for rank in range(SIZE):
                mine, theirs = context.Pipe(duplex=False)
                arguments = (make, port, f"{index}-{number}", rank, theirs)
                process = context.Process(target=survive, args=arguments, daemon=True)
                process.start()
                theirs.close()
                started.append((process, mine))
            for rank, (process, pipe) in enumerate(started):
                if rank != VICTIM:
                    assert pipe.poll(60), f"{name}: rank {rank} did not recover"
                    times[name].append(pipe.recv())
                process.join()
    parts = ("detect", "rebuild", "allreduce")
    return {
        name: {
            part: round(1e3 * statistics.median(values), 2)
            for part, values in zip(parts, zip(*found, strict=True), strict=True)
        }
        for name, found in times.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Recovery of process groups.")
    parser.add_argument("by", choices=GROUPS, help="what rebuilds the groups")
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args()
    for name, medians in measure(GROUPS[chosen.by](), chosen.rounds).items():
        print(json.dumps({"group": name, "unit": "ms"} | medians), flush=True)
