"""Layers that a step does not use: their state is preserved and no bytes are sent for them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, InvalidArgument
from cgx_ops.planner import AdaptiveBits, Plan
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging.power_sgd import state as power_sgd_state

from .common import RANK, SIZE, Net, gradients_of, identical_on_all_ranks, images, network, same

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)
HALF = replace(LEVELS, residual_decay=0.5)
SPARE = "spare.weight"
# the steps in which no rank, or only the last rank, uses the spare layer; otherwise all do
NO_RANK, LAST_RANK = 3, 4


class Weighed(Net):
    """Model that always uses the spare layer; weight 0 makes its gradient zero."""

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        return super().forward(x, True) * float(spare)


def tensors_of_state(state: Any) -> dict[str, torch.Tensor]:
    """Return the state of the spare layer, including biases."""
    kept = {"residuals": state.residuals.tensors, "momenta": {}}
    if isinstance(state, ddp.DeepGradientState):
        kept["momenta"] = state.momenta.tensors
    return {
        f"{what} {name}": x.clone()
        for what, tensors in kept.items()
        for name, x in tensors.items()
        if name.startswith("spare.")
    }


def unused_layer_state_is_unchanged() -> None:
    """Check that a step leaves the state of a layer unchanged if no rank uses it.

    Compares with a model that always uses the layer, with a zero gradient on ranks where the other
    model does not use it. That model skips the steps in which no rank uses the layer.
    """
    plan = Plan(
        tuple(n for n, _ in network().named_parameters()),
        tuple(p.numel() for p in network().parameters()), (4,) * 8, ((7, 6), (5, 4, 3, 2, 1, 0)),
    )  # fmt: skip
    gloo: Any = dist.new_group(backend="gloo")
    quantized, topk = ddp.quantized_allreduce_hook, Config(compressor="topk", density=0.05)
    cases: list[tuple[Any, Any, Any]] = [
        (ddp.QuantizedAllreduceState, {"config": LEVELS}, quantized),
        (ddp.QuantizedAllreduceState, {"config": topk}, quantized),
        (ddp.QuantizedAllreduceState, {"config": HALF}, quantized),
        (
            ddp.QuantizedAllreduceState,
            {"config": LEVELS, "carrier": "c10d", "process_group": gloo},
            quantized,
        ),
        (ddp.PlannedAllreduceState, {"plan": plan, "config": LEVELS}, ddp.planned_allreduce_hook),
        (ddp.DeepGradientState, {"density": 0.05}, ddp.deep_gradient_hook),
        (ddp.PowerSGDState, {"start_powerSGD_iter": 2}, ddp.power_sgd_hook),
        (ddp.PowerSGDState, {"start_powerSGD_iter": 2, "config": HALF}, ddp.power_sgd_hook),
        (ddp.PowerSGDState, {"start_powerSGD_iter": 2}, ddp.batched_power_sgd_hook),
    ]
    for make, options, hook in cases:
        models, states = [], []
        for module, unused in ((network(), True), (Weighed(), False)):
            module.load_state_dict(network().state_dict())
            models.append(DistributedDataParallel(
                module, find_unused_parameters=unused, bucket_cap_mb=0.004
            ))  # fmt: skip
            states.append(make(**options))
            models[-1].register_comm_hook(states[-1], hook)
        model, always = models
        for step in range(6):
            spare = step < NO_RANK or step > LAST_RANK or (step == LAST_RANK and RANK == SIZE - 1)
            before = tensors_of_state(states[0])
            for each in models if step != NO_RANK else [model]:
                each.zero_grad()
                each(images(RANK, step), spare=spare).square().sum().backward()
            got, kept = model.module.spare.weight.grad, tensors_of_state(states[0])
            if step == NO_RANK:
                assert got is None
                assert any(x.any() for x in kept.values()), (make, "the state must not be empty")
                same(kept, before, make)
                states[1].steps += 1
                continue
            assert got is not None
            identical_on_all_ranks({SPARE: got})
            if hook is not ddp.batched_power_sgd_hook:  # the batched hook's Q covers all layers
                same({SPARE: got}, {SPARE: always.module.spare.weight.grad}, (make, step))
                same(kept, tensors_of_state(states[1]), (make, step))
            elif step >= NO_RANK:
                assert got.any() and not torch.equal(
                    kept[f"residuals {SPARE}"], before[f"residuals {SPARE}"]
                )


class Idle(nn.Module):
    """Model whose first layer is never used. Its gradient fills the last bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.idle = nn.Linear(512, 512, bias=False)  # the limit of DDP's first bucket, 1 MiB
        self.inner = network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, spare=True)


