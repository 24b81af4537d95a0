"""Values in all uses of DistributedDataParallel, for one step and for several.

1. one step
2. several steps, and a saved state
"""

import copy
import io
import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from shared_folder import folder_of_all
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Rules
from cgx_ops.torch import compressed, ddp, uncompressed

from .common import (
    NEAREST,
    RANK,
    SIZE,
    averaged,
    compressing_group,
    gradients_of,
    hooked,
    identical_on_all_ranks,
    images,
    local_gradients,
    network,
    same,
)

# ---- one step ------------------------------------------------------------------------------------


def equals_the_oracle() -> None:
    """Compare all options of DistributedDataParallel, before and after it rebuilds its buckets."""
    modes: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 0.001, "static_graph": True, "gradient_as_bucket_view": True},
    ]
    stochastic = Config(bits=2, bucket_size=100, rounding="stochastic")
    for mode in modes:
        for config in (NEAREST, stochastic):
            unused = "find_unused_parameters" in mode
            model, state = hooked(network(), config, **mode)
            for step in range(3):
                model.zero_grad()
                spare = not unused or step == 1
                model(images(RANK, step), spare=spare).square().sum().backward()
                alone = [local_gradients(r, (step,), spare=spare) for r in range(SIZE)]
                got = gradients_of(model)
                if not spare:
                    for name in ("spare.weight", "spare.bias"):
                        got.pop(name, None)
                same(got, averaged(alone, config, step), (mode, step))
            assert state.steps == 3


def carried_by_torch() -> None:
    """Check that carrier="c10d" gives the same bits over gloo."""
    gloo = dist.new_group(backend="gloo")
    model, _ = hooked(network(), carrier="c10d", process_group=gloo, bucket_cap_mb=0.001)
    for step in range(2):
        model.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        alone = [local_gradients(r, (step,), spare=True) for r in range(SIZE)]
        same(gradients_of(model), averaged(alone, step=step))


def each_layer_in_its_own_bits() -> None:
    rules = Rules([(r"bn\.bias", 8), ("last", 32), ("first", {}), (r"\.weight$", 2)])
    model, _ = hooked(network(), rules=rules)
    model(images(RANK), spare=True).square().sum().backward()
    table = {"first.weight": 2, "spare.weight": 2, "bn.bias": 8, "bn.weight": 2}
    want = averaged(
        [local_gradients(r, spare=True) for r in range(SIZE)],
        bits=lambda name, _: table.get(name, 32),
    )
    same(gradients_of(model), want)


def config_from_block() -> None:
    """Use a config block around backward; it applies to small and large messages."""
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    model, _ = hooked(network(), Config(bits=8))
    for block, want in (
        (compressed(NEAREST), averaged(alone)),
        (uncompressed(), averaged(alone, bits=lambda *_: 32)),
    ):
        model.zero_grad()
        with block:
            model(images(RANK), spare=True).square().sum().backward()
        same(gradients_of(model), want)


def accumulates() -> None:
    """Check that no_sync() accumulates locally, and the next backward averages the sum."""
    model, state = hooked(network())
    with model.no_sync():
        model(images(RANK, 0), spare=True).square().sum().backward()
    same(gradients_of(model), local_gradients(RANK, (0,), spare=True))
    model(images(RANK, 1), spare=True).square().sum().backward()
    same(
        gradients_of(model), averaged([local_gradients(r, (0, 1), spare=True) for r in range(SIZE)])
    )
    assert state.steps == 1


def inside_torchs_wrappers() -> None:
    for wrapper, dtype in (
        (default_hooks.fp16_compress_wrapper, torch.float16),
        (default_hooks.bf16_compress_wrapper, torch.bfloat16),
    ):
        inner = wrapper(ddp.quantized_allreduce_hook)

        # Without a GPU torch rejects the bfloat16 wrapper because of its function's name.
        def hook(
            state: Any, bucket: GradBucket, inner: Any = inner
        ) -> torch.futures.Future[torch.Tensor]:
            return inner(state, bucket)

        model, _ = hooked(network(), hook=hook)
        model(images(RANK), spare=True).square().sum().backward()
        alone = [local_gradients(r, spare=True) for r in range(SIZE)]
        narrow = averaged([{k: v.to(dtype) for k, v in g.items()} for g in alone])
        same(gradients_of(model), {k: v.float() for k, v in narrow.items()}, dtype)


