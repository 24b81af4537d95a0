"""Every compressor: the bytes it sends, its error, its speed, and how models train with it.

    python benchmarks/compressors.py [--seeds 5] [--json FILE] [--docs PAGE]
    python benchmarks/compressors.py --again FILE --docs docs/reference/compressors.md

1. values: three distributions, and gradients of both tasks at three stages of training
2. codecs: bytes, squared error over the squared signal, and time, on one core
3. training: two ranks, threads of this process, train two tasks with each setting and several
   seeds. A seed sets the weights and the batches.

Tensors of one dimension travel exact, as in the DDP hook.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import documents
import numpy as np
import numpy.typing as npt
import torch
from small_tasks import Task, characters, digits
from torch import nn

from cgx_ops import Communicator, Config, Segment, dequantize, quantize
from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report

Floats = npt.NDArray[np.float32]

NUMEL = 1 << 20
RANKS = 2
TASKS = (digits, characters)
MOMENTUM = 0.9
STAGES = (0.0, 0.5, 1.0)  # parts of the training after which gradients are captured


def topk(density: float, **knobs: int) -> Config:
    return Config(compressor="topk", density=density, bucket_size=4096, **knobs)  # pyright: ignore


# The configs of phase 2, by name.
CODECS: dict[str, Config] = {
    **{f"uniform, {b} bits, nearest": Config(b, rounding="nearest") for b in (8, 4, 2)},
    **{f"uniform, {b} bits, stochastic": Config(b) for b in (8, 4, 2)},
    "uniform, 2 bits, nearest, rotation 32": Config(2, rounding="nearest", rotation=32),
    **{f"levels, {b} bits": Config(b, compressor="levels") for b in (4, 3, 2, 1)},
    **{
        f"levels, {b} bits, rotation 32": Config(b, compressor="levels", rotation=32)
        for b in (2, 1)
    },
    "sign": Config(compressor="sign"),
    "onebit": Config(compressor="onebit"),
    "ternary": Config(compressor="ternary"),
    "ternary, clip": Config(compressor="ternary", clip=True),
    **{f"qsgd, {b} bits": Config(b, compressor="qsgd") for b in (8, 4)},
    "half, nearest": Config(compressor="half"),
    "half, stochastic": Config(compressor="half", rounding="stochastic"),
    "topk 1 %": topk(0.01),
    "topk 1 %, 16-bit values": topk(0.01, value_bits=16),
    "topk 1 %, 4-bit values": topk(0.01, value_bits=4),
    "topk 64 of 4096": topk(64 / 4096),
    "randk 1 %": Config(compressor="randk", density=0.01, bucket_size=4096),
}

# Block formats, each followed by compressors of the same number of bits.
AT_EQUAL_BYTES: dict[str, Config] = {
    "mxfp8": Config(compressor="mxfp8"),
    "mxfp8_e5m2": Config(compressor="mxfp8_e5m2"),
    "uniform, 8 bits, buckets of 256": Config(8, bucket_size=256, rounding="nearest"),
    "mxfp4": Config(compressor="mxfp4"),
    "uniform, 4 bits, buckets of 256": Config(4, bucket_size=256, rounding="nearest"),
    "levels, 4 bits, buckets of 64": Config(4, bucket_size=64, compressor="levels"),
    "nvfp4, buckets of 65536": Config(compressor="nvfp4", bucket_size=65536),
    "uniform, 4 bits, buckets of 128": Config(4, bucket_size=128, rounding="nearest"),
    "levels, 4 bits, buckets of 32": Config(4, bucket_size=32, compressor="levels"),
}

# The settings of phase 3: the config, and whether there is error feedback.
TRAININGS: dict[str, tuple[Config, bool]] = {
    "exact": (Config(32), False),
    "uniform, 4 bits": (Config(4), False),
    "uniform, 2 bits": (Config(2), False),
    "levels, 2 bits": (CODECS["levels, 2 bits"], False),
    "levels, 2 bits, feedback": (CODECS["levels, 2 bits"], True),
    "levels, 2 bits, rotation 32, feedback": (CODECS["levels, 2 bits, rotation 32"], True),
    "levels, 1 bit, feedback": (CODECS["levels, 1 bits"], True),
    "levels, 1 bit, rotation 32, feedback": (CODECS["levels, 1 bits, rotation 32"], True),
    "onebit, feedback": (CODECS["onebit"], True),
    "topk 1 %, feedback": (topk(0.01), True),
    "topk 0.1 %, feedback": (topk(0.001), True),
    "ternary": (CODECS["ternary"], False),
    "qsgd, 4 bits": (CODECS["qsgd, 4 bits"], False),
}


# ---- 3. training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The result of a training: held-out accuracy (a part of 1) and loss (nats)."""

    task: str
    setting: str
    seed: int
    accuracy: float
    loss: float


