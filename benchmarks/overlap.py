"""Measure how much of a slow collective overlaps with computation: cgx and gloo, compiled and DDP.

    mpirun -n 2 python benchmarks/overlap.py [--json FILE] [--delay SECONDS] [--rounds N]

The collective is slowed by a late peer: rank 1 hands its part over `delay` seconds after rank 0,
which costs no processor time and is the same for every contender. Rank 0's clock is read. With
--delay 0 what slows it is the network alone (for two hosts, or one made of network namespaces).

    compiled  6 matrix products that do not need the collective's result, in one graph with it, with
              inductor's passes that reorder communication
    ddp       the backward of a perceptron under DistributedDataParallel; rank 1 sends each bucket
              `delay` seconds after it is ready

Each round times, for each contender in turn, the computation alone (a), the communication alone
(b; in ddp one bucket after the other) and both (c); hidden = (a + b - c) / b, of medians. Ranks
meet at a barrier before each.
"""

import argparse
import json
import os
import platform
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rich.console import Console
from rich.table import Table
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
import cgx_ops.torch

CONFIG = cgx_ops.Config(bits=4)
NUMEL = 2**22
PASSES = ["raise_comms", "sink_waits"]

Reduce = Callable[[torch.Tensor], torch.Tensor]
StartReduce = Callable[[torch.Tensor], Any]  # returns the future of a list of the result


@dataclass
class Row:
    """Medians, in milliseconds, on rank 0."""

    part: str
    contender: str
    computation: float
    communication: float
    both: float

    @property
    def hidden(self) -> float:
        return (self.computation + self.communication - self.both) / self.communication


def seconds(call: Callable[[], object], late: float) -> float:
    """Time one call that all ranks start together; rank 1 starts `late` seconds later."""
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(late)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


Runs = dict[str, tuple[Callable[[], object], float]]  # what is timed, and how late rank 1 is


def measure(part: str, contenders: dict[str, Runs], rounds: int) -> list[Row]:
    """Time the three runs of each contender, interleaved; the first round warms up."""
    times: dict[str, dict[str, list[float]]] = {
        name: {kind: [] for kind in runs} for name, runs in contenders.items()
    }
    for index in range(rounds + 1):
        for name, runs in contenders.items():
            for kind, (call, late) in runs.items():
                passed = seconds(call, late)
                if index:
                    times[name][kind].append(passed)
    medians = {
        name: {kind: 1e3 * statistics.median(all_of) for kind, all_of in kinds.items()}
        for name, kinds in times.items()
    }
    return [Row(part, name, **values) for name, values in medians.items()]


# ---- compiled ------------------------------------------------------------------------------------


def compiled(gloo: dist.ProcessGroup, delay: float, size: int, rounds: int) -> list[Row]:
    options = {"rounding": CONFIG.rounding, "bits": CONFIG.bits}
    reduce: dict[str, Reduce] = {
        "gloo": lambda x: functional.all_reduce(x, "sum", gloo),
        "cgx": lambda x: torch.ops.cgx.quantized_allreduce(x, **options),
        "cgx over gloo": lambda x: torch.ops.cgx.quantized_allreduce(
            x, **options, carrier="c10d", group_name=gloo.group_name
        ),
    }
    x, a = torch.randn(NUMEL), torch.randn(6, size, size)

    def products(a: torch.Tensor) -> list[torch.Tensor]:
        return [torch.mm(a[i], a[i]) for i in range(6)]

    alone = torch.compile(products, fullgraph=True)
    contenders: dict[str, Runs] = {}
    for name, reduce_x in reduce.items():

        def step(x: torch.Tensor, a: torch.Tensor, reduce_x: Reduce = reduce_x) -> object:
            total = reduce_x(x * 2)
            return products(a), total + 1

        def exchange(x: torch.Tensor, reduce_x: Reduce = reduce_x) -> torch.Tensor:
            return reduce_x(x * 2) + 1

        both = torch.compile(step, fullgraph=True)
        communication = torch.compile(exchange, fullgraph=True)
        contenders[name] = {
            "computation": (lambda: alone(a), delay),  # so that as many cores are busy as in both
            "communication": (lambda call=communication: call(x), delay),
            "both": (lambda call=both: call(x, a), delay),
        }
    return measure("compiled", contenders, rounds)


# ---- DistributedDataParallel ---------------------------------------------------------------------