def dtype_change_raises() -> None:
    """Check that a dtype change raises; torch would silently stop averaging."""
    automatic = DistributedDataParallel(network(), process_group=compressing_group())
    for model in (hooked(network())[0], automatic):
        model(images(RANK), spare=True).square().sum().backward()
        model.module.bfloat16()
        fails(
            TypeError,
            "'first.weight' is torch.bfloat16, but was torch.float32",
            lambda model=model: model(images(RANK, dtype=torch.bfloat16)),
        )
        other, _ = hooked(model.module)
        other.zero_grad()
        other(images(RANK, dtype=torch.bfloat16), spare=True).float().square().sum().backward()
        alone = [local_gradients(r, dtype=torch.bfloat16, spare=True) for r in range(SIZE)]
        same(gradients_of(other), averaged(alone))


class Mixed(nn.Module):
    """Model with parameters of two dtypes, frozen ones, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.after = nn.Linear(20, 20), nn.Linear(20, 20)
        self.narrow = nn.Linear(20, 20).bfloat16()
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.wide(x).bfloat16()).float()
        return self.frozen(self.after(x)) + self.empty.sum()


def layers_of_all_kinds() -> None:
    model, _ = hooked(Mixed())
    alone = []
    for rank in range(SIZE):
        module = Mixed()
        module(images(rank)).square().sum().backward()
        alone.append(gradients_of(module))
    model(images(RANK)).square().sum().backward()
    got = gradients_of(model)
    assert got.pop("empty").shape == (0, 4)
    for gradients in alone:
        del gradients["empty"]
    same(got, averaged(alone))


def small_layers_are_exact() -> None:
    config = replace(NEAREST, minimal_size=900)
    model, _ = hooked(network(), config)
    model(images(RANK), spare=True).square().sum().backward()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    want = averaged(alone, config, bits=lambda name, _: 4 if name == "spare.weight" else 32)
    same(gradients_of(model), want)


def over_gloo_under_mpirun() -> None:
    """Use the native carrier on a group of another backend that has the world's ranks."""
    model, _ = hooked(network(), process_group=dist.new_group(backend="gloo"))
    model(images(RANK), spare=True).square().sum().backward()
    same(gradients_of(model), averaged([local_gradients(r, spare=True) for r in range(SIZE)]))


def uneven_inputs() -> None:
    """Check that ranks without data contribute zeros."""
    model, state = hooked(network())
    with model.join():
        for step in range(1 + RANK):
            model.zero_grad()
            model(images(RANK, step), spare=True).square().sum().backward()
    assert state.steps == SIZE
    last = local_gradients(SIZE - 1, (SIZE - 1,), spare=True)
    zeros = {name: torch.zeros_like(g) for name, g in last.items()}
    if RANK == SIZE - 1:
        alone = [zeros] * (SIZE - 1) + [last]
        # Torch's own hook divides by the number of ranks that still have data; a user's hook, such
        # as this one, divides by all ranks.
        same(gradients_of(model), averaged(alone, step=SIZE - 1))


def large_layer_before_small_ones() -> None:
    """Check one bucket whose first layer exceeds 64 MB: CGX dropped the layers after it."""
    torch.manual_seed(0)
    module = nn.ParameterDict(
        {"large": torch.zeros(17 << 20), "after": torch.zeros(30, 30), "last": torch.zeros(7)}
    )
    numel = {name: p.numel() for name, p in module.items()}

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, scale: float) -> torch.Tensor:
            return sum((p * scale).sum() for p in self.inner.values())  # type: ignore[return-value]

    rules = Rules([("large", 1)])
    model, _ = hooked(Sum(), rules=rules, bucket_cap_mb=200)
    model(float(RANK + 1)).backward()
    mean = sum(range(1, SIZE + 1)) / SIZE
    for name, p in module.items():
        assert p.grad is not None
        # A constant bucket is exact for any number of bits.
        assert (p.grad == torch.tensor(mean)).all(), name
        assert p.numel() == numel[name]


def nonfinite_values_propagate() -> None:
    model, _ = hooked(network())
    x = images(RANK)
    if RANK == SIZE - 1:
        x[0, 0] = float("inf")
    model(x, spare=True).square().sum().backward()
    assert not gradients_of(model)["first.weight"].isfinite().all()
    identical_on_all_ranks({k: v.nan_to_num() for k, v in gradients_of(model).items()})


# ---- several steps -------------------------------------------------------------------------------


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        optimizer.step()


