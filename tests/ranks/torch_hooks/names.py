"""States are stored by layer names without wrappers, and belong to one model.

1. names: torch's wrappers do not change them
2. states of other models raise, or are dropped on request
3. optimizers: torch's get_state_dict() does not silently drop their state
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from failing import fails
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, batch

from cgx_ops import Config, InvalidArgument
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch import ddp, fsdp
from cgx_ops.torch.averaging import layers
from cgx_ops.torch.diloco import DiLoCo
from cgx_ops.torch.optim import CompressedAdamW, Signum

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)
NAMES = ["first.weight", "first.bias", "module.weight", "module.bias", "last.weight", "last.bias"]


class Model(nn.Module):
    """Model with three layers, one of which is called "module" as in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.module, self.last = (
            nn.Linear(24, 24),
            nn.Linear(24, 24),
            nn.Linear(24, 8),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.module(torch.tanh(self.first(x)))))


def compiled(layer: nn.Module) -> Any:
    return torch.compile(layer, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda layer: layer,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
    "both": lambda layer: compiled(checkpoint_wrapper(layer)),
    "both, the other way": lambda layer: checkpoint_wrapper(compiled(layer)),
}


def wrapped(how: str) -> Model:
    model = Model()
    model.first = WRAPPERS[how](model.first)
    return model


