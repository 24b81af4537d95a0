"""Rank program: quantization errors that may add up are independent.

Compares groups, tensors and layers, on four ranks in two groups of two. Every rank has the same
values and the same seed, so that shared noise is visible.
"""

import datetime
from typing import Any

import checks
import numpy as np
import torch
import torch.distributed as dist
from support import torch_cases as tc
from support.noise_cases import Errors, check_independent, errors, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.torch import ddp

dist.init_process_group("cgx", timeout=datetime.timedelta(seconds=60))
RANK = dist.get_rank()
SRA = Config(algorithm="sra")
OPTIONS = cgx_ops.torch.BackendOptions(SRA, compress="all", seed=5)
groups: list[Any] = [
    [dist.new_group(ranks, pg_options=OPTIONS) for ranks in ([0, 1], [2, 3])][RANK // 2]
    for _ in range(2)
]
PAIR, SAME = groups
X = torch.from_numpy(values())


def by_operator(**options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    return tc.allreduce(X, config=tc.SRA, group_name=PAIR.group_name, **options)


def by_backend(group: dist.ProcessGroup = PAIR) -> torch.Tensor:
    x = X.clone()
    dist.all_reduce(x, group=group)
    return x


class Layers(nn.Module):
    """Model with two layers whose gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(256, 256)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.first + self.second) * x).sum()


def gradients(carrier: Any) -> list[torch.Tensor]:
    """Return both layers' averages over all ranks, each from a separate bucket."""
    model = DistributedDataParallel(Layers(), bucket_cap_mb=1)
    state = ddp.QuantizedAllreduceState(None, SRA, carrier=carrier)
    model.register_comm_hook(state, ddp.quantized_allreduce_hook)
    model(X.reshape(256, 256)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def of_both_groups(result: torch.Tensor) -> list[Errors]:
    mine = torch.from_numpy(errors(result, 2 * X.numpy().astype(np.float64)))
    all_of_them = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(all_of_them, mine)
    return [each.numpy() for each in all_of_them[::2]]


def between_groups() -> None:
    carried = by_operator(carrier="c10d")
    assert tc.same_bits(carried, by_operator())
    for result in (by_operator(), carried, by_backend()):
        check_independent(*of_both_groups(result))


def between_groups_of_the_same_ranks() -> None:
    """Both groups take their seed from its options."""
    check_independent(*(errors(by_backend(group), 2 * X) for group in (SAME, PAIR)))


def between_tensors() -> None:
    for options in ({}, {"carrier": "c10d"}):
        torch.manual_seed(0)
        pair = tc.coalesced([X, X], config=tc.SRA, **options)
        check_independent(*(errors(y, 4 * X) for y in pair))


def between_layers() -> None:
    native, by_gloo = gradients("native"), gradients("c10d")
    assert all(tc.same_bits(a, b) for a, b in zip(native, by_gloo, strict=True))
    check_independent(*(errors(y.reshape(-1), X) for y in native))


checks.run(
    checks.named(between_groups, between_groups_of_the_same_ranks, between_tensors, between_layers)
)
dist.barrier()
dist.destroy_process_group()