def resumes_bitwise_equal() -> None:
    """Run PyTorch's end-to-end example with this hook and state in place of PowerSGD's."""
    config = Config(bits=3, bucket_size=64)
    modes: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 0.001}]
    for mode in modes:
        model, state = hooked(network(), config, **mode)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        train(model, range(4), optimizer)
        checkpoint = io.BytesIO()
        torch.save(
            {
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "comm_hook": ddp.quantized_allreduce_hook,
                "comm_hook_state": state,
            },
            checkpoint,
        )
        train(model, range(4, 8), optimizer)

        checkpoint.seek(0)
        loaded = torch.load(checkpoint)  # weights_only, torch's default
        again = DistributedDataParallel(network(), **mode)
        again.load_state_dict(loaded["state_dict"])
        restored = loaded["comm_hook_state"]
        assert restored.steps == 4
        again.register_comm_hook(restored, loaded["comm_hook"])
        resumed = torch.optim.SGD(again.parameters(), 1e-4, momentum=0.9)
        resumed.load_state_dict(loaded["optimizer"])
        train(again, range(4, 8), resumed)
        same(dict(again.module.named_parameters()), dict(model.module.named_parameters()), mode)
        identical_on_all_ranks(dict(model.module.named_parameters()))


class _AcceleratesProject:
    """Imitate Accelerate's register_for_checkpointing: it calls only these methods."""

    def __init__(self, state: Any) -> None:
        assert callable(state.state_dict) and callable(state.load_state_dict)
        self.state = state

    def save(self, folder: str) -> None:
        torch.save(self.state.state_dict(), f"{folder}/custom_checkpoint_0.pkl")

    def load(self, folder: str) -> None:
        self.state.load_state_dict(torch.load(f"{folder}/custom_checkpoint_0.pkl"))


def resumes_in_place() -> None:
    """Check that a registered hook continues from the checkpoint's step count."""
    config = Config(bits=3, bucket_size=64)

    def by_torch(state: Any, folder: str, save: bool) -> None:
        project = _AcceleratesProject(state)
        (project.save if save else project.load)(folder)

    def by_dcp(state: Any, folder: str, save: bool) -> None:
        (dcp_save if save else dcp_load)({"cgx": state}, checkpoint_id=f"{folder}/dcp")

    for checkpoint in (by_torch, by_dcp):
        with folder_of_all() as of_all:
            folder = of_all if checkpoint is by_dcp else tempfile.mkdtemp(dir=of_all)
            model, state = hooked(network(), config, seed=5)
            optimizer = torch.optim.SGD(model.parameters(), 1e-4)
            train(model, range(4), optimizer)
            weights = copy.deepcopy(model.module.state_dict())
            checkpoint(state, folder, save=True)
            train(model, range(4, 7), optimizer)

            again, restored = hooked(network(), Config(bits=4), seed=6)
            train(again, range(1), torch.optim.SGD(again.parameters(), 1e-4))  # the hook is in use
            again.module.load_state_dict(weights)
            checkpoint(restored, folder, save=False)
            assert (restored.steps, restored.config, restored.seed) == (4, state.config, 5)
            train(again, range(4, 7), torch.optim.SGD(again.parameters(), 1e-4))
            same(dict(again.module.named_parameters()), dict(model.module.named_parameters()))
    fails(ValueError, "pass what state_dict() returned", lambda: state.load_state_dict({"a": 1}))


def two_models() -> None:
    """Interleave the buckets of two models, a generator and a critic."""
    one, _ = hooked(network())
    two, _ = hooked(network())
    (
        one(images(RANK, 0), spare=True).square().sum()
        + two(images(RANK, 1), spare=True).square().sum()
    ).backward()
    for model, step in ((one, 0), (two, 1)):
        same(
            gradients_of(model),
            averaged([local_gradients(r, (step,), spare=True) for r in range(SIZE)]),
        )


CHECKS = [equals_the_oracle, carried_by_torch, each_layer_in_its_own_bits, config_from_block]
CHECKS += [accumulates]
CHECKS += [inside_torchs_wrappers, dtype_change_raises, large_layer_before_small_ones]
CHECKS += [layers_of_all_kinds, small_layers_are_exact, over_gloo_under_mpirun, uneven_inputs]
CHECKS += [nonfinite_values_propagate, resumes_bitwise_equal, resumes_in_place, two_models]