def steps(call: Any, model: nn.Module, steps: range) -> torch.Tensor:
    """Train and return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in steps:
        optimizer.zero_grad()
        call(batch(RANK, step)).square().mean().backward()
        optimizer.step()
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


# ---- 1. names ------------------------------------------------------------------------------------


def names_without_wrappers() -> None:
    for how in WRAPPERS:
        model = wrapped(how)
        assert [name for name, _ in layers.named_layers(model)] == NAMES, how
        holder = nn.ModuleDict({"net": DistributedDataParallel(model)})
        held = [name for name, _ in layers.named_layers(holder)]
        assert held == [f"net.{name}" for name in NAMES], (how, held)
        outside = checkpoint_wrapper(DistributedDataParallel(wrapped(how)))
        assert [name for name, _ in layers.named_layers(outside)] == NAMES, how


def names_under_fsdp1() -> None:
    """Wrap in FullyShardedDataParallel with original parameters, nested and checkpointed."""
    model: Any = Model()
    model.first = FullyShardedDataParallel(
        checkpoint_wrapper(model.first), use_orig_params=True, device_id=torch.device("cpu")
    )
    whole = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    assert [name for name, _ in layers.named_layers(whole)] == NAMES
    assert [name for name, _ in layers.named_layers(compiled(whole))] == NAMES


def hook(kind: str) -> tuple[Any, Any]:
    if kind == "quantized":
        return ddp.QuantizedAllreduceState(config=LEVELS), ddp.quantized_allreduce_hook
    if kind == "PowerSGD":
        state = ddp.PowerSGDState(start_powerSGD_iter=2, min_compression_rate=0.5)
        return state, ddp.power_sgd_hook
    return ddp.DeepGradientState(density=0.05), ddp.deep_gradient_hook


def hooked(kind: str, model: nn.Module) -> tuple[Any, Any]:
    state, function = hook(kind)
    wrapper = DistributedDataParallel(model)
    wrapper.register_comm_hook(state, function)
    return wrapper, state


def resumed_under_wrappers() -> None:
    for kind in ("quantized", "PowerSGD", "DGC"):
        model = Model()
        wrapper, state = hooked(kind, model)
        steps(wrapper, model, range(3))
        saved, weights = state.state_dict(), model.state_dict()
        weights = {name: x.clone() for name, x in weights.items()}
        want = steps(wrapper, model, range(3, 6))
        for how in WRAPPERS:
            again = wrapped(how)
            with torch.no_grad():
                for p, x in zip(again.parameters(), weights.values(), strict=True):
                    p.copy_(x)
            wrapper, state = hooked(kind, again)
            state.load_state_dict(saved)
            assert torch.equal(steps(wrapper, again, range(3, 6)), want), (kind, how)


def fsdp_under_wrappers() -> None:
    found = {}
    for how in ("none", "checkpointed", "both"):
        model = wrapped(how)
        fully_shard(model.first)
        fully_shard(model)
        state = fsdp.compress(model, LEVELS)
        end = steps(model, model, range(3))
        assert state.residuals is not None
        found[how] = sorted(state.residuals.by_name.tensors), end
    assert found["none"][0] == ["", "first"]
    for how, (names, end) in found.items():
        assert names == found["none"][0], how
        assert torch.equal(end, found["none"][1]), how


def outer_parameters_under_wrappers() -> None:
    saved = DiLoCo(Model(), sync_every=2).state_dict()
    for how in WRAPPERS:
        DiLoCo(wrapped(how), sync_every=2).load_state_dict(saved)
        DiLoCo(DistributedDataParallel(wrapped(how)), sync_every=2).load_state_dict(saved)
    other = DiLoCo(nn.ModuleDict({"net": Model()}), sync_every=2)
    fails(InvalidArgument, "does not have: 'first.bias'", lambda: other.load_state_dict(saved))


# ---- 2. state of another model -------------------------------------------------------------------


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def another_models_state() -> None:
    for kind in ("quantized", "PowerSGD", "DGC"):
        model = Model()
        wrapper, state = hooked(kind, model)
        steps(wrapper, model, range(3))
        saved = state.state_dict()
        model = Held()
        wrapper, state = hooked(kind, model)
        state.load_state_dict(saved)
        loss = wrapper(batch(RANK, 3)).square().mean()
        fails(InvalidArgument, "strict=False to drop", loss.backward)
        assert not any(name.startswith("net.") for each in state.by_layer() for name in each), kind
        # torch's reducer is unusable after an error of its hook
        wrapper, state = hooked(kind, model)
        state.load_state_dict(saved, strict=False)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            steps(wrapper, model, range(3, 5))
        said = [str(w.message) for w in warned if "These entries were dropped" in str(w.message)]
        assert len(said) == 1, (kind, said)
        assert "'first.weight'" in said[0], said
        assert all(name.startswith("net.") for each in state.by_layer() for name in each), kind


def another_models_fsdp_state() -> None:
    model: Any = Model()
    fully_shard(model.first)
    fully_shard(model)
    state = fsdp.compress(model, LEVELS)
    steps(model, model, range(2))
    saved = state.state_dict()
    held: Any = Held()
    fully_shard(held.net.first)
    fully_shard(held)
    other = fsdp.compress(held, LEVELS)
    fails(InvalidArgument, "does not have: 'first.weight'", lambda: other.load_state_dict(saved))


def another_models_factors() -> None:
    """Load Q without error feedback, of layers and of whole buckets."""
    for function in (ddp.power_sgd_hook, ddp.batched_power_sgd_hook):

        def hooked_to(model: nn.Module, function: Any = function) -> tuple[Any, Any]:
            state = ddp.PowerSGDState(
                start_powerSGD_iter=2, min_compression_rate=0.5, use_error_feedback=False
            )
            wrapper = DistributedDataParallel(model)
            wrapper.register_comm_hook(state, function)
            return wrapper, state

        model = Model()
        wrapper, state = hooked_to(model)
        steps(wrapper, model, range(4))
        saved = state.state_dict()
        assert saved["factors"].q
        wrapper, state = hooked_to(Held())
        state.load_state_dict(saved)
        loss = wrapper(batch(RANK, 3)).square().mean()
        fails(InvalidArgument, "layers that this model does not have", loss.backward)
        again = Model()
        wrapper, state = hooked_to(again)
        state.load_state_dict(saved)
        steps(wrapper, again, range(4, 6))


def another_models_adaptive_bits() -> None:
    def hooked_to(model: nn.Module) -> tuple[Any, Any]:
        adaptive = AdaptiveBits(every=2, samples=1)
        state = ddp.QuantizedAllreduceState(config=Config(bits=4), adaptive=adaptive)
        wrapper = DistributedDataParallel(model)
        wrapper.register_comm_hook(state, ddp.quantized_allreduce_hook)
        return wrapper, state

    model = Model()
    wrapper, state = hooked_to(model)
    steps(wrapper, model, range(5))
    saved = state.state_dict()
    held = Held()
    wrapper, state = hooked_to(held)
    state.load_state_dict(saved)
    loss = wrapper(batch(RANK, 3)).square().mean()
    fails(InvalidArgument, "does not have: 'first.weight'", loss.backward)
    held = Held()
    wrapper, state = hooked_to(held)
    state.load_state_dict(saved, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps(wrapper, held, range(5, 7))
    assert all(name.startswith("net.") for name in state.adaptive.names), state.adaptive.names


def other_models_state_on_one_rank() -> None:
    """Check that the other ranks receive the reason, and DistributedDataParallel raises it."""
    for kind in ("quantized", "PowerSGD", "DGC"):
        model = Model()
        wrapper, state = hooked(kind, model)
        steps(wrapper, model, range(3))
        saved = state.state_dict()
        wrapper, state = hooked(kind, Held())
        if RANK == 0:
            state.load_state_dict(saved)
        loss = wrapper(batch(RANK, 3)).square().mean()
        fails(RuntimeError, "does not have: 'first.", loss.backward)
        dist.barrier()


def sharded(model: Any, *parts: Any) -> Any:
    for part in (*parts, model):
        fully_shard(part)
    return model


def residual_of_first(kept: dict[str, Any]) -> torch.Tensor:
    """Return the residual of the weight of "first", to which fully_shard is applied."""
    module = dict(kept["modules"])["first"]
    weight = next(p for p in module.parameters if p.name == "first.weight")
    rank = f"rank {RANK} of {dist.get_world_size()}"
    blocks = kept["residuals"][rank].tensors["first"].view(module.ranks, -1)
    return weight.cut_from(blocks).flatten()


def fsdp_state_of_other_modules() -> None:
    """Check that residuals follow their parameters, and those of another model raise."""
    model = sharded(Model())
    state = fsdp.compress(model, LEVELS)
    steps(model, model, range(2))
    saved = state.state_dict()
    other = fsdp.compress(sharded(Held()), LEVELS)
    fails(InvalidArgument, "does not have: 'first.", lambda: other.load_state_dict(saved))
    assert other.residuals is not None
    assert not other.residuals.by_name.tensors, "a failed load must change nothing"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other.load_state_dict(saved, strict=False)
    assert len(warned) == 1
    assert not other.residuals.by_name.tensors

    again = Model()
    again = sharded(again, again.first)
    state = fsdp.compress(again, LEVELS)
    state.load_state_dict(saved)
    assert state.residuals is not None
    steps(again, again, range(2, 4))  # the root, which has the residual, reduces last
    assert sorted(state.residuals.by_name.tensors) == ["", "first"]
    saved = state.state_dict()
    model = sharded(Model())
    state = fsdp.compress(model, LEVELS)
    owed = residual_of_first(saved["residuals"])
    state.load_state_dict(saved)
    assert state.residuals is not None
    assert torch.equal(state.residuals.by_name.tensors["first.weight"], owed)
    steps(model, model, range(4, 5))
    assert sorted(state.residuals.by_name.tensors) == [""]


# ---- 3. optimizers -------------------------------------------------------------------------------


def optimizers_in_get_state_dict() -> None:
    for make in (
        lambda p: CompressedAdamW(p, lr=1e-3, warmup_steps=2),
        lambda p: Signum(p, lr=1e-3),
    ):
        model = Model()
        optimizer = make(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            model(batch(RANK, step)).square().mean().backward()
            optimizer.step()
        words = "save optimizer.state_dict() on every rank instead"
        fails(InvalidArgument, words, lambda m=model, o=optimizer: get_state_dict(m, o))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        extra = {**saved, "state": saved["state"] | {99: saved["state"][0]}}
        words = "does not have: '99'"
        fails(InvalidArgument, words, lambda o=optimizer, s=extra: o.load_state_dict(s))
        named, again = make(Model().named_parameters()), make(Model().named_parameters())
        renamed = named.state_dict()
        again.load_state_dict(renamed)
        renamed["param_groups"][0]["param_names"] = [f"net.{name}" for name in NAMES]
        words = "does not have: 'net.first.bias'"
        fails(InvalidArgument, words, lambda o=again, s=renamed: o.load_state_dict(s))
    dist.barrier()


CHECKS = [
    names_without_wrappers,
    names_under_fsdp1,
    resumed_under_wrappers,
    fsdp_under_wrappers,
    outer_parameters_under_wrappers,
    another_models_state,
    another_models_fsdp_state,
    another_models_factors,
    another_models_adaptive_bits,
    other_models_state_on_one_rank,
    fsdp_state_of_other_modules,
    optimizers_in_get_state_dict,
]
