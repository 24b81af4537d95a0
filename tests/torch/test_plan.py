"""DistributedDataParallel's buckets are the groups of a plan."""

import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, InvalidArgument, Unsupported
from cgx_ops.planner import Costs, Plan
from cgx_ops.torch import ddp
from cgx_ops.torch._compat.parallel import GradBucket

needs_limits = pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="PyTorch before 2.13 has one limit for all buckets",
)
WIDTHS = (60, 700, 20, 300, 300, 40, 10, 500, 30)


@pytest.fixture
def alone() -> Iterator[None]:
    """Create a process group of this process only."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())])


def _plan(module: nn.Module) -> Plan:
    numels = {name: parameter.numel() for name, parameter in module.named_parameters()}
    ready = [0.01 * (len(numels) - i) for i in range(len(numels))]
    return Plan.of(numels, ready, Costs(link_fixed=0.03, link_per_byte=1e-6), margin=1)


@needs_limits
def test_buckets_are_groups(alone: None) -> None:
    module = _model()
    plan = _plan(module)
    assert len(plan.groups) > 3
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    model = DistributedDataParallel(module, **ddp.planned_buckets(plan, module))
    buckets: list[set[str]] = []

    def hook(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append({names[id(parameter)] for parameter in bucket.parameters()})
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    for _ in range(3):
        buckets.clear()
        model(torch.randn(4, WIDTHS[0])).sum().backward()
    assert buckets == [{plan.names[i] for i in group} for group in plan.groups]


@needs_limits
def test_plan_of_another_model_raises() -> None:
    module = _model()
    plan = _plan(module)
    module[2].requires_grad_(False)
    with pytest.raises(
        InvalidArgument, match=r"'2.weight' has None values here and 14000 in the plan"
    ):
        ddp.planned_buckets(plan, module)


@needs_limits
def test_several_dtypes_raise() -> None:
    module = _model()
    plan = _plan(module)
    module[0].half()
    with pytest.raises(Unsupported, match="several dtypes"):
        ddp.planned_buckets(plan, module)


def test_torch_without_limits_per_bucket_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cgx_ops.torch.ddp.plan._KEYWORD", "no_such_keyword")
    with pytest.raises(Unsupported, match=r"use PyTorch 2[.]13 or later"):
        ddp.planned_buckets(_plan(_model()), _model())


def test_a_state_is_saved_with_its_plan(tmp_path: Path) -> None:
    module = _model()
    state = ddp.PlannedAllreduceState(_plan(module), config=Config(bits=3))
    torch.save([state, ddp.planned_allreduce_hook], tmp_path / "state.pt")
    restored, hook = torch.load(tmp_path / "state.pt")  # weights_only
    assert hook is ddp.planned_allreduce_hook
    assert (restored.plan, restored.config) == (state.plan, state.config)
    other = ddp.PlannedAllreduceState(Plan((), (), (), ()))
    other.load_state_dict(restored.state_dict())
    assert other.plan == state.plan


def test_state_requires_a_plan() -> None:
    with pytest.raises(
        InvalidArgument, match=r"plan is Config.*; it must be a cgx_ops.planner.Plan"
    ):
        ddp.PlannedAllreduceState(Config())  # pyright: ignore[reportArgumentType]
