"""Rank program: run a guide's Python blocks that use cgx_ops, each in a separate namespace.

Usage: run_guide.py PAGE FOLDER. _readers_program() replaces the reader's own program.
"""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.pages import python_blocks
from torch import nn

import cgx_ops.torch


def blocks_of(page: Path) -> list[str]:
    """Return the Python blocks of a page that import cgx_ops."""
    blocks = python_blocks(page.read_text())
    return [block for block in blocks if re.search(r"^(import|from) cgx_ops", block, re.MULTILINE)]


def _loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _train(model: nn.Module, batches: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        _loss_of(model, batch).backward()
        optimizer.step()


def _readers_program(folder: Path) -> dict[str, Any]:
    """Return the names that guides use without defining them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batches = [(torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(8)]
    names = {"model": model, "batches": batches, "loss_of": _loss_of, "train": _train}
    return names | {"steps_per_epoch": 2, "folder": str(folder)}


def main(page: Path, folder: Path) -> None:
    for number, block in enumerate(blocks_of(page)):
        names = _readers_program(folder)
        try:
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
            trained, optimizer = names["model"], names.get("optimizer")
            if isinstance(trained, nn.Module) and dist.is_initialized():
                is_torchs = isinstance(optimizer, torch.optim.Optimizer)
                _train(trained, names["batches"], optimizer if is_torchs else None)
        except Exception:
            print(f"block {number} failed:\n{block}")
            traceback.print_exc()
            raise SystemExit(1) from None
        cgx_ops.torch.forget_models()
        if dist.is_initialized():
            dist.destroy_process_group()
        print(f"ok block {number}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
