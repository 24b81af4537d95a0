"""Weights that are gathered as differences.

1. the weights of forward and backward, and the messages
2. training
3. checkpoints
4. invalid settings
"""

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops.torch import fsdp

from . import training
from .common import FEW, Model, batch, equals_the_oracle, full, recorded, sharded, weights
from .messages import equal_in
from .refusals import refuses

foreach_mul: Any = getattr(torch, "_foreach_mul_")  # noqa: B009
NEAREST = replace(FEW, rounding="nearest")
FOUR = fsdp.Differences(NEAREST)

# ---- 1. weights and messages ---------------------------------------------------------------------


@contextmanager
def weights_used(model: Any) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yield a list that gets the weights of each forward and backward pass, by module."""
    seen: list[dict[str, torch.Tensor]] = []

    def look(module: Any, *_: Any) -> None:
        seen[-1][f"{id(module)}"] = module.weight.detach().clone()

    def begin(*_: Any) -> None:
        seen.append({})

    hooks = [model.register_forward_pre_hook(begin), model.register_full_backward_pre_hook(begin)]
    for layer in (*(block.linear for block in model.blocks), model.head):
        hooks.append(layer.register_forward_hook(look))
        hooks.append(layer.register_full_backward_pre_hook(look))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def run(model: Any, step: int, optimizer: torch.optim.Optimizer | None = None) -> torch.Tensor:
    x, y = batch(step)
    loss = nn.functional.cross_entropy(model(x).float(), y)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def differences_equal_the_oracle() -> None:
    """Check each message, and that outputs are the sums of all earlier messages."""
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float16),
    ]
    coarse = Config(bits=2, bucket_size=33, rounding="shift")
    for policy, config in zip(policies, (NEAREST, coarse, fsdp.Differences().config), strict=True):
        model = sharded(Model(), mp_policy=policy)
        state = fsdp.compress(model, None, fsdp.Differences(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dtype = policy.param_dtype or torch.float32
        whole: dict[str, torch.Tensor] = {}
        for step in range(4):
            with recorded() as messages, weights_used(model) as used:
                run(model, step, optimizer)
            gathers = [m for m in messages if m.verb == "all_gather"]
            assert len(gathers) == 4, (step, len(gathers))
            assert len(used) == 2 and all(tc.same_bits(used[0][k], used[1][k]) for k in used[0])
            for message in gathers:
                assert message.input.dtype == dtype
                assert equals_the_oracle(message), (policy, step)
                bits = {(s.config or config).bits for s in message.segments}
                assert bits == ({32} if step == 0 else {32, config.bits})
            for block, message in zip(model.blocks, gathers[1:], strict=True):
                name = f"{id(block.linear)}"
                sent = gathered_matrix(message)
                whole[name] = sent if step == 0 else whole[name] + sent
                assert tc.same_bits(whole[name], used[0][name]), (policy, step)
        ranks, numel = dist.get_world_size(), sum(padded(p) for p in model.parameters())
        assert state.base_nbytes == (numel + numel // ranks) * dtype.itemsize


def gathered_matrix(message: Any) -> torch.Tensor:
    """Return a block's linear.weight from the message of the block."""
    ranks, rows = dist.get_world_size(), 33
    blocks = message.output.view(ranks, -1)
    height = -(-rows // ranks)
    first = 2 * height  # after the norm's weight and bias
    return blocks[:, first : first + height * rows].reshape(-1, rows)[:rows]


def padded(parameter: torch.Tensor) -> int:
    ranks = dist.get_world_size()
    return -(-len(parameter) // ranks) * ranks * parameter[0].numel()


def replicas_do_not_drift() -> None:
    """Compare the weights of all ranks, and with the exact ones, after 200 steps.

    The error of a gather is at most half a step of the quantizer of the last differences. Those
    contain the error before it, so a bound is: the error of one gather is at most 1/30 of the
    bucket's range of differences, in 4 bits, and the range is at most that of the weights' change
    plus twice the largest error. With e for the error and c for the change: e <= (2 c + 2 e) / 30,
    so e <= c / 14. The factor 1.01 is for rounding in float32.
    """
    model = sharded(Model())
    fsdp.compress(model, FEW, FOUR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    before: dict[str, torch.Tensor] = {}
    with weights_used(model) as used:
        for step in range(200):
            if step == 199:
                before = weights(model)
            if step % 20:
                used.clear()
            run(model, step, optimizer)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, [list(each.values()) for each in used])
    for other in everyones[1:]:
        for one, two in zip(everyones[0], other, strict=True):
            assert all(tc.same_bits(a, b) for a, b in zip(one, two, strict=True))
    change = 0.002 * 1.2  # of a step of AdamW: its rate, and 0.01 of weights below 0.2 times it
    for index, block in enumerate(model.blocks):
        exact = before[f"blocks.{index}.linear.weight"]
        error = (used[-1][f"{id(block.linear)}"] - exact).abs().max().item()
        assert 0 < error <= 1.01 * change / 14, (index, error)


def unchanged_weights_are_not_sent() -> None:
    """Check evaluations, frozen parameters and accumulation, and weights changed by other means."""
    model = sharded(Model())
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    fsdp.compress(model, FEW, FOUR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(7)[0]

    def gathers(call: Any) -> list[list[int]]:
        with recorded() as messages:
            call()
        sent = [m for m in messages if m.verb == "all_gather"]
        return [[(s.config or m.config).bits for s in m.segments] for m in sent]

    everything = [[32]] * 4
    trained = [[4, 32], [4, 32], [32, 32, 4, 32]]  # of the root, and of the blocks 1 and 2
    assert gathers(lambda: run(model, 0, optimizer)) == everything
    assert gathers(lambda: run(model, 1)) == trained
    assert gathers(lambda: run(model, 2)) == []
    assert gathers(lambda: run(model, 3, optimizer)) == []
    with torch.no_grad():
        assert gathers(lambda: model(x)) == trained
        assert gathers(lambda: model(x)) == []
    with torch.inference_mode():
        assert gathers(lambda: model(x)) == []
    assert gathers(lambda: run(model, 2, optimizer)) == []

    def exact_in_forward(change: Callable[[], object], sent: list[list[int]]) -> None:
        with weights_used(model) as used, torch.no_grad():
            change()
            assert gathers(lambda: model(x)) == sent
        for block in model.blocks[-1:]:
            assert tc.same_bits(used[-1][f"{id(block.linear)}"], full(block.linear.weight))

    last = list(model.blocks[2].parameters())
    local: Any = last[0].detach()
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact_in_forward(lambda: model.load_state_dict(exact), everything)
    exact_in_forward(lambda: [p.mul_(1.5) for p in last], [[32]])
    exact_in_forward(lambda: foreach_mul(last, 1.5), [[32]])
    exact_in_forward(lambda: local.to_local().add_(dist.get_rank() == 0), [[32]])
    run(model, 3)
    model.load_state_dict({name: torch.nan * tensor for name, tensor in exact.items()})
    with torch.no_grad():
        model(x)
    run(model, 3)  # the backup is loaded as if it were trained
    exact_in_forward(lambda: [p.copy_(exact[n]) for n, p in model.named_parameters()], everything)
    optimizer.zero_grad()
    run(model, 3, optimizer)
    fsdp.compress(model, FEW, FOUR)
    with torch.inference_mode():
        assert gathers(lambda: model(x)) == everything
    assert gathers(lambda: run(model, 4, optimizer)) == []
    assert gathers(lambda: run(model, 5, optimizer)) == trained
    fsdp.compress(model, None, None)
    assert gathers(lambda: run(model, 6, optimizer)) == []

    # Gradients of another dtype are reduced by torch.
    model = sharded(Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    fsdp.compress(model, FEW, FOUR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(action="ignore"):
        assert gathers(lambda: run(model, 7, optimizer)) == everything
        assert len(gathers(lambda: run(model, 8, optimizer))) == 4


def exact_codec_by_rule() -> None:
    """Check that a parameter of compressor "lossless" is sent whole, and only when it changed."""
    model = sharded(Model())
    lossless = Rules([(r"blocks\.1", {"compressor": "lossless"})])
    fsdp.compress(model, FEW, FOUR, rules=lossless)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        before = full(model.blocks[1].linear.weight)
        with weights_used(model) as used:
            run(model, step, optimizer)
        assert tc.same_bits(used[0][f"{id(model.blocks[1].linear)}"], before)
    with recorded() as messages, torch.no_grad():
        model(batch(3)[0])
        model(batch(3)[0])
    assert [m.verb for m in messages] == ["all_gather"] * 4
    exact = [s.config and s.config.compressor == "lossless" for s in messages[2].segments]
    assert all(exact) and len(exact) == 4


def in_host_memory() -> None:
    """Check that weights have the same bits with on_cpu=True, here for tensors on the CPU."""
    found = []
    for on_cpu in (False, True):
        model = sharded(Model())
        state = fsdp.compress(model, FEW, fsdp.Differences(NEAREST, on_cpu))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with weights_used(model) as used:
            for step in range(3):
                run(model, step, optimizer)
        found.append([weight for seen in used for weight in seen.values()])
        found.append(list(weights(model).values()))
        assert state.base_nbytes
    assert all(map(tc.same_bits, found[0], found[2])) and len(found[0]) == 6 * 4
    assert all(map(tc.same_bits, found[1], found[3]))


# ---- 2. training ---------------------------------------------------------------------------------


def all_training_modes_with_differences() -> None:
    """Check that losses come close to those of exact weights in every mode, and ranks agree."""
    for name, way in training.WAYS.items():
        exact, exact_loss = training.train(way, (FEW, training.EXACT))
        few, few_loss = training.train(way, (FEW, FOUR))
        assert training.same_on_all_ranks(few), name
        assert any(not torch.equal(few[parameter], value) for parameter, value in exact.items())
        assert abs(few_loss - exact_loss) < 0.05 * exact_loss, (name, few_loss, exact_loss)


def replicas_of_shards() -> None:
    """Check that replicas gather equal weights in a mesh of two by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Model(), mesh=mesh)
    stochastic = replace(NEAREST, rounding="stochastic")
    fsdp.compress(model, FEW, fsdp.Differences(stochastic))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with weights_used(model) as used:
            run(model, step, optimizer)
        for seen in used[-1].values():
            assert equal_in(mesh.get_group("replicate"), seen)
            assert equal_in(mesh.get_group("shard"), seen)


# ---- 3. checkpoints ------------------------------------------------------------------------------


def start_of_training(**options: Any) -> tuple[Any, torch.optim.Optimizer, fsdp.State]:
    model = sharded(Model(), **options)
    state = fsdp.compress(model, FEW, FOUR)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), state


def saved_parts(model: Any, optimizer: Any, state: Any) -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "cgx": state,
    }


def restore(folder: Any, model: Any, optimizer: Any, state: Any) -> None:
    loaded = saved_parts(model, optimizer, state)
    load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])


def resumed_differences_are_bitwise_equal() -> None:
    """Resume after a step, an evaluation or other weights; the weights in use have equal bits."""
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}

    def evaluate(model: Any) -> None:
        with torch.no_grad():
            model(batch(9)[0])

    def change(model: Any) -> None:
        evaluate(model)
        with torch.no_grad():
            for p in model.blocks[1].parameters():
                p.mul_(1.5)

    def change_on_one_rank(model: Any) -> None:
        evaluate(model)
        weight: Any = model.blocks[1].linear.weight.detach()
        weight.to_local().add_(dist.get_rank() == 0)

    def replace_all(model: Any) -> None:
        model.load_state_dict({name: 2 * x for name, x in model.state_dict().items()})

    cases: list[tuple[dict[str, Any], Any]] = [({}, evaluate), ({}, id), (policy, id)]
    cases += [({}, change), (policy, change), ({}, change_on_one_rank), ({}, replace_all)]
    for options, before in cases:
        with folder_of_all() as folder:
            model, optimizer, state = start_of_training(**options)
            for step in range(3):
                run(model, step, optimizer)
            before(model)
            save(saved_parts(model, optimizer, state), checkpoint_id=folder)
            pickled = pickle.loads(pickle.dumps(state)).state_dict()
            with weights_used(model) as want:
                for step in range(3, 6):
                    run(model, step, optimizer)
            for kind in ("checkpoint", "pickle", "without"):
                model, optimizer, state = start_of_training(**options)
                restore(folder, model, optimizer, state)
                if kind != "checkpoint":
                    state = fsdp.compress(model, FEW, FOUR)
                if kind == "pickle":
                    with torch.no_grad():
                        model(batch(9)[0])  # afterwards the root's exact weights stay gathered
                    state.load_state_dict(pickled)
                with weights_used(model) as got:
                    for step in range(3, 6):
                        run(model, step, optimizer)
                same = all(
                    tc.same_bits(a, b)
                    for one, other in zip(want, got, strict=True)
                    for a, b in zip(one.values(), other.values(), strict=True)
                )
                # Without the state, and after replace_all(), the first gather is exact.
                if kind != "without" or before is not replace_all:
                    assert same == (kind != "without"), (kind, options, before)


def differences_fit_any_number_of_shards() -> None:
    """Resume on half as many shards: the same base, and so the same weights in use."""
    ranks = dist.get_world_size()
    meshes = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    with folder_of_all() as folder:
        model, optimizer, state = start_of_training()
        for step in range(3):
            run(model, step, optimizer)
        with torch.no_grad(), weights_used(model) as want:
            model(batch(9)[0])
        save(saved_parts(model, optimizer, state), checkpoint_id=folder)
        model, optimizer, state = start_of_training(mesh=meshes["shards"])
        restore(folder, model, optimizer, state)
        with weights_used(model) as got:
            run(model, 3, optimizer)
            run(model, 4, optimizer)
        for a, b in zip(want[0].values(), got[0].values(), strict=True):
            assert tc.same_bits(a, b)
        saved = start_of_training()[2].state_dict()
        words = "through torch.distributed.checkpoint"
        refuses(lambda: state.load_state_dict(saved), InvalidArgument, words)


# ---- 4. invalid settings -------------------------------------------------------------------------


def bad_differences() -> None:
    model = sharded(Model())
    wrong: Any = 4
    refuses(lambda: fsdp.Differences(wrong), TypeError, "Differences.config is 4")
    for exact in (Config(bits=32), Config(compressor="lossless")):
        refuses(lambda c=exact: fsdp.Differences(c), InvalidArgument, "pass weights=None")
    refuses(lambda: fsdp.compress(model, None, wrong), TypeError, "weights is 4")
    noisy = Config(compressor="entropy", rate=1.0, rounding="shift")
    refuses(lambda: fsdp.Differences(noisy), InvalidArgument, "cannot send differences")
    rules = Rules([("head", {"compressor": "entropy", "rate": 1.0, "rounding": "shift"})])
    refuses(
        lambda: fsdp.compress(model, None, FOUR, rules=rules),
        InvalidArgument,
        "parameter 'head.weight' cannot send differences",
    )
    plain = fsdp.compress(model, FEW, FEW).state_dict()
    state = fsdp.compress(model, FEW, FOUR)
    refuses(lambda: state.load_state_dict(plain), InvalidArgument, "without differences of weights")
    saved = state.state_dict()
    saved["bases"]["base"]["other"] = torch.ones(3)
    refuses(lambda: state.load_state_dict(saved), InvalidArgument, "'other'")


def state_loaded_on_one_rank() -> None:
    """Check that all ranks raise, and that weights loaded after a state are used."""
    model, optimizer, state = start_of_training()
    run(model, 0, optimizer)
    saved = state.state_dict()
    other = {name: 3 * tensor for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        state.load_state_dict(saved)
    refuses(lambda: model(batch(1)[0]), InvalidArgument, "loaded on some ranks only")
    model, optimizer, state = start_of_training()
    state.load_state_dict(saved)
    model.load_state_dict(other)
    with weights_used(model) as used, torch.no_grad():
        model(batch(1)[0])
    for index, block in enumerate(model.blocks):
        exact = full(other[f"blocks.{index}.linear.weight"])
        error = (used[-1][f"{id(block.linear)}"] - exact).abs().max()
        assert error < exact.abs().max() / 10  # 4 bits of a difference of 2/3 of the weights


CHECKS = [differences_equal_the_oracle, unchanged_weights_are_not_sent, replicas_do_not_drift]
CHECKS += [all_training_modes_with_differences, replicas_of_shards, bad_differences]
CHECKS += [exact_codec_by_rule, in_host_memory, state_loaded_on_one_rank]
CHECKS += [resumed_differences_are_bitwise_equal, differences_fit_any_number_of_shards]
