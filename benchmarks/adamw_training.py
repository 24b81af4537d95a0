"""Trainings with AdamW whose gradients, momenta or updates are compressed.

The two ranks are threads of this process. They average with the same collectives as processes do,
with the segments that the DDP hook makes: vectors travel exact. The arithmetic of PowerSGD and of
CompressedAdamW is written out here, as in power_sgd_hook and cgx_ops.torch.optim; that of 1-bit
Adam as in its paper. Averaged gradients are clipped; where momenta or updates travel, each rank
clips its own gradient.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from small_tasks import Task
from torch import nn

from cgx_ops import Communicator, Config, Segment
from cgx_ops._core.adam import VarianceSchedule, longest_update

Floats = npt.NDArray[np.float32]

RANKS = 2
BETAS, EPS = (0.9, 0.95), 1e-8
RISING = 0.05  # of the steps: the rate's linear warm-up, before a cosine
FROZEN_AFTER = 0.2  # of the steps: the warm-up of 1-bit Adam, and a long one of CompressedAdamW
LOW_RANK = 4  # PowerSGD's
EIGHT_BITS = Config(8, error_feedback=False)


@dataclass(frozen=True)
class Method:
    """What is averaged, and how.

    Attributes:
        config: the codec.
        sends: gradients; 1-bit Adam's momentum; CompressedAdamW's updates; or PowerSGD's factors of
            gradients.
        warmup: CompressedAdamW's, by the steps of the training.
        refreshes: CompressedAdamW's variance steps at each interval.
        gradients: the codec of CompressedAdamW's gradients.
    """

    config: Config
    sends: Literal["gradients", "momentum", "updates", "factors"] = "gradients"
    warmup: Callable[[int], int] = lambda steps: 8
    refreshes: int = 4
    gradients: Config = EIGHT_BITS


def levels(bits: int, feedback: bool) -> Config:
    """Return the compressor "levels" with a rotation."""
    return Config(bits, compressor="levels", rotation=32, error_feedback=feedback)


EXACT = "exact"
METHODS: dict[str, Method] = {
    EXACT: Method(Config(32)),
    "8 bits": Method(Config(8)),
    "4 bits": Method(Config(4)),
    "4 bits nearest": Method(Config(4, rounding="nearest", error_feedback=False)),
    "4 bits nearest, feedback": Method(Config(4, rounding="nearest", error_feedback=True)),
    "2 bits": Method(Config(2)),
    "2 bits rotated levels": Method(levels(2, False)),
    "2 bits rotated levels, feedback": Method(levels(2, True)),
    "1 bit rotated levels, feedback": Method(levels(1, True)),
    "entropy, 4 bits, feedback": Method(Config(compressor="entropy", rate=4)),
    "entropy, 2 bits, feedback": Method(Config(compressor="entropy", rate=2)),
    "topk 1 %, feedback": Method(
        Config(compressor="topk", density=0.01, bucket_size=4096, error_feedback=True)
    ),
    f"PowerSGD rank {LOW_RANK}": Method(Config(32), "factors"),
    "1-bit Adam": Method(Config(1, compressor="levels", error_feedback=True), "momentum"),
    "1-bit Adam, exact momentum": Method(Config(32), "momentum"),
    "CompressedAdamW": Method(levels(1, True), "updates"),
    "CompressedAdamW, long warm-up": Method(
        levels(1, True),
        "updates",
        warmup=lambda steps: round(FROZEN_AFTER * steps),
        refreshes=1,
        gradients=Config(compressor="entropy", rate=4, error_feedback=False),
    ),
}


class Averager:
    """Averages one vector of each rank with a codec, and stores the residuals."""

    def __init__(self, comms: list[Communicator], model: nn.Module, config: Config) -> None:
        self._comms, self._config, self._pool = comms, config, ThreadPoolExecutor(RANKS)
        self._segments, end = list[Segment](), 0
        for p in model.parameters():
            own = Config(bits=32) if p.dim() <= 1 else None
            self._segments.append(Segment(end, p.numel(), own))
            end += p.numel()
        self._residuals = [np.zeros(end, np.float32) for _ in range(RANKS)]
        self.sent = 0

    def mean(self, vectors: list[Floats]) -> Floats:
        """Return the average that every rank gets."""

        def one(rank: int) -> Floats:
            return self._comms[rank].allreduce(
                vectors[rank],
                "avg",
                self._config,
                segments=self._segments,
                residual=self._residuals[rank] if self._config.keeps_residuals else None,
            )

        before = self._comms[0].stats().bytes_sent
        first, other = self._pool.map(one, range(RANKS))
        assert first.tobytes() == other.tobytes()
        self.sent += self._comms[0].stats().bytes_sent - before
        return first


class PowerSgd:
    """Averages gradients by PowerSGD with each rank's own residuals, as power_sgd_hook does.

    A matrix of n rows and m columns is factored if the factors have less than half its elements.
    """

    def __init__(self, model: nn.Module) -> None:
        self._shapes = [p.shape for p in model.parameters()]
        generator = torch.Generator().manual_seed(0)
        self._q = [
            torch.randn(math.prod(s[1:]), LOW_RANK, generator=generator)
            if len(s) > 1 and 2 * LOW_RANK * (s[0] + math.prod(s[1:])) < s.numel()
            else None
            for s in self._shapes
        ]
        self._residuals: dict[int, list[torch.Tensor]] = {}
        self.sent, self._steps = 0, 0

    def mean(self, vectors: list[Floats]) -> Floats:
        """Return the average."""
        self._steps += 1
        parts = [torch.from_numpy(v).split([s.numel() for s in self._shapes]) for v in vectors]
        found = []
        for i, (shape, q) in enumerate(zip(self._shapes, self._q, strict=True)):
            mine = [part[i].view(shape[0], -1) for part in parts]
            if q is None or self._steps <= 2:
                found.append(sum(mine, torch.zeros(())).flatten() / RANKS)
                self.sent += 4 * shape.numel()
                continue
            if i in self._residuals:
                mine = [m + e for m, e in zip(mine, self._residuals[i], strict=True)]
            p, _ = torch.linalg.qr(sum(mine, torch.zeros(())) / RANKS @ q)
            own = [m.T @ p for m in mine]
            self._residuals[i] = [m - p @ o.T for m, o in zip(mine, own, strict=True)]
            self._q[i] = q = sum(own, torch.zeros(())) / RANKS
            found.append((p @ q.T).flatten())
            self.sent += 4 * (p.numel() + q.numel())
        return torch.cat(found).numpy()


class Moments:
    """Adam's moments, and its steps."""

    def __init__(self, numel: int) -> None:
        self.m, self.v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self._of_m = self._of_v = 0

    def update(self, gradient: Floats, frozen: bool = False) -> Floats:
        """Return Adam's step; `frozen` leaves the second moment unchanged."""
        self._of_m += 1
        self.m += (1 - BETAS[0]) * (gradient - self.m)
        if not frozen:
            self._of_v += 1
            self.v += (1 - BETAS[1]) * (gradient**2 - self.v)
        return self.step(self.m / (1 - BETAS[0] ** self._of_m))

    def step(self, m: Floats) -> Floats:
        """Return a momentum over sqrt(v); elements without a second moment do not move."""
        v = self.v / (1 - BETAS[1] ** self._of_v)
        return np.where(v == 0, 0, m / (np.sqrt(v) + EPS)).astype(np.float32)


