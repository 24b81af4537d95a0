"""Print the per-layer settings that DDP and FSDP2 pass to the core under one rule set.

Runs on two ranks. Rank 0 prints one line of JSON for each wrapper.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from support import rules_cases as cases
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops.torch import ddp, fsdp
from cgx_ops.torch.averaging import state as averaging_state
from cgx_ops.torch.fsdp import hooks

dist.init_process_group("cgx")
SIZE = dist.get_world_size()


class Model(nn.Module):
    """Model whose parameters have the names and shapes of the cases."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in cases.SHAPES.items():
            *parents, leaf = name.split(".")
            at: nn.Module = self
            for part in parents:
                if not hasattr(at, part):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(torch.ones(shape)))

    def forward(self) -> torch.Tensor:
        """Return a loss that depends on every parameter."""
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


def sent(module: Any, call: nn.Module, shards: int) -> dict[str, Any]:
    """Return the settings that a backward pass hands to `module.start`, by layer."""
    found: dict[str, Any] = {}
    original = module.start

    def start(comm: Any, verb: str, *tensors: Any, **options: Any) -> Any:
        config = next(x for x in tensors if isinstance(x, cgx_ops.Config))
        for segment in options["segments"]:
            name = cases.name_of(segment.numel * shards)
            found[name] = cases.settings_of(segment.config or config)
        return original(comm, verb, *tensors, **options)

    module.start = start
    try:
        call().backward()
    finally:
        module.start = original
    return found


replicated = DistributedDataParallel(Model())
state = ddp.QuantizedAllreduceState(config=cases.CONFIG, rules=cases.RULES)
replicated.register_comm_hook(state, ddp.quantized_allreduce_hook)  # type: ignore[arg-type]
by_ddp = sent(averaging_state, replicated, 1)

sharded = Model()
fully_shard(sharded)
fsdp.compress(sharded, cases.CONFIG, rules=cases.RULES)
by_fsdp = sent(hooks, sharded, SIZE)

if dist.get_rank() == 0:
    print(json.dumps(by_ddp))
    print(json.dumps(by_fsdp))
dist.destroy_process_group()