class Late:
    """Starts collectives in the order given, on rank 1 each `delay` seconds after it was given."""

    def __init__(self, delay: float) -> None:
        self._delay = delay if dist.get_rank() == 1 else 0.0
        self._queue: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, start: StartReduce, x: torch.Tensor) -> torch.futures.Future[Any]:
        if not self._delay:
            return start(x)
        result: torch.futures.Future[Any] = torch.futures.Future()
        self._queue.put((time.perf_counter() + self._delay, start, x, result))
        return result

    def _work(self) -> None:
        while True:
            due, start, x, result = self._queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            start(x).add_done_callback(lambda done, result=result: result.set_result(done.value()))


def starts(gloo: dist.ProcessGroup) -> dict[str, StartReduce]:
    def on_cgx(x: torch.Tensor) -> Any:
        with cgx_ops.torch.compressed(CONFIG):
            work = dist.all_reduce(x, async_op=True)
        assert work is not None
        return work.get_future()

    def on_gloo(x: torch.Tensor) -> Any:
        work = dist.all_reduce(x, group=gloo, async_op=True)
        assert work is not None
        return work.get_future()

    return {"gloo": on_gloo, "cgx": on_cgx}


def ddp(gloo: dist.ProcessGroup, delay: float, size: int, rounds: int) -> list[Row]:
    late = Late(delay)
    contenders: dict[str, Runs] = {}
    for name, start in starts(gloo).items():
        layers = [
            layer for _ in range(8) for layer in (torch.nn.Linear(size, size), torch.nn.ReLU())
        ]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), process_group=gloo, bucket_cap_mb=4 * size * size / 2**20
        )
        buckets: list[torch.Tensor] = []

        def hook(
            kept: list[torch.Tensor], bucket: GradBucket, start: StartReduce = start
        ) -> torch.futures.Future[torch.Tensor]:
            kept.append(bucket.buffer().clone())
            return late(start, bucket.buffer()).then(lambda done: done.value()[0])

        model.register_comm_hook(buckets, hook)
        x = torch.randn(size // 4, size)

        def backward(model: Any = model, x: torch.Tensor = x) -> None:
            model(x).sum().backward()

        @contextmanager
        def forgotten(buckets: list[torch.Tensor] = buckets) -> Iterator[None]:
            buckets.clear()
            yield

        def both(backward: Any = backward, forgotten: Any = forgotten) -> None:
            with forgotten():
                backward()

        def computation(model: Any = model, backward: Any = backward) -> None:
            with model.no_sync():
                backward()

        def communication(
            buckets: list[torch.Tensor] = buckets, start: StartReduce = start
        ) -> None:
            for bucket in list(buckets):
                late(start, bucket).wait()

        both()
        both()  # DDP rebuilds its buckets after the first step
        contenders[name] = {
            "computation": (computation, 0),
            "communication": (communication, 0),
            "both": (both, 0),
        }
    return measure("ddp", contenders, rounds)


# ---- report --------------------------------------------------------------------------------------


def report(rows: list[Row], setting: str) -> None:
    table = Table(title=f"Hidden communication, rank 0; {setting}")
    for column in ("", "contender", "compute ms", "communicate ms", "both ms", "hidden"):
        table.add_column(column, justify="left" if column in ("", "contender") else "right")
    for row in rows:
        figures = (f"{x:.0f}" for x in (row.computation, row.communication, row.both))
        table.add_row(row.part, row.contender, *figures, f"{row.hidden:.0%}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Overlap of communication and computation.")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--delay", type=float, default=0.15, help="seconds; 0: the network's own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", type=int, default=1280, help="rows of the matrices")
    parser.add_argument("--part", choices=["compiled", "ddp"], action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    rows: list[Row] = []
    with inductor_config.patch(
        reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=PASSES
    ):
        # A bucket is late by less than the backward of a layer or two: there are eight.
        for part, delay in ((compiled, arguments.delay), (ddp, arguments.delay / 4)):
            if arguments.part is None or part.__name__ in arguments.part:
                rows += part(gloo, delay, arguments.size, arguments.rounds)
    if dist.get_rank() == 0:
        comm = cgx_ops.Communicator.find(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        setting = f"{comm.size} ranks over {comm.transport}, delay {arguments.delay} s"
        report(rows, setting)
        if arguments.json:
            machine = {"processor": platform.processor(), "cores": os.cpu_count()}
            results = [{**asdict(row), "hidden": row.hidden} for row in rows]
            with open(arguments.json, "w") as file:
                json.dump({"machine": machine, "setting": setting, "results": results}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
