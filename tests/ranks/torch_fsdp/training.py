"""Training with compressed collectives.

1. all training modes
2. checkpoints
"""

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy

from cgx_ops import Config
from cgx_ops.torch import fsdp

from .common import EXACT, FEW, Model, batch, same_on_all_ranks, sharded, weights


@dataclass(frozen=True)
class Way:
    """A training mode: how to build and train. prepare(model) is called after fully_shard."""

    model: Callable[[], Model] = Model
    options: Callable[[], dict[str, Any]] = dict
    prepare: Callable[[Any], object] = lambda model: None
    before_step: Callable[[Any], object] = lambda model: None
    micro_batches: int = 1
    clip: float | None = None
    # A gradient factor for cases in which FSDP's own collectives cannot apply it on the CPU.
    scale: float | None = None


def freeze(model: Any) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)


def prefetch(model: Any) -> None:
    for module in (model, *model.blocks):
        module._set_unshard_async_op(True)
    for one, other in itertools.pairwise(model.blocks):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def for_all(call: Callable[[Any], object]) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        for module in (model, *model.blocks):
            call(module)

    return run


def mixed(**dtypes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"mp_policy": MixedPrecisionPolicy(**dtypes)}


WAYS = {
    "default": Way(),
    "keeping weights": Way(options=lambda: {"reshard_after_forward": False}),
    "bf16, reduced in fp32": Way(
        options=mixed(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "fp16": Way(options=mixed(param_dtype=torch.float16)),
    "frozen": Way(prepare=freeze),
    "accumulation": Way(micro_batches=3),
    "prefetch": Way(prepare=prefetch, before_step=lambda model: model.unshard(async_op=True)),
    "checkpointing": Way(model=lambda: Model(recompute=True)),
    "blocks used twice": Way(model=lambda: Model(times=2)),
    "clipping": Way(clip=0.1),
    "sums": Way(prepare=for_all(lambda m: m.set_force_sum_reduction_for_comms(True))),
    "a factor": Way(prepare=for_all(lambda m: m.set_gradient_divide_factor(3.0)), scale=2 / 3),
    "a factor that is an average": Way(
        prepare=for_all(lambda m: m.set_gradient_divide_factor(2.0))
    ),
    "a group for reduce-scatter": Way(
        prepare=lambda model: model.set_separate_reduce_scatter_group(True)
    ),
    "compiled blocks": Way(prepare=compile_blocks),
    "compiled": Way(prepare=lambda model: model.compile(backend="aot_eager")),
}


def train(
    way: Way, compressed: tuple[Config, Config | fsdp.Differences] | None
) -> tuple[dict[str, Any], float]:
    """Return the full weights after three steps, and the last loss."""
    torch._dynamo.reset()
    model = sharded(way.model(), **way.options())
    if compressed is not None or way.scale is None:
        way.prepare(model)
    if compressed is not None:
        fsdp.compress(model, *compressed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss = torch.zeros(())
    for step in range(3):
        way.before_step(model)
        for part in range(way.micro_batches):
            model.set_requires_gradient_sync(part == way.micro_batches - 1)
            x, y = batch(step * way.micro_batches + part)
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
        if compressed is None and way.scale is not None:
            for parameter in model.parameters():
                parameter.grad.mul_(way.scale)
        if way.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), loss.item()


def all_training_modes() -> None:
    """Check that 32 bits equal plain FSDP2, 8 bits come close, and all ranks agree."""
    for name, way in WAYS.items():
        plain, plain_loss = train(way, None)
        exact, _ = train(way, (EXACT, EXACT))
        few, few_loss = train(way, (fsdp.GRADIENTS, fsdp.WEIGHTS))
        assert same_on_all_ranks(few), name
        for parameter, value in plain.items():
            torch.testing.assert_close(exact[parameter], value, msg=lambda m, n=name: f"{n}: {m}")
        assert any(not torch.equal(few[parameter], value) for parameter, value in plain.items())
        assert abs(few_loss - plain_loss) < 0.05 * plain_loss, (name, few_loss, plain_loss)


# ---- checkpoints ---------------------------------------------------------------------------------


def start_of_training() -> tuple[Any, torch.optim.Optimizer, fsdp.State]:
    model = sharded(Model())
    state = fsdp.compress(model, FEW, replace(FEW, rounding="shift"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), state


def steps(model: Any, optimizer: torch.optim.Optimizer, which: range) -> None:
    for step in which:
        x, y = batch(step)
        with torch.no_grad():
            model(x)  # an evaluation draws no noise that a checkpoint would miss
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed_training_is_bitwise_equal() -> None:
    with folder_of_all() as folder:
        model, optimizer, state = start_of_training()
        steps(model, optimizer, range(2))
        with torch.no_grad():
            model(batch(9)[0])
        saved = {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "cgx": state,
        }
        save(saved, checkpoint_id=folder)
        pickled = pickle.loads(pickle.dumps(state)).state_dict()
        steps(model, optimizer, range(2, 5))
        want = weights(model)

        for restore in (True, False):
            model, optimizer, state = start_of_training()
            loaded = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, optimizer),
                "cgx": state if restore else copy.copy(state),
            }
            load(loaded, checkpoint_id=folder)
            model.load_state_dict(loaded["model"])
            set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
            assert (state.state_dict() == pickled) == restore
            steps(model, optimizer, range(2, 5))
            got = weights(model)
            same = all(tc.same_bits(got[name], want[name]) for name in want)
            assert same == restore, "the noise state must be necessary and sufficient"


CHECKS = [all_training_modes, resumed_training_is_bitwise_equal]
