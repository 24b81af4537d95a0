"""Arrival times of gradients, recorded by hooks: their order, and models without any."""

import time
from typing import Any

import pytest
import torch
from support.launch import threads
from torch import nn

from cgx_ops import Communicator, InvalidArgument, Unsupported
from cgx_ops.planner import Costs, Plan
from cgx_ops.torch.ddp.arrivals import Arrivals


class _Pause(torch.autograd.Function):
    """Delay the backward pass by 20 ms."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.02)
        return gradient


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False)
        self.spare = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        y = self.second(_Pause.apply(self.first(x)))
        return _Pause.apply(self.spare(y) if spare else y)


def _step(model: nn.Module, **options: Any) -> None:
    model(torch.ones(2, 3), **options).sum().backward()


def test_arrivals_are_seconds_from_the_start_of_each_backward_pass() -> None:
    def run(rank: int, communicator: Communicator) -> Plan:
        model = _Slow()
        with Arrivals(model) as arrivals:
            for _ in range(5):
                _step(model)
                time.sleep(0.01 * rank)  # between steps, so not part of them
        _step(model, spare=False)  # not recorded any more
        assert arrivals.numels == {"first.weight": 12, "second.weight": 20, "spare.weight": 25}
        first, second, spare = ready = arrivals.ready(communicator)
        assert 0.02 <= spare <= second <= first - 0.02
        return Plan.of(arrivals.numels, ready, Costs(link_fixed=0.01))

    plans = threads(2, run, timeout=30)
    assert plans[0] == plans[1]
    assert plans[0].order == [2, 1, 0]


def test_only_frozen_parameters_may_go_without_gradients() -> None:
    alone = Communicator.local(1)[0]
    model = _Slow()
    arrivals = Arrivals(model)
    for _ in range(4):
        _step(model, spare=False)
    with pytest.raises(InvalidArgument, match=r"'spare.weight' got no gradient .*requires_grad_"):
        arrivals.ready(alone)
    with pytest.raises(InvalidArgument, match=r"4 backward passes were recorded, and the first 4"):
        arrivals.ready(alone, warmup=4)
    arrivals.close()
    model.spare.requires_grad_(False)
    with Arrivals(model) as arrivals:
        _step(model, spare=False)
    assert len(arrivals.ready(alone, warmup=0)) == 2


def test_meta_parameters_raise() -> None:
    with pytest.raises(InvalidArgument, match="no parameter"):
        Arrivals(nn.ReLU())
    with pytest.raises(Unsupported, match="'weight' is on meta, where hooks run before"):
        Arrivals(nn.Linear(2, 2, device="meta"))