class CompressedAdamW:
    """Makes steps as cgx_ops.torch.optim.CompressedAdamW."""

    def __init__(
        self, comms: list[Communicator], model: nn.Module, method: Method, steps: int
    ) -> None:
        self._warmup, self._refreshes = method.warmup(steps), method.refreshes
        self._schedule = VarianceSchedule()
        self._gradients = Averager(comms, model, method.gradients)
        self._updates = Averager(comms, model, method.config)
        numel = sum(p.numel() for p in model.parameters())
        self._m, self._v = np.zeros(numel, np.float32), np.zeros(numel, np.float32)
        self._weight, self._steps = 0.0, 0

    @property
    def sent(self) -> int:
        """Bytes sent by a rank so far."""
        return self._gradients.sent + self._updates.sent

    def update(self, gradients: list[Floats]) -> Floats:
        """Return Adam's step."""
        if self._steps == self._schedule.due:
            g, kept = self._gradients.mean(gradients), self._schedule.kept(BETAS[1])
            self._m = np.float32(BETAS[0]) * self._m + np.float32(1 - BETAS[0]) * g
            self._v = np.float32(kept) * self._v + np.float32(1 - kept) * g * g
            self._weight = kept * self._weight + 1 - kept
            u = self._m / self._denominator()
            self._schedule = self._schedule.advanced(
                self._steps,
                ends=self._steps + 1 >= self._warmup,
                refreshes=self._refreshes,
            )
        else:
            below, most = self._denominator(), longest_update(*BETAS)
            own = [(BETAS[0] * self._m + (1 - BETAS[0]) * g) / below for g in gradients]
            root = RANKS**0.5
            clipped = [np.clip(x, -root * most, root * most).astype(np.float32) for x in own]
            u = np.clip(self._updates.mean(clipped), -most, most)
            self._m = u * below
        self._steps += 1
        return (u / (1 - BETAS[0] ** self._steps)).astype(np.float32)

    def _denominator(self) -> Floats:
        return np.sqrt(self._v / np.float32(self._weight)) + np.float32(EPS)