class Lines(logging.Handler):
    """The lines that a logger writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def skipped_buckets_end_steps() -> None:
    """Compare with a model that also sends the bucket without used layers, the last one.

    With skip_all_reduce_unused_params=True torch does not call the hook for this bucket.
    """
    quantized = ddp.quantized_allreduce_hook
    noisy = Config(bits=4, rounding="stochastic")
    randk = Config(compressor="randk", density=0.1)
    low_rank: Any = {"start_powerSGD_iter": 2, "compression_stats_logging_frequency": 2}
    cases: list[tuple[Callable[[], Any], Any]] = [
        (lambda: ddp.QuantizedAllreduceState(config=noisy), quantized),
        (lambda: ddp.QuantizedAllreduceState(config=randk), quantized),
        (lambda: ddp.QuantizedAllreduceState(adaptive=AdaptiveBits(every=4, samples=2)), quantized),
        (lambda: ddp.DeepGradientState(density=0.01, warmup_steps=4), ddp.deep_gradient_hook),
        (lambda: ddp.PowerSGDState(**low_rank), ddp.power_sgd_hook),
        (lambda: ddp.PowerSGDState(**low_rank), ddp.batched_power_sgd_hook),
    ]
    for make, hook in cases:
        gradients, states = [], []
        for skips in (True, False):
            model = DistributedDataParallel(
                Idle(), find_unused_parameters=True, skip_all_reduce_unused_params=skips
            )
            states.append(make())
            model.register_comm_hook(states[-1], hook)
            found, lines = [], Lines()
            power_sgd_state._log.addHandler(lines)
            power_sgd_state._log.setLevel(logging.INFO)
            for step in range(9):
                model.zero_grad()
                model(images(RANK, step)).square().sum().backward()
                found.append(gradients_of(model.module.inner))
                assert states[-1].steps == step + 1, (hook, skips)
            power_sgd_state._log.removeHandler(lines)
            gradients.append(found)
            logs = RANK == 0 and isinstance(states[-1], ddp.PowerSGDState)
            assert (len(lines.lines) > 2) == logs, (hook, skips, lines.lines)
        for step, (got, want) in enumerate(zip(*gradients, strict=True)):
            same(got, want, (hook, step))
        if getattr(states[0], "adaptive", None):
            assert "inner.first.weight" in states[0].adaptive.names, "nothing was measured"


def planned_hook_refuses_skipped_buckets() -> None:
    names = [(name, p.numel()) for name, p in Idle().named_parameters()]
    plan = Plan(
        tuple(name for name, _ in names), tuple(numel for _, numel in names), (4,) * len(names),
        tuple((i,) for i in reversed(range(len(names)))),
    )  # fmt: skip
    model = DistributedDataParallel(
        Idle(), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    model.register_comm_hook(ddp.PlannedAllreduceState(plan), ddp.planned_allreduce_hook)
    fails(
        InvalidArgument,
        "skip_all_reduce_unused_params=True",
        lambda: model(images(RANK)).square().sum().backward(),
    )


CHECKS = [unused_layer_state_is_unchanged, skipped_buckets_end_steps]
CHECKS += [planned_hook_refuses_skipped_buckets]
