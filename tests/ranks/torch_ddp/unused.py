"""Layers that a step does not use: their state is preserved and no bytes are sent for them."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config
from cgx_ops.planner import Plan
from cgx_ops.torch import ddp

from .common import RANK, SIZE, Net, identical_on_all_ranks, images, network, same

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


CHECKS = [unused_layer_state_is_unchanged]