class Training:
    """A model, its batches and its schedule."""

    def __init__(self, task: Task, seed: int, rate: float, steps: int) -> None:
        torch.manual_seed(seed)
        self._task, self.model = task, task.model()
        # SGD with weight decay is AdamW if Adam's step is its gradient.
        self._optimizer = torch.optim.SGD(self.model.parameters(), rate, weight_decay=task.decay)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, schedule(steps, task.floor)
        )
        self._generators = [torch.Generator().manual_seed(1000 * seed + r) for r in range(RANKS)]
        self.numel = sum(p.numel() for p in self.model.parameters())

    def gradients(self) -> list[Floats]:
        """Return the gradients of each rank; each rank draws another batch."""
        found = []
        for generator in self._generators:
            inputs, labels = self._task.draw(self._task.batch, generator)
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), labels).backward()
            parts = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
            found.append(torch.cat(parts).numpy())
        return found

    def step(self, update: Floats) -> None:
        """Take a step of the current rate, with weight decay."""
        parts = torch.from_numpy(update).split([p.numel() for p in self.model.parameters()])
        for p, part in zip(self.model.parameters(), parts, strict=True):
            p.grad = part.view_as(p)
        self._optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def result(self) -> tuple[float, float]:
        """Return the held-out loss and the accuracy in percent."""
        inputs, labels = self._task.validation
        scores = self.model(inputs)
        accuracy = 100 * (scores.argmax(1) == labels).float().mean().item()
        return nn.functional.cross_entropy(scores, labels).item(), accuracy


def schedule(steps: int, floor: float) -> Callable[[int], float]:
    """Return the factor of the rate by step: a linear warm-up, then a cosine to `floor`."""
    rising = max(1, round(RISING * steps))

    def factor(step: int) -> float:
        rest = max(0, step - rising) / max(1, steps - rising)
        fallen = floor + (1 - floor) * (1 + math.cos(math.pi * rest)) / 2
        return min(1, (step + 1) / rising) * fallen

    return factor


def clipped(gradient: Floats, norm: float) -> Floats:
    """Return a gradient, scaled to `norm` if its norm is larger."""
    length = float(np.linalg.norm(gradient))
    return gradient * np.float32(norm / length) if length > norm else gradient


@dataclass(frozen=True)
class Trained:
    """The result of one training.

    Attributes:
        task, method, seed, rate, steps: of the training.
        loss: held-out loss in the end, in nats.
        score: held-out accuracy in the end, in percent.
        bits: sent by a rank in a step, for each parameter.
    """

    task: str
    method: str
    seed: int
    rate: float
    steps: int
    loss: float
    score: float
    bits: float


def train(
    comms: list[Communicator], task: Task, name: str, seed: int, rate: float, steps: int
) -> Trained:
    """Train a task with one method."""
    method, training = METHODS[name], Training(task, seed, rate, steps)
    moments = Moments(training.numel)
    averager: Averager | PowerSgd | CompressedAdamW
    if method.sends == "factors":
        averager = PowerSgd(training.model)
    elif method.sends == "updates":
        averager = CompressedAdamW(comms, training.model, method, steps)
    else:
        averager = Averager(comms, training.model, method.config)
    for step in range(steps):
        gradients = training.gradients()
        if isinstance(averager, CompressedAdamW):
            update = averager.update([clipped(g, task.norm) for g in gradients])
        elif method.sends != "momentum":
            update = moments.update(clipped(averager.mean(gradients), task.norm))
        elif step < FROZEN_AFTER * steps:
            averager.sent += 4 * training.numel
            update = moments.update(clipped(np.mean(gradients, 0), task.norm))
        else:
            own = [clipped(g, task.norm) for g in gradients]
            momenta = [BETAS[0] * moments.m + (1 - BETAS[0]) * g for g in own]
            moments.m = averager.mean([m.astype(np.float32, copy=False) for m in momenta])
            update = moments.step(moments.m)
        training.step(update)
    bits = 8 * averager.sent / steps / training.numel
    return Trained(task.name, name, seed, rate, steps, *training.result(), bits)
