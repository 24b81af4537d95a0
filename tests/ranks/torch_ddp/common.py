"""Helpers of the DistributedDataParallel checks: models, the oracle, comparisons."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops._core.call import call_seed
from cgx_ops.torch import ddp

# The ranks of mpirun, which are known before torch's.
RANK, SIZE = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
NEAREST = Config(bits=4, bucket_size=64, rounding="nearest", error_feedback=False)
Hooked = tuple[DistributedDataParallel, ddp.QuantizedAllreduceState]


class Net(nn.Module):
    """Model with matrices and vectors of several sizes, and an optional layer (spare)."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.bn = nn.LayerNorm(width)
        self.spare = nn.Linear(width, width)
        self.last = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.bn(self.first(x)).relu()
        return self.last(self.spare(x) if spare else x)


def network(width: int = 40, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(width).to(dtype)


def images(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tc.values(rank, 8 * 20, dtype, call=step).reshape(8, 20)


def hooked(module: nn.Module, config: Config = NEAREST, hook: Any = None, **options: Any) -> Hooked:
    own = {k: options.pop(k) for k in ("rules", "carrier", "process_group", "seed") if k in options}
    model = DistributedDataParallel(module, **options)
    state = ddp.QuantizedAllreduceState(own.pop("process_group", None), config, **own)
    model.register_comm_hook(state, hook or ddp.quantized_allreduce_hook)
    return model, state


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = getattr(model, "module", model).named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def local_gradients(
    rank: int, steps: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, torch.Tensor]:
    """Return the gradients that rank `rank` would compute alone; every rank can compute them."""
    module = network(dtype=dtype)
    for step in steps:
        module(images(rank, step, dtype), **options).float().square().sum().backward()
    return gradients_of(module)


def averaged(
    gradients: list[dict[str, torch.Tensor]],
    config: Config = NEAREST,
    step: int = 0,
    bits: Callable[[str, torch.Tensor], int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the oracle's average of the ranks' gradients, layer by layer."""
    world = dist.group.WORLD
    assert world is not None
    group_name = world.group_name
    result = {}
    for name, first in gradients[0].items():
        own = bits(name, first) if bits else config.bits if first.dim() > 1 else 32
        result[name] = tc.expected(
            [g[name] for g in gradients],
            own,
            config.bucket_size,
            op="avg",
            rounding=config.rounding,
            seeds=[call_seed(0, f"ddp/{name}", step, group_name)] * SIZE,
        )
    return result


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, value in want.items():
        assert tc.same_bits(got[name], value), (what, name)


def compressing_group() -> Any:
    """Return a group over the backend that gives DistributedDataParallel the hook."""
    options = cgx_ops.torch.BackendOptions(config=NEAREST)
    return dist.new_group(backend="cgx", pg_options=options)


def identical_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([t.detach().float().flatten() for t in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(SIZE)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone)