class Training:
    """Momentum SGD on gradients that two ranks average."""

    def __init__(self, task: Task, seed: int, config: Config, feedback: bool) -> None:
        torch.manual_seed(seed)
        self.task, self.config, self.name = task, config, f"seed {seed}"
        self.model = task.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), task.rate, momentum=MOMENTUM)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, task.steps)
        self.generators = [torch.Generator().manual_seed(1000 * seed + r) for r in range(RANKS)]
        self.segments, end = [], 0
        for parameter in self.model.parameters():
            own = Config(bits=32) if parameter.dim() <= 1 else None
            self.segments.append(Segment(end, parameter.numel(), own))
            end += parameter.numel()
        self.residuals = [np.zeros(end, np.float32) for _ in range(RANKS)] if feedback else None

    def gradients(self) -> list[Floats]:
        """Return the gradients of each rank; each rank draws another batch."""
        found = []
        for generator in self.generators:
            inputs, labels = self.task.draw(self.task.batch, generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            found.append(torch.cat(parts).numpy())
        return found

    def step(self, comms: list[Communicator], pool: ThreadPoolExecutor) -> None:
        gradients = self.gradients()

        def average(rank: int) -> Floats:
            residual = None if self.residuals is None else self.residuals[rank]
            return comms[rank].allreduce(
                gradients[rank],
                "avg",
                self.config,
                segments=self.segments,
                residual=residual,
                name=self.name,
            )

        mean, other = pool.map(average, range(RANKS))
        assert mean.tobytes() == other.tobytes()
        for parameter, segment in zip(self.model.parameters(), self.segments, strict=True):
            part = mean[segment.offset : segment.offset + segment.numel]
            parameter.grad = torch.from_numpy(part).view_as(parameter)
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def result(self, setting: str, seed: int) -> Trained:
        inputs, labels = self.task.validation
        scores = self.model(inputs)
        loss = nn.functional.cross_entropy(scores, labels).item()
        accuracy = (scores.argmax(1) == labels).float().mean().item()
        return Trained(self.task.name, setting, seed, accuracy, loss)


def train_all(seeds: int) -> list[Trained]:
    comms = Communicator.local(RANKS)
    found = []
    with ThreadPoolExecutor(RANKS) as pool:
        for make, seed in itertools.product(TASKS, range(seeds)):
            task = make()
            for name, (config, feedback) in TRAININGS.items():
                training = Training(task, seed, config, feedback)
                for _ in range(task.steps):
                    training.step(comms, pool)
                found.append(training.result(name, seed))
    for comm in comms:
        comm.close()
    return found


# ---- 1. values -----------------------------------------------------------------------------------


def captured() -> Floats:
    """Return the gradients of all matrices, of both tasks at each stage, as one array."""
    found = []
    comms = Communicator.local(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        for make in TASKS:
            task = make()
            training = Training(task, 0, Config(32), feedback=False)
            stages = [round(stage * task.steps) for stage in STAGES]
            for step in range(task.steps + 1):
                if step in stages:
                    kept = copy.deepcopy(training)
                    gradient = kept.gradients()[0]
                    matrices = [s for s in training.segments if s.config is None]
                    found += [gradient[s.offset : s.offset + s.numel].copy() for s in matrices]
                if step < task.steps:
                    training.step(comms, pool)
    for comm in comms:
        comm.close()
    # Scaled so that all tensors have the same weight.
    return np.concatenate([g / np.sqrt(np.mean(g * g) or 1) for g in found]).astype(np.float32)


def distributions() -> dict[str, Floats]:
    random = np.random.default_rng(0)
    return {
        "Gauss": random.standard_normal(NUMEL, np.float32),
        "Laplace": random.laplace(size=NUMEL).astype(np.float32),
        "t3": random.standard_t(3, NUMEL).astype(np.float32),
        "gradients": captured(),
    }


# ---- 2. codecs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coded:
    """A codec on values: bits per value, |x - Q(x)|^2 / |x|^2, nanoseconds per value."""

    codec: str
    values: str
    bits: float
    error: float
    nanoseconds: float


def code_all(rounds: int = 7) -> list[Coded]:
    found = []
    configs = (CODECS | AT_EQUAL_BYTES).items()
    for (name, config), (kind, x) in itertools.product(configs, distributions().items()):
        data = quantize(x, config)
        wrong = x - dequantize(data, x.size, config=config)
        seconds = []
        for _ in range(rounds if kind == "Gauss" else 1):
            begin = time.perf_counter()
            quantize(x, config)
            seconds.append(time.perf_counter() - begin)
        error = float(np.sum(wrong.astype(float) ** 2) / np.sum(x.astype(float) ** 2))
        found.append(Coded(name, kind, 8 * len(data) / x.size, error, min(seconds) / x.size * 1e9))
    return found


# ---- Tables --------------------------------------------------------------------------------------


def table_of_codecs(found: list[Coded]) -> Table:
    by = {(each.codec, each.values): each for each in found}
    kinds = list(dict.fromkeys(each.values for each in found))
    rows = [
        [
            name,
            f"{by[name, 'Gauss'].bits:.3f}",
            *(f"{by[name, kind].error:.2g}" for kind in kinds),
            f"{by[name, 'Gauss'].nanoseconds:.2f}",
        ]
        for name in CODECS
    ]
    return Table(
        "Bytes and error",
        ["codec", "bits", *kinds, "ns"],
        rows,
        notes=[
            "Bits and ns: per value. ns: time to encode "
            f"{NUMEL:,} Gaussian values on one core, from Python. Buckets have 512 values, those "
            "of topk and randk 4096. Gradients: all matrices of both tasks, at the start, in the "
            "middle and at the end of training.",
        ],
    )


def table_of_formats(found: list[Coded]) -> Table:
    """Return the errors of the block formats; empty for a report that does not have them."""
    by = {(each.codec, each.values): each for each in found if each.codec in AT_EQUAL_BYTES}
    kinds = list(dict.fromkeys(each.values for each in found))
    rows = [
        [name, f"{by[name, 'Gauss'].bits:.2f}", *(f"{by[name, kind].error:.2g}" for kind in kinds)]
        for name in AT_EQUAL_BYTES
        if (name, "Gauss") in by
    ]
    return Table("Block formats at equal bytes", ["codec", "bits", *kinds], rows)


def table_of_training(task: str, found: list[Trained]) -> Table:
    def accuracies_of(setting: str) -> list[float]:
        mine = [each for each in found if (each.task, each.setting) == (task, setting)]
        return [100 * each.accuracy for each in mine]

    exact = statistics.mean(accuracies_of("exact"))

    def cells(setting: str) -> list[str]:
        mine = [each for each in found if (each.task, each.setting) == (task, setting)]
        accuracies, losses = accuracies_of(setting), [each.loss for each in mine]
        spread = statistics.stdev if len(mine) > 1 else lambda _: 0.0
        return [
            f"{statistics.mean(accuracies):.2f}",
            f"{spread(accuracies):.2f}",
            f"{statistics.mean(accuracies) - exact:+.2f}",
            f"{statistics.mean(losses):.3f}",
            f"{spread(losses):.3f}",
        ]

    seeds = len({each.seed for each in found})
    return Table(
        f"How models train: {task}",
        ["setting", "accuracy %", "+-", "to exact", "loss", "+-"],
        [[name, *cells(name)] for name in TRAININGS],
        notes=[
            f"Held-out accuracy and loss (nats): mean and standard deviation of {seeds} seeds. "
            "To exact: difference in percentage points."
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Every compressor: bytes, error, time, training")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="measure nothing; read a report of --json"
    )
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="also put the tables between the page's markers"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.again:
        rows = json.loads(options.again.read_text())["results"]
        coded = [Coded(**row) for row in rows if "codec" in row]
        trained = [Trained(**row) for row in rows if "task" in row]
    else:
        coded, trained = code_all(), train_all(options.seeds)
    tables = [table_of_codecs(coded), table_of_formats(coded)]
    tables += [table_of_training(task, trained) for task in dict.fromkeys(t.task for t in trained)]
    for table in tables:
        table.print()
    if options.json:
        rows = [asdict(each) for each in (*coded, *trained)]
        Report("compressors", {"seeds": options.seeds}, rows, tables).write(options.json)
    if options.docs:
        names = ["errors", "formats", *dict.fromkeys(each.task for each in trained)]
        bodies = (documents.body_of(table) for table in tables)
        documents.insert(options.docs, dict(zip(names, bodies, strict=True)))


if __name__ == "__main__":
    main()
