"""FSDP2 models with the settings that sharded_steps.py and sharded_training.py compare."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cgx_ops import Config
from cgx_ops.config import Algorithm
from cgx_ops.torch import fsdp

HSDP = "HSDP"  # names of settings that shard within hosts only begin with it
RANK = 4  # of PowerSGD


def _few(algorithm: Algorithm) -> Config:
    return Config(4, algorithm=algorithm)


def _quantized(model: nn.Module, algorithm: Algorithm) -> None:
    weights = replace(fsdp.WEIGHTS, algorithm=algorithm)
    fsdp.compress(model, _few(algorithm), weights)


def _differences(model: nn.Module) -> None:
    config = replace(fsdp.Differences().config, algorithm="hierarchical")
    fsdp.compress(model, _few("hierarchical"), fsdp.Differences(config))


def _low_rank(model: nn.Module, replicas: Any) -> None:
    fsdp.compress(model, None, replicas=replicas, replica_gradients=fsdp.PowerSGD(RANK))


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and compressed.

    Attributes:
        name: shown in tables.
        compress: called with the wrapped model, and with the mesh of replicas or None.
    """

    name: str
    compress: Callable[[nn.Module, Any], object]


SETTINGS = [
    Setting("exact", lambda model, _: None),
    Setting("weights 8 bits, gradients 4, flat", lambda model, _: _quantized(model, "sra")),
    Setting("the same, hierarchical", lambda model, _: _quantized(model, "hierarchical")),
    Setting("differences 4 bits, gradients 4", lambda model, _: _differences(model)),
    Setting(f"{HSDP}, exact", lambda model, mesh: fsdp.compress(model, None, replicas=mesh,
                                                               replica_gradients=None)),
    Setting(f"{HSDP}, PowerSGD of rank {RANK}", _low_rank),
]  # fmt: skip


def sharded(build: Callable[[], Any], setting: Setting, hosts: int, seed: int = 0) -> Any:
    """Return a model of which each layer and the root are wrapped, with equal weights."""
    torch.manual_seed(seed)
    model, ranks = build(), dist.get_world_size()
    mesh = replicas = None
    if setting.name.startswith(HSDP):
        names = ("replicate", "shard")
        both = init_device_mesh("cpu", (hosts, ranks // hosts), mesh_dim_names=names)
        mesh, replicas = both["shard"], both["replicate"]
    for layer in model.layers.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    setting.compress(model, replicas)
    return model
