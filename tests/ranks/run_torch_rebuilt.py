"""Rank program: states survive a group rebuilt from survivors and a newcomer.

    run_torch_rebuilt.py FOLDER new|reconfigure   # 4 processes with RANK; see launch.processes

"reconfigure": the group is the same object all the time, as is possible from torch 2.14 on.

Processes 0, 1 and 2 average first. Then process 1 leaves, and 0, 2 and 3 continue as a group of the
same size: process 2 has another rank, and does not count its last step, as if that had failed there
only. Process 3 receives the state of process 0. Each process saves its sums, from which the test
computes what was conserved. Optimizers that average themselves are synchronized instead.
"""

import contextlib
import datetime
import hashlib
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch  # noqa: F401  (registers the backend)
from cgx_ops import Config
from cgx_ops._core import library
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging.exchange import Flight
from cgx_ops.torch.optim import CompressedAdamW, Signum

dist: Any = distributed  # torch 2.13 has no annotations of what reconfigures groups
RECONFIGURE = sys.argv[2:] == ["reconfigure"]
TIMEOUT = datetime.timedelta(seconds=60)
FIRST, SECOND, SIZE, STEPS, NUMEL = (0, 1, 2), (0, 2, 3), 3, 20, 1000
BEHIND = 2  # the process whose last step among the first ones fails
PROCESS, FOLDER = int(os.environ["RANK"]), Path(sys.argv[1])
MAKERS: dict[str, Any] = {
    "quantized": lambda: (
        ddp.QuantizedAllreduceState(config=Config(bits=2, compressor="levels", bucket_size=64)),
        ddp.quantized_allreduce_hook,
    ),
    "adaptive": lambda: (
        ddp.QuantizedAllreduceState(
            config=Config(bits=4), adaptive=AdaptiveBits(every=4, samples=4, budget="norm")
        ),
        ddp.quantized_allreduce_hook,
    ),
    "randk": lambda: (  # ranks must draw the same indices
        ddp.QuantizedAllreduceState(config=Config(compressor="randk")),
        ddp.quantized_allreduce_hook,
    ),
    "power_sgd": lambda: (ddp.PowerSGDState(None, start_powerSGD_iter=2), ddp.power_sgd_hook),
    "deep_gradient": lambda: (
        ddp.DeepGradientState(density=0.1, warmup_steps=0),
        ddp.deep_gradient_hook,
    ),
}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: CompressedAdamW(parameters, lr=1e-3, warmup_steps=4, refreshes=1),
    "signum": lambda parameters: Signum(parameters, lr=1e-3),
}


class Given(nn.Module):
    """A layer whose gradient is its input. That of its bias, which is exact, is the first row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL // 20, 20))
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum() + self.bias @ gradient[0]


def values(step: int) -> torch.Tensor:
    random = np.random.default_rng([PROCESS, step])
    return torch.from_numpy(random.standard_normal((NUMEL // 20, 20)).astype(np.float32))


def connect(name: str, processes: tuple[int, ...]) -> None:
    """Make the default group of some processes, in place of an earlier one."""
    if RECONFIGURE:
        reconfigure(name, processes)
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "cgx", store=dist.FileStore(str(FOLDER / name), SIZE), rank=processes.index(PROCESS),
        world_size=SIZE, timeout=TIMEOUT,
    )  # fmt: skip


def reconfigure(name: str, processes: tuple[int, ...]) -> None:
    everyone = len({*FIRST, *SECOND})
    store = dist.FileStore(str(FOLDER / "store"), everyone)
    if not dist.is_initialized():
        dist.init_process_group(
            "cgx", store=store, rank=PROCESS, world_size=everyone, timeout=TIMEOUT,
            enable_reconfigure=True,
        )  # fmt: skip
    store.set(f"{name} {PROCESS}", dist._get_reconfigure_handle())
    handles = [store.get(f"{name} {process}").decode() for process in processes]
    uuid = ("first", "second", "fresh", "refused").index(name)
    dist._reconfigure(uuid, handles, timeout=TIMEOUT).wait()


class Run:
    """The steps of one method, and their sums in float64."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.state, self.hook = MAKERS[method]()
        self.given, self.applied, self.largest = (np.zeros(NUMEL) for _ in range(3))

    def step(self, state: Any, steps: range) -> torch.Tensor:
        """Return the last average."""
        layer = Given()
        model = DistributedDataParallel(layer)
        model.register_comm_hook(state, self.hook)
        gradient = torch.zeros(0)
        for step in steps:
            layer.weight.grad = layer.bias.grad = None
            given = values(step)
            model(given).backward()
            assert layer.weight.grad is not None
            gradient = layer.weight.grad.flatten().clone()
            if state is self.state:
                self.count(given, gradient)
        assert layer.bias.grad is not None
        everyones: list[Any] = [None] * SIZE
        dist.all_gather_object(everyones, layer.bias.grad.tolist())
        assert everyones == SIZE * everyones[:1], self.method
        return gradient

    def count(self, given: torch.Tensor, average: torch.Tensor) -> None:
        total = SIZE * average.double().numpy()
        self.given += given.flatten().double().numpy()
        self.applied += total
        self.largest = np.maximum(self.largest, np.abs(total) + np.abs(self.residual()))

    def fail_last_step(self) -> None:
        """Set the counts as after a last step that fails on this process only."""
        self.state.steps -= 1
        if self.method == "deep_gradient":
            self.state.momenta.tensors["bias"].zero_()
        adaptive = getattr(self.state, "adaptive", None)
        if adaptive is not None:
            adaptive._arrived, adaptive.bits, adaptive.changes = [], {}, 0

    def residual(self) -> np.ndarray:
        kept = self.state.residuals.tensors.get("weight")
        return np.zeros(NUMEL) if kept is None else kept.double().numpy().flatten()

    def save(self, **more: Any) -> None:
        np.savez(
            FOLDER / f"{self.method} {PROCESS}.npz", given=self.given, applied=self.applied,
            residual=self.residual(), largest=self.largest, **more,
        )  # fmt: skip


