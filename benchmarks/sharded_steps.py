"""Steps of FSDP2 between hosts: their time, and the bytes that cross a host's link.

    hosts.py --hosts 2 --ranks-per-host 2 --rate 1gbit --
        python sharded_steps.py --link-rate 1gbit [--json FILE]

The model is a transformer of 10 million parameters, in float32. All settings run one after another
in one program: two steps that are not counted, then STEPS steps. Bytes are those that a host sends,
from the counters of its interface, headers included; the largest of all hosts.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import rank_layout
import torch
import torch.distributed as dist
from mpi4py import MPI
from sharded_models import SETTINGS, Setting, sharded
from small_tasks import Transformer
from torch import nn

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, time_text
from cgx_ops.bench.report import Report

SYMBOLS, CONTEXT, WIDTH, LAYERS, BATCH = 128, 32, 368, 6, 1
STEPS, WARM_UP = 20, 2
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


@dataclass(frozen=True)
class Found:
    """The results of one setting.

    Attributes:
        seconds: median of a step.
        sent: bytes that a host sends in a step; 0: there is no interface eth0.
        limit_seconds: what the link takes for these bytes; 0: no rate is known.
    """

    setting: str
    seconds: float
    sent: int
    limit_seconds: float


def build() -> Transformer:
    return Transformer(SYMBOLS, CONTEXT, WIDTH, LAYERS)


def measure(setting: Setting, hosts: int, rate: float | None, steps: int) -> Found:
    ranks = MPI.COMM_WORLD
    model = sharded(build, setting, hosts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    texts = torch.randint(SYMBOLS, (BATCH, CONTEXT + 1))

    def step() -> float:
        ranks.Barrier()
        start = time.perf_counter()
        nn.functional.cross_entropy(model(texts[:, :-1]), texts[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        ranks.Barrier()
        return time.perf_counter() - start

    def sent() -> int:
        ranks.Barrier()
        return int(SENT.read_text()) if SENT.exists() else 0

    for _ in range(WARM_UP):
        step()
    before = sent()
    seconds = statistics.median(step() for _ in range(steps))
    each = ranks.allreduce(sent() - before, MPI.MAX) // steps
    return Found(setting.name, ranks.bcast(seconds), each, each / rate if rate else 0.0)


def table_of(found: list[Found], where: str) -> Table:
    exact = found[0].seconds
    rows = [
        [
            each.setting,
            time_text(each.seconds),
            f"{exact / each.seconds:.2f}",
            time_text(each.limit_seconds) if each.limit_seconds else "-",
            f"{each.sent / 1e6:.2f} MB" if each.sent else "-",
        ]
        for each in found
    ]
    columns = ["setting", "step", "speed-up over the first", "limit of the link", "a host sends"]
    return Table(f"Steps of FSDP2, {where}", columns, rows, text_columns=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare steps of FSDP2 between hosts.")
    parser.add_argument("--link-rate", type=parse_rate, help="of each host, as in 1gbit")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cgx")
    hosts = rank_layout.host_count()
    found = [measure(each, hosts, options.link_rate, options.steps) for each in SETTINGS]
    table = table_of(found, rank_layout.described(hosts, options.link_rate))
    if dist.get_rank() == 0:
        table.print()
        if options.json:
            settings = {"ranks": dist.get_world_size(), "hosts": hosts, "steps": options.steps}
            settings["link_rate"] = options.link_rate
            Report("sharded_steps", settings, [asdict(each) for each in found], [table]).write(
                options.json
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
