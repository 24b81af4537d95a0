"""Averages have the same bits for every default dtype, default device and autocast setting.

1. all methods, each as a model and a function that makes a step
2. the default dtype and device; autocast around backward() and the step
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from ambient_settings import DEFAULTS, Setting, around_backward, autocast
from support import torch_cases as tc
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, batch, identical_on_all_ranks, loss_of, network, weights_of

from cgx_ops import Config
from cgx_ops.planner import Plan
from cgx_ops.torch import ddp
from cgx_ops.torch.averaging import QuantizedModelAverager
from cgx_ops.torch.diloco import DiLoCo, sparse_loco
from cgx_ops.torch.optim import CompressedAdamW, Signum

STEPS = 5
LEVELS = Config(bits=1, compressor="levels", bucket_size=64, residual_decay=0.9)
Training = tuple[nn.Module, Callable[[], object]]

# ---- 1. methods ----------------------------------------------------------------------------------


def by_hook(state: Any, hook: Any, **wrapper: Any) -> Training:
    model = DistributedDataParallel(network(), **wrapper)
    model.register_comm_hook(state, hook)
    return model, torch.optim.SGD(model.parameters(), 0.05).step


def power_sgd(hook: Any = ddp.power_sgd_hook, **options: Any) -> Training:
    wrapper = {"find_unused_parameters": options.pop("find_unused_parameters", False)}
    options = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 2, **options}
    return by_hook(ddp.PowerSGDState(config=LEVELS, **options), hook, **wrapper)


def planned() -> Training:
    named = [(name, p.numel()) for name, p in network().named_parameters()]
    names, numels = zip(*reversed(named), strict=True)
    plan = Plan(names, numels, (4,) * len(names), groups=((0, 1, 2), (3, 4, 5)))
    return by_hook(ddp.PlannedAllreduceState(plan, config=LEVELS), ddp.planned_allreduce_hook)


class Products(torch.optim.Optimizer):
    """Outer optimizer that multiplies matrices, like Muon."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        with torch.no_grad():
            for p in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
                matrix = p.grad if p.dim() == 2 else p.grad[:, None]
                p -= (matrix @ (matrix.T @ matrix)).view(p.shape) * 0.1 + p.grad


def outer_loop(make: Callable[[nn.Module], DiLoCo]) -> Training:
    model = network()
    inner, loop = torch.optim.SGD(model.parameters(), 0.05), make(model)
    return model, lambda: (inner.step(), loop.step())


def averaged() -> Training:
    model = network()
    inner = torch.optim.SGD(model.parameters(), 0.05)
    averager = QuantizedModelAverager(2, config=LEVELS)
    return model, lambda: (inner.step(), averager.average_parameters(model.parameters()))


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> Training:
    model = network()
    return model, make(model.parameters()).step


def streaming(model: nn.Module) -> DiLoCo:
    return DiLoCo(
        model, Products, sync_every=4, fragments=2, fragment_sync_delay=1,
        fragment_update_alpha=0.5, config=LEVELS,
    )  # fmt: skip


def methods(gloo: dist.ProcessGroup) -> dict[str, Callable[[], Training]]:
    by_torch: dict[str, Any] = {"process_group": gloo, "carrier": "c10d"}
    quantized, sparse = ddp.quantized_allreduce_hook, ddp.deep_gradient_hook
    return {
        "quantized": lambda: by_hook(ddp.QuantizedAllreduceState(config=LEVELS), quantized),
        "quantized, c10d": lambda: by_hook(
            ddp.QuantizedAllreduceState(config=LEVELS, **by_torch), quantized, process_group=gloo
        ),
        "planned": planned,
        "power_sgd": power_sgd,
        "power_sgd, torch": lambda: power_sgd(feedback="torch", warm_start=False),
        "power_sgd, 8 bits": lambda: power_sgd(factor_bits=8, find_unused_parameters=True),
        "batched": lambda: power_sgd(ddp.batched_power_sgd_hook),
        "deep_gradient": lambda: by_hook(
            ddp.DeepGradientState(density=0.05, clip=2.0, nesterov=True), sparse
        ),
        "compressed_adamw": lambda: stepped(lambda p: CompressedAdamW(p, 0.01, warmup_steps=2)),
        "signum": lambda: stepped(Signum),
        "diloco": lambda: outer_loop(streaming),
        "sparse_loco": lambda: outer_loop(lambda m: sparse_loco(m, sync_every=2)),
        "averager": averaged,
    }


# ---- 2. contexts ---------------------------------------------------------------------------------


def trained(method: Callable[[], Training], forward: Setting, rest: Setting) -> torch.Tensor:
    """Return the weights after some steps, with forward passes and the rest in these contexts."""
    batches = [batch(RANK, step) for step in range(STEPS)]
    model, step = method()
    for x in batches:
        model.zero_grad()
        with rest():
            with forward():
                loss = loss_of(model, x)
            loss.backward()
            step()
    identical_on_all_ranks(weights_of(model)) if isinstance(model, DistributedDataParallel) else ()
    return weights_of(model)


def compare(forward: Setting, settings: Mapping[str, Setting]) -> None:
    gloo: Any = dist.new_group(backend="gloo")
    for name, method in methods(gloo).items():
        want = trained(method, forward, contextlib.nullcontext)
        assert want.isfinite().all()
        for what, rest in settings.items():
            assert torch.equal(trained(method, forward, rest), want), (name, what)


def defaults() -> None:
    compare(contextlib.nullcontext, DEFAULTS)


def in_autocast() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        compare(autocast(dtype), around_backward(dtype))


def operators() -> None:
    """Compare results, residuals and gradients, for both carriers."""
    rows = [batch(RANK, step) for step in range(2)]
    for carrier in ("native", "c10d"):

        def reduced(carrier: str = carrier) -> list[torch.Tensor]:
            torch.manual_seed(RANK)
            xs = [row.clone().requires_grad_() for row in rows]
            sums = tc.coalesced(xs, 2, op="avg", carrier=carrier)
            loss = torch.cat(sums).square().sum()
            gradients = torch.autograd.grad(loss, xs)
            residual = rows[1] * 0.5
            return [*sums, *gradients, *tc.feedback(rows[0], residual, 1, compressor="levels")]

        want = reduced()
        for what, setting in {**DEFAULTS, **around_backward(torch.bfloat16)}.items():
            with setting():
                got = reduced()
            assert all(map(tc.same_bits, got, want)), (carrier, what)


CHECKS = [defaults, in_autocast, operators]
