"""Error feedback of the gradients' reduce-scatter.

1. every message and residual, against the numpy reduce_scatter, bit for bit
2. LoCo's form: 8 bits, averaged, reset
3. checkpoints, consolidated ones on a different number of shards, and invalid settings
"""

import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops._core import codec
from cgx_ops.torch import fsdp
from cgx_ops.torch.fsdp import hooks
from cgx_ops.torch.fsdp.feedback import Feedback

from .common import EXACT, Model, batch, own_parameters, sharded, weights
from .refusals import refuses

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)
TOPK = Config(compressor="topk", density=0.1, bucket_size=128)
KEPT = Config(bits=8, bucket_size=512, rounding="nearest")


@contextmanager
def checked() -> Iterator[dict[str, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Compare every reduce-scatter in the block; yield residuals before and after, by module."""
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    original = hooks.start

    def start(
        comm: Any, verb: Any, source: Any, output: Any, config: Config, **options: Any
    ) -> dist.Work:
        segments, residuals = options["segments"], options.get("residuals")
        if residuals is None:
            return original(comm, verb, source, output, config, **options)
        flat = next(each for each in residuals if each is not None)._base
        assert flat is not None

        def kept() -> Any:
            """Return a copy of the residual, with zeros for exact segments."""
            blocks = flat.numpy().reshape(comm.size, -1).copy()
            for segment, residual in zip(segments, residuals, strict=True):
                if residual is None:
                    blocks[:, segment.offset : segment.offset + segment.numel] = 0
            return blocks

        before, mine = flat.clone(), kept()
        work = original(comm, verb, source, output, config, **options)
        work.wait()
        want = comm.reduce_scatter(
            tc.to_numpy(source).reshape(comm.size, -1), options["op"], config,
            segments=segments, seed=options["seed"], residual=mine,
        )  # fmt: skip
        assert tc.to_numpy(output).tobytes() == want.tobytes()
        if all(
            s.config and s.config.bits == 32
            for s, r in zip(segments, residuals, strict=True)
            if r is None
        ):
            assert kept().tobytes() == mine.tobytes()
        seen.setdefault(options["name"], []).append((before, flat.clone()))
        return work

    hooks.start = start
    try:
        yield seen
    finally:
        hooks.start = original


def train(model: Any, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        x, y = batch(step)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def feedback_matches_reduce_scatter() -> None:
    """Check that biased compressors enable feedback, and residuals carry over to the next step."""
    for config in (LEVELS, TOPK, Config(bits=2, bucket_size=64, error_feedback=True)):
        model = sharded(Model())
        state = fsdp.compress(model, config)
        with checked() as seen:
            train(model, range(3))
        assert len(seen) == 4
        for messages in seen.values():
            assert len(messages) == 3
            assert not messages[0][0].any()
            assert messages[0][1].any()
            for (_, after), (before, _) in itertools.pairwise(messages):
                assert tc.same_bits(after, before)
        assert state.residuals is not None
    for config in (Config(bits=2), replace(LEVELS, error_feedback=False), EXACT):
        assert fsdp.compress(sharded(Model()), config).residuals is None


def averaged_in_eight_bits() -> None:
    feedback = Feedback(bits=8, average=0.75, reset=3)
    model = sharded(Model())
    state = fsdp.compress(model, LEVELS, feedback=feedback)
    with checked() as seen:
        train(model, range(5))
    for messages in seen.values():
        known = torch.zeros_like(messages[0][0])
        for step, (before, lost) in enumerate(messages):
            assert tc.same_bits(before, known), step
            new = known * 0.75 + lost * 0.25
            encoded = codec.quantize(new.numpy(), KEPT)
            known = torch.from_numpy(codec.dequantize(encoded, new.numel(), config=KEPT))
            if (step + 1) % 3 == 0:
                known = torch.zeros_like(known)
    assert state.residuals is not None
    kept = state.residuals.by_name.tensors
    assert kept and all(each.dtype == torch.uint8 for each in kept.values())
    loco = fsdp.LOCO
    assert (loco.bits, loco.average, loco.reset) == (8, 0.8, 1024)


def resumes(made: Callable[[], tuple[Any, fsdp.State]]) -> None:
    """Save after 3 steps, in each form; check that a new model continues to the same bits."""
    with folder_of_all() as folder:
        model, state = made()
        train(model, range(3))
        save({"model": model.state_dict(), "cgx": state}, checkpoint_id=folder)
        file = f"{folder}/{dist.get_rank()}.pt"
        torch.save({"torch": state.state_dict(), "torch, whole": state}, file)
        train(model, range(3, 6))
        want = weights(model)
        for form in ("dcp", "torch", "torch, whole", "nothing"):
            model, state = made()
            loaded: dict[str, Any] = {"model": model.state_dict()}
            if form == "dcp":
                loaded["cgx"] = state
            load(loaded, checkpoint_id=folder)
            model.load_state_dict(loaded["model"])
            if form.startswith("torch"):
                found = torch.load(file)[form]
                state.load_state_dict(found if form == "torch" else found.state_dict())
            train(model, range(3, 6))
            got = weights(model)
            same = all(tc.same_bits(got[name], want[name]) for name in want)
            assert same == (form != "nothing"), (form, state.residuals, state.replicas)


def resumed_feedback_is_bitwise_equal() -> None:
    for feedback in (None, Feedback(bits=8, average=0.5, reset=4), Feedback(average=0.5)):

        def made(feedback: Feedback | None = feedback) -> tuple[Any, fsdp.State]:
            model = sharded(Model())
            return model, fsdp.compress(model, LEVELS, feedback=feedback)

        resumes(made)


def parts_of(whole: torch.Tensor, shards: int) -> list[torch.Tensor]:
    """Return each shard of a parameter, flat, zero-padded as by FSDP."""
    rows = -(-len(whole) // shards)
    padded = torch.zeros(shards * rows, *whole.shape[1:], dtype=whole.dtype)
    padded[: len(whole)] = whole
    return list(padded.view(shards, -1))


def blocks_of(model: Any, module: str, whole: dict[str, torch.Tensor], shards: int) -> torch.Tensor:
    """Return a module's flat gradient from its parameters' values; missing ones are zero."""
    columns = []
    prefix = f"{module}." if module else ""
    for name, parameter in own_parameters(model.get_submodule(module)):
        given = whole.get(prefix + name, torch.zeros(parameter.shape))
        columns.append(torch.stack(parts_of(given, shards)))
    return torch.cat(columns, 1).flatten()


def consolidated_residuals_fit_any_number_of_shards() -> None:
    """Load from W shards to W / 2, each twice; every residual is the mean over the ranks."""
    ranks = dist.get_world_size()
    meshes = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    for feedback in (Feedback(), Feedback(bits=8, average=0.5)):
        model = sharded(Model())
        state = fsdp.compress(model, LEVELS, feedback=feedback)
        train(model, range(3))
        assert state.residuals is not None
        before = {name: r.clone() for name, r in state.residuals.by_name.tensors.items()}
        everyones: list[Any] = [None] * ranks
        dist.all_gather_object(everyones, before)
        state.consolidate()
        assert state.residuals.by_name.consolidated
        means = state.residuals.by_name.tensors
        shapes = {name: p.shape for name, p in model.named_parameters() if p.dim() > 1}
        assert means.keys() == shapes.keys()
        whole = {name: mean.view(shapes[name]) for name, mean in means.items()}
        for module in before:
            sum_of = torch.zeros(())
            for each in everyones:
                flat = each[module]
                if feedback.bits == 8:
                    numel = blocks_of(model, module, {}, ranks).numel()
                    decoded = codec.dequantize(flat.numpy().tobytes(), numel, config=KEPT)
                    flat = torch.from_numpy(decoded)
                sum_of = sum_of + flat
            # Padding and exact parameters have no residual, but the 8-bit format cannot represent 0
            # there.
            ones = {name: torch.ones(shape) for name, shape in shapes.items()}
            sum_of = sum_of * blocks_of(model, module, ones, ranks)
            got = blocks_of(model, module, whole, ranks)
            # A sum of `ranks` numbers in any order, and a division: each rounds once.
            assert torch.allclose(got, sum_of / ranks, rtol=ranks * 2**-23, atol=1e-9), module

        pickled = pickle.dumps(state.state_dict())
        model = sharded(Model(), mesh=meshes)
        state = fsdp.compress(model, LEVELS, feedback=feedback)
        state.load_state_dict(pickle.loads(pickled))
        with checked() as seen:
            train(model, range(3, 4))
        for name, [(first, _)] in seen.items():
            want = blocks_of(model, name.removeprefix("fsdp/reduce_scatter/"), whole, ranks // 2)
            if feedback.bits == 8:
                want = torch.from_numpy(
                    codec.dequantize(codec.quantize(want.numpy(), KEPT), want.numel(), config=KEPT)
                )
            assert tc.same_bits(first, want), name
        assert len(seen) == 4

    model = sharded(Model(), mesh=meshes["shards"])
    alone = fsdp.compress(model, LEVELS)
    refuses(alone.consolidate, InvalidArgument, "over some of the ranks only")


class Two(nn.Module):
    """Model with two matrices in one group; sizes are divisible by one to four ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = (nn.Linear(24, 48, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def residuals_stay_with_their_parameters() -> None:
    """Freeze and unfreeze a parameter; its residual waits, and is saved."""
    ranks, numel, key = dist.get_world_size(), 24 * 48, "fsdp/reduce_scatter/"
    for feedback in (Feedback(), Feedback(bits=8, average=0.5)):

        def decoded(kept: torch.Tensor, eight: bool = feedback.bits == 8) -> torch.Tensor:
            encoded = kept.numpy().tobytes()
            if not eight:
                return kept.clone()
            return torch.from_numpy(codec.dequantize(encoded, numel, config=KEPT))

        model: Any = fully_shard(Two())
        state = fsdp.compress(model, LEVELS, feedback=feedback)
        assert state.residuals is not None
        found = {}
        with checked() as seen:
            for step, trained in enumerate(["a", "b", "ab"]):
                model.a.requires_grad_("a" in trained)
                model.b.requires_grad_("b" in trained)
                if step == 2:  # continue in a new model, as after a restart
                    saved = state.state_dict()
                    state = fsdp.compress(model, LEVELS, feedback=feedback)
                    assert state.residuals is not None
                    state.load_state_dict(saved)
                x = tc.values(dist.get_rank(), 8 * 24, torch.float32, step).view(8, 24)
                model(x).square().sum().backward()
                if step < 2:
                    found[trained] = decoded(state.residuals.by_name.tensors[""])
                if step == 1:
                    assert tc.same_bits(state.residuals.by_name.tensors["a.weight"], found["a"])
        (first, _), (second, _), (third, _) = seen[key]
        assert not first.any() and not second.any()
        assert found["a"].any() and found["b"].any()
        both = torch.cat([found[name].view(ranks, -1) for name in "ab"], 1).flatten()
        if feedback.bits == 8:
            encoded = codec.quantize(both.numpy(), KEPT)
            both = torch.from_numpy(codec.dequantize(encoded, 2 * numel, config=KEPT))
        assert tc.same_bits(third, both), feedback


def residuals_fit_other_wrapping() -> None:
    """Load residuals where other modules are wrapped; every parameter keeps its residual."""
    ranks, key = dist.get_world_size(), "fsdp/reduce_scatter/"
    rooted: Callable[[], Any] = lambda: fully_shard(Model())  # noqa: E731
    wrapped: Callable[[], Any] = lambda: sharded(Model())  # noqa: E731
    for feedback in (Feedback(), Feedback(bits=8, average=0.5)):
        for one, other in ((rooted, wrapped), (wrapped, rooted)):
            torch.manual_seed(5)
            state = fsdp.compress(model := one(), LEVELS, feedback=feedback)
            train(model, range(3))
            saved, whole = state.state_dict(), {}
            assert state.residuals is not None
            for name, module in saved["residuals"]["modules"]:
                flat = state.residuals.by_name.tensors[name]
                if feedback.bits == 8:
                    decoded = codec.dequantize(flat.numpy().tobytes(), module.numel, config=KEPT)
                    flat = torch.from_numpy(decoded)
                blocks = flat.view(ranks, -1)
                whole |= {p.name: p.cut_from(blocks) for p in module.parameters}
            state = fsdp.compress(model := other(), LEVELS, feedback=feedback)
            state.load_state_dict(saved)
            with checked() as seen:
                train(model, range(3, 5))
            assert {name.removeprefix(key) for name in seen} == state.modules.keys()
            for name, [(first, _), (second, _)] in seen.items():
                want = blocks_of(model, name.removeprefix(key), whole, ranks)
                if feedback.bits == 8:
                    encoded = codec.quantize(want.numpy(), KEPT)
                    decoded = codec.dequantize(encoded, want.numel(), config=KEPT)
                    want = torch.from_numpy(decoded)
                assert tc.same_bits(first, want), (name, feedback)
                assert second.any()
            assert state.residuals is not None
            assert state.residuals.by_name.tensors.keys() == state.modules.keys()


def loaded_state_can_be_consolidated() -> None:
    """Also consolidate before any backward."""
    for feedback in (Feedback(), fsdp.LOCO):
        state = fsdp.compress(model := sharded(Model()), LEVELS, feedback=feedback)
        train(model, range(2))
        again = fsdp.compress(sharded(Model()), LEVELS, feedback=feedback)
        again.load_state_dict(state.state_dict())
        state.consolidate()
        again.consolidate()
        assert state.residuals is not None and again.residuals is not None
        want, got = state.residuals.by_name.tensors, again.residuals.by_name.tensors
        assert got.keys() == want.keys() and "head.weight" in want
        assert all(tc.same_bits(got[name], want[name]) for name in want)


def bad_feedback() -> None:
    model = sharded(Model())
    for config, words in (
        (None, "no effect on exact gradients"),
        (EXACT, "there is no quantization error"),
        (Config(compressor="sign"), "a vote has no magnitude"),
    ):
        refuses(
            lambda c=config: fsdp.compress(model, c, feedback=fsdp.LOCO), InvalidArgument, words
        )
    refuses(lambda: Feedback(bits=4), InvalidArgument, "Feedback.bits is 4")  # type: ignore[arg-type]
    refuses(lambda: Feedback(average=1.0), InvalidArgument, "Feedback.average is 1.0")
    refuses(lambda: Feedback(reset=-1), InvalidArgument, "Feedback.reset is -1")
    state, other = fsdp.compress(model, LEVELS), fsdp.compress(model, LEVELS, feedback=fsdp.LOCO)
    refuses(
        lambda: state.load_state_dict(fsdp.compress(model).state_dict()), InvalidArgument, "without"
    )
    refuses(
        lambda: other.load_state_dict(state.state_dict()), InvalidArgument, "use the same feedback"
    )


def compressors_by_rule() -> None:
    """Use topk with residuals for one module, and 8 bits without residuals for the others."""
    rules = Rules(
        [("head", {"compressor": "topk", "density": 0.2}), (r"blocks\.1", {"compressor": "randk"})]
    )
    model = sharded(Model())
    state = fsdp.compress(model, Config(bits=8, bucket_size=64), rules=rules)
    with checked() as seen:
        train(model, range(2))
    assert seen.keys() == {"fsdp/reduce_scatter/", "fsdp/reduce_scatter/blocks.1"}
    assert state.residuals is not None
    assert state.residuals.by_name.tensors.keys() == {"", "blocks.1"}


CHECKS = [feedback_matches_reduce_scatter, averaged_in_eight_bits, compressors_by_rule]
CHECKS += [residuals_stay_with_their_parameters, loaded_state_can_be_consolidated]
CHECKS += [residuals_fit_other_wrapping, resumed_feedback_is_bitwise_equal, bad_feedback]
CHECKS += [consolidated_residuals_fit_any_number_of_shards]
