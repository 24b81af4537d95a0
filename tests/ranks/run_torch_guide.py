"""Rank program: run each Python block of pages of docs/guides/torch/ in a new process group.

Usage: run_torch_guide.py PAGE ... If a block fails, the rest of the page is skipped.
_readers_program() has the names that blocks use without defining them. Blocks that begin with
```{code-block} are fragments, and are not run.
"""

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.pages import python_blocks
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config, Rules
from cgx_ops.torch import ddp, fsdp


class _Net(nn.Sequential):
    @property
    def blocks(self) -> list[nn.Module]:
        return [self[0]]


def _readers_program(block: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net, x = _Net(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(8, 64)
    has_loop = "for batch in batches" in block
    is_plain = has_loop or "fully_shard(model)" in block or "DistributedDataParallel(" in block
    model = net if is_plain else DistributedDataParallel(net)
    return {
        "torch": torch, "dist": dist, "cgx_ops": cgx_ops, "Config": Config, "Rules": Rules,
        "ddp": ddp, "fsdp": fsdp, "module": net, "model": model, "x": x, "xs": [x],
        "e": torch.zeros_like(x), "rank": dist.get_rank(), "steps_per_epoch": 10,
        "subgroup": None, "mesh": {"data": dist.group.WORLD}, "batch": torch.ones(64, 64),
        "tokens": torch.ones(4, 64), "sent": [2, 2], "received": [2, 2],
        "weights": {"head": torch.ones(8, 8, requires_grad=True)},
        "train_step": lambda x: collectives.all_reduce(x, "avg", dist.group.WORLD) + 1,  # pyright: ignore[reportArgumentType]
        "state": ddp.QuantizedAllreduceState(), "batches": [x] * 3, "folder": "checkpoint",
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "optimizer_state": {},
        "loss": (lambda model, batch: model(batch).sum()) if has_loop else model(x).sum(),
    }  # fmt: skip


def _succeeds(block: str, title: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(block, title, "exec"), names)
    except Exception:
        print(f"{title} failed:\n{block}")
        traceback.print_exc()
        return False
    return True


def run(page: Path) -> None:
    for number, block in enumerate(python_blocks(page.read_text())):
        dist.init_process_group("cgx")
        names = _readers_program(block)
        if "init_process_group" in block:
            dist.destroy_process_group()
        succeeded = _succeeds(block, f"{page.name}, block {number}", names)
        cgx_ops.torch.forget_models()
        dist.destroy_process_group()
        if not succeeded:
            return
        print(f"ok {page.stem} {number}", flush=True)


if __name__ == "__main__":
    for page in sys.argv[1:]:
        run(Path(page))