class OptimizerRun:
    """The steps of an optimizer that averages itself."""

    def __init__(self, name: str) -> None:
        self.layer = Given()
        self.optimizer = OPTIMIZERS[name](self.layer.parameters())

    def step(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.layer(values(step)).backward()
            if PROCESS == BEHIND and step == STEPS - 1:
                self.fail()
            else:
                self.optimizer.step()

    def fail(self) -> None:
        """Take part in a step, which fails on this process only."""
        before = self.common()

        def wait(flight: Any) -> None:
            flight._future.wait()
            raise RuntimeError("a rank is lost")

        with unittest.mock.patch.object(Flight, "wait", wait), contextlib.suppress(RuntimeError):
            self.optimizer.step()
        assert self.common() == before

    def common(self) -> str:
        """Return a digest of all that must be equal on all ranks."""
        optimizer, found = self.optimizer, hashlib.sha256()
        names = set(optimizer.of_state) - set(optimizer.of_rank)
        states = [
            optimizer.state[p][name] for p in self.layer.parameters() for name in sorted(names)
        ]
        for x in (*self.layer.parameters(), *states):
            found.update(x.detach().numpy().tobytes())
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        schedule = vars(optimizer).get("schedule")
        return f"{found.hexdigest()} {settings} {optimizer.exchange.steps} {schedule}"

    def continues(self) -> None:
        """Synchronize, then step; the survivor that was ahead does not change.

        The other one's failed average contains its residuals, so that they are cleared.
        """
        before, momenta, residuals = self.common(), self.momenta(), self.residuals()
        self.optimizer.synchronize()
        assert (self.common() == before) == (SECOND[0] == PROCESS)
        assert all(map(torch.equal, momenta, self.momenta())), "a survivor keeps its momenta"
        if PROCESS == BEHIND:
            residuals = []
        assert len(residuals) == len(self.residuals())
        assert all(map(torch.equal, residuals, self.residuals()))
        for steps in (range(0), range(STEPS, STEPS + 5)):
            self.step(steps)
            everyones: list[Any] = [None] * SIZE
            dist.all_gather_object(everyones, self.common())
            assert everyones == SIZE * everyones[:1]
        assert self.optimizer.exchange.steps == STEPS + 5

    def momenta(self) -> list[torch.Tensor]:
        optimizer, parameters = self.optimizer, self.layer.parameters()
        return [optimizer.state[p][name].clone() for p in parameters for name in optimizer.of_rank]

    def residuals(self) -> list[torch.Tensor]:
        return [e.clone() for e in self.optimizer.exchange.residuals.tensors.values()]


def refuses_another_version() -> None:
    """Connect while process 3 has another version of cgx_ops; all processes raise."""
    own = library.version()
    dist.destroy_process_group()
    if SECOND[-1] == PROCESS:
        setattr(library, "version", lambda: "99.1")  # noqa: B010
    try:
        connect("refused", SECOND)
    except dist.DistBackendError as error:
        assert f"rank 0 has cgx_ops {own}, rank 2 has 99.1" in str(error), error
    else:
        raise AssertionError("no error")
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    runs = [Run(method) for method in MAKERS]
    optimizers = [OptimizerRun(name) for name in OPTIMIZERS]
    before = []
    if PROCESS in FIRST:
        connect("first", FIRST)
        for optimizer in optimizers:
            optimizer.step(range(STEPS))
        for run in runs:
            run.step(run.state, range(STEPS))
            before.append((run.state.communicator(), run.applied.copy(), run.residual()))
    if PROCESS not in SECOND:  # it leaves
        for run in runs:
            run.save()
        dist.destroy_process_group()
        return

    if PROCESS == BEHIND:
        for run in runs:
            run.fail_last_step()
    connect("second", SECOND)
    for run, old in zip(runs, before, strict=PROCESS in FIRST):
        communicator, _, residual = old
        assert communicator.closed and not run.state.communicator().closed
        assert np.array_equal(run.residual(), residual), "a survivor keeps its residual"
    for optimizer in optimizers:
        optimizer.continues()
    for run in runs:
        sent = [run.state.joining_state_dict()]
        dist.broadcast_object_list(sent, src=0)
        if PROCESS not in FIRST:
            run.state.load_state_dict(sent[0])
        assert run.state.steps == STEPS - (PROCESS == BEHIND)
    for run in runs:
        run.step(run.state, range(STEPS, 2 * STEPS - 1))
        assert run.state.steps == 2 * STEPS - 1
    saved = [run.state.state_dict() for run in runs]
    last = range(2 * STEPS - 1, 2 * STEPS)
    averages = [run.step(run.state, last) for run in runs]

    connect("fresh", SECOND)  # the same ranks and seeds, with loaded states
    for run, state, average in zip(runs, saved, averages, strict=True):
        fresh, _ = MAKERS[run.method]()
        fresh.load_state_dict(state)
        run.save(average=average.numpy(), fresh=run.step(fresh, last).numpy())
    refuses_another_version()


if __name__ == "__main__":
    main()
