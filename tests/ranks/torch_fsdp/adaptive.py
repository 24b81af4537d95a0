"""Adaptive bits of the gradients that FSDP2 reduces.

1. values: bits match the oracle's statistics, and messages use them
2. checkpoints and invalid settings
"""

import pickle
from typing import Any

import numpy as np
import reference
import torch
import torch.distributed as dist
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

from cgx_ops import Config, InvalidArgument, Rules, Unsupported
from cgx_ops.planner import AdaptiveBits, allocate_bits, allocate_rates
from cgx_ops.planner.rates import bits_of
from cgx_ops.torch import fsdp

from .common import CLASSES, EXACT, WIDTH, Model, recorded, sharded, weights
from .feedback import train
from .refusals import refuses

NEAREST = Config(bits=4, bucket_size=64, rounding="nearest", error_feedback=False)
KEPT = Config(bits=3, bucket_size=64, error_feedback=True)
ENTROPY = Config(compressor="entropy", rate=4, error_feedback=False)


def adaptive(**options: Any) -> AdaptiveBits:
    return AdaptiveBits(**{"every": 4, "samples": 2, "budget": "norm", **options})


def bits_follow_the_gradients() -> None:
    """Check that statistics of steps 0 and 2, averaged over ranks, determine the bits of step 4."""
    one = r"blocks\.1\.linear\.weight"
    for config, allocate, rules in (
        (NEAREST, allocate_bits, Rules()),
        (NEAREST, allocate_bits, Rules([(one, 8)])),
        (ENTROPY, allocate_rates, Rules()),
        (ENTROPY, allocate_rates, Rules([(one, {"rate": 8.0})])),
    ):
        model: Any = sharded(Model())
        state = fsdp.compress(model, config, adaptive=adaptive(), rules=rules)
        size, steps = dist.get_world_size(), []
        with recorded() as messages:
            for step in range(6):
                train(model, range(step, step + 1))
                steps.append([m for m in messages if m.verb == "reduce_scatter"])
                messages.clear()
        # The blocks in the order of backward, with the root at some position between them.
        linear = iter(f"blocks.{i}.linear.weight" for i in (2, 1, 0))
        head = WIDTH * -(-CLASSES // size)
        order = [
            "head.weight" if head in (s.numel for s in message.segments) else next(linear)
            for message in steps[0]
        ]
        fixed = {name for name in order if rules.match(name)}
        free = sorted(set(order) - fixed)
        numels = {}
        sums = np.zeros(len(free))
        for step in (0, 2):
            mine = dict.fromkeys(free, 0.0)
            for name, message in zip(order, steps[step], strict=True):
                (segment,) = [s for s in message.segments if s.config.bits != 32]
                if name not in mine:
                    continue
                rows = tc.to_numpy(message.input).reshape(size, -1)
                rows = rows[:, segment.offset : segment.offset + segment.numel]
                numels[name] = rows.size
                ranges = config is NEAREST
                found = [reference.statistic(x, config.bucket_size, ranges=ranges) for x in rows]
                mine[name] = sum(found) / rows.size
            everyones: list[Any] = [None] * size
            dist.all_gather_object(everyones, [mine[name] for name in free])
            of_ranks = list(np.array(everyones, np.float32))
            sums += reference.reduce_in_order("avg", of_ranks) / np.float32(size)
        counts = [numels[name] for name in free]
        losses = [n * s / 2 for n, s in zip(counts, sums, strict=True)]
        want = dict(zip(free, allocate(losses, counts, "norm", config=config), strict=True))
        assert set(want.values()) != {4}, "the bits must change, or the test checks nothing"
        assert state.adaptive is not None
        assert state.adaptive.bits == want
        for step, sent in enumerate(steps):
            for name, message in zip(order, sent, strict=True):
                (bits,) = [bits_of(s.config) for s in message.segments if s.config.bits != 32]
                assert bits == (8 if name in fixed else want[name] if step >= 4 else 4), (
                    step,
                    name,
                )


def resumed_bits_are_equal() -> None:
    """Check states saved while averages are in flight, and between decisions, with feedback too."""
    for config in (NEAREST, KEPT):
        for stop in (3, 5):
            with folder_of_all() as folder:
                model: Any = sharded(Model())
                state = fsdp.compress(model, config, adaptive=adaptive())
                train(model, range(stop))
                save({"model": model.state_dict(), "cgx": state}, checkpoint_id=folder)
                pickled = pickle.dumps(state)
                train(model, range(stop, 10))
                assert state.adaptive is not None
                assert state.adaptive.changes
                want = weights(model)
                for form in ("dcp", "pickle"):
                    again: Any = sharded(Model())
                    restored = fsdp.compress(again, config, adaptive=adaptive())
                    saved = {"model": again.state_dict(), "cgx": restored}
                    load(saved, checkpoint_id=folder)
                    again.load_state_dict(saved["model"])
                    if form == "pickle":
                        restored = fsdp.compress(again, config, adaptive=adaptive())
                        restored.load_state_dict(pickle.loads(pickled).state_dict())
                    train(again, range(stop, 10))
                    for name, x in weights(again).items():
                        assert torch.equal(x, want[name]), (config, stop, form, name)
                    assert restored.adaptive is not None
                    assert restored.adaptive.bits == state.adaptive.bits


def one_rank_saves_alone() -> None:
    """Save on one rank after each step, also while averages are in flight after backward."""
    model: Any = sharded(Model())
    for frozen in (False, True):
        if frozen:
            model.blocks[0].requires_grad_(False)
        state = fsdp.compress(model, NEAREST, adaptive=adaptive())
        for step in range(3):
            train(model, range(step, step + 1))
            if dist.get_rank() == step % dist.get_world_size():
                assert state.state_dict()["steps"] == step
            dist.barrier()


def modules_wrapped_together() -> None:
    """Check that a step's last message is known, so that one rank may save alone."""
    model: Any = Model()
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model)
    state = fsdp.compress(model, NEAREST, adaptive=adaptive())
    train(model, range(1))
    assert state.ends_a_step
    if dist.get_rank() == 0:
        assert state.state_dict()["steps"] == 0
    dist.barrier()


def invalid_adaptive_settings() -> None:
    model: Any = sharded(Model())

    def of(config: Any, **options: Any) -> Any:
        return lambda: fsdp.compress(model, config, adaptive=adaptive(**options))

    refuses(of(EXACT), InvalidArgument, "less than 32")
    refuses(of(None), InvalidArgument, "less than 32")
    refuses(of(Config(compressor="topk")), Unsupported, "errors can be predicted for")
    levels = Config(bits=3, compressor="levels")
    refuses(of(levels, choices=(2, 8)), InvalidArgument, "choices is (2, 8): bits is 8")
    state = fsdp.compress(model, NEAREST)
    other = fsdp.compress(model, NEAREST, adaptive=adaptive())
    refuses(
        lambda: other.load_state_dict(state.state_dict()), InvalidArgument, "without adaptive bits"
    )
    refuses(
        lambda: state.load_state_dict(other.state_dict()), InvalidArgument, "with adaptive bits"
    )


CHECKS = [bits_follow_the_gradients, resumed_bits_are_equal, one_rank_saves_alone]
CHECKS += [modules_wrapped_together, invalid_adaptive_settings]
