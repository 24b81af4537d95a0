"""Let ranks that share a GPU gather its tensors: gloo would read their memory on the host.

NCCL refuses such ranks. install() replaces the two forms of all_gather that `carrier="c10d"` uses.
Gloo has the other collectives for CUDA tensors.
"""

from typing import Any

import torch
import torch.distributed as dist

_functional: Any = torch.ops._c10d_functional
_Group: Any = dist.ProcessGroup
_gather_base = _Group._allgather_base


def _gather(x: torch.Tensor, size: int, group_name: Any) -> torch.Tensor:
    on_host = _functional.all_gather_into_tensor(x.cpu(), size, group_name)
    return _functional.wait_tensor(on_host).to(x.device)


def _gather_into(group: Any, output: torch.Tensor, x: torch.Tensor, *options: Any) -> Any:
    if x.device.type == "cpu":
        return _gather_base(group, output, x, *options)
    on_host = torch.empty_like(output, device="cpu")
    work = _gather_base(group, on_host, x.cpu(), *options)
    work.wait()
    output.copy_(on_host)
    return work


_library = torch.library.Library("_c10d_functional", "IMPL")


def install() -> None:
    _library.impl("all_gather_into_tensor", _gather, "CUDA")
    _Group._allgather_base = _gather_into
