"""State and errors of the hook.

1. rebuilt buckets, messages, rules, blocks
2. checkpoints; those for other numbers of ranks are in run_torch_restart.py
3. optimizers
4. bad input
"""

from typing import Any

import method_cases
import torch
from failing import fails
from method_cases import Method
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch_training import (
    RANK,
    SIZE,
    backward,
    batch,
    gathered,
    identical_on_all_ranks,
    loss_of,
    network,
    train,
)

import cgx_ops.torch
from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops.torch import ddp

from .common import MATRICES, hooked


def tensors_of_state(state: ddp.DeepGradientState) -> dict[str, torch.Tensor]:
    kept = {"u": state.momenta, "v": state.residuals}
    return {
        f"{what} {n}": x.clone() for what, each in kept.items() for n, x in each.tensors.items()
    }


METHOD = Method(ddp.deep_gradient_hook, ddp.DeepGradientState, hooked, tensors_of_state)


# ---- 1. buckets, rules, blocks -------------------------------------------------------------------


def buckets() -> None:
    """Check that there are one sparse and one exact message."""
    for state in method_cases.buckets(METHOD, messages=2 if SIZE > 1 else 1):
        assert state.residuals.tensors.keys() == MATRICES


def carried_by_torch() -> None:
    method_cases.carried_by_torch(METHOD, config=Config(compressor="topk"), clip=1.0)


def inside_torchs_wrapper() -> None:
    """Compare with averaging 16-bit gradients; the model itself is float32."""
    hook: Any = default_hooks.fp16_compress_wrapper(ddp.deep_gradient_hook)  # type: ignore[arg-type]
    model, state = hooked(hook=hook)
    weights = train(model, range(5))
    identical_on_all_ranks(weights[-1])
    assert {x.dtype for x in tensors_of_state(state).values()} == {torch.float32}


def rules_and_blocks() -> None:
    rules = [(r"2\.weight", 32), (r"4\.weight", {"density": 0.5})]
    model, state = hooked(rules=Rules(rules, exact_vectors=False), momentum=0.0)
    backward(model, 0)
    # The last bias has 8 elements, which are sent exactly.
    assert state.residuals.tensors.keys() == {"0.weight", "4.weight", "0.bias", "2.bias"}
    if SIZE > 1:
        assert int((state.residuals.tensors["4.weight"] == 0).sum()) == 96
    # Exact steps are those of momentum SGD, and send the whole residual.
    for nesterov in (False, True):
        model, state = hooked(nesterov=nesterov)
        alone = network()
        twin = torch.optim.SGD(alone.parameters(), 0.05, 0.9, nesterov=nesterov)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(4):
            for net, of_net in ((model, optimizer), (alone, twin)):
                of_net.zero_grad()
                with cgx_ops.torch.uncompressed():
                    loss_of(net, batch(RANK, step)).backward()
                if net is alone:
                    for p in alone.parameters():
                        assert p.grad is not None
                        p.grad.copy_(torch.stack(gathered(p.grad)).mean(0))
                of_net.step()
        for p, q in zip(model.module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
        assert not any(v.any() for v in state.residuals.tensors.values())
    # Sparse steps continue from there.
    backward(model, 4)
    assert SIZE == 1 or all(v.any() for v in state.residuals.tensors.values())
    with cgx_ops.torch.compressed(Config(bits=8)):
        fails(Exception, "compressor is 'uniform'; Deep Grad", lambda: backward(model, 5))


# ---- 2. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    """Resume during the warm-up."""
    method_cases.resumed(METHOD, 9, warmup_steps=6, density=0.01, nesterov=True, clip=1.0)


# ---- 3. optimizers -------------------------------------------------------------------------------


def optimizers() -> None:
    """Check that momentum is applied once: by the state or by the optimizer."""
    words = "momentum 0.5, so momentum would be applied twice: use torch.optim.SGD"
    model, state = hooked()
    twice = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    fails(InvalidArgument, words, lambda: state.check(twice))
    twice.step()  # without gradients
    backward(model, 0)
    before = [p.clone() for p in model.parameters()]
    fails(InvalidArgument, words, twice.step)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    adam = torch.optim.AdamW(model.parameters(), 0.1)
    backward(model, 1)
    fails(InvalidArgument, "AdamW has momentum 0.9, so", adam.step)
    # Optimizers without momentum, with other parameters, or with gradients from elsewhere do not
    # raise.
    backward(model, 2)
    torch.optim.SGD(network().parameters(), 0.1, momentum=0.5).step()
    torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1).step()
    twice.step()
    model, _ = hooked(momentum=0.0)
    backward(model, 0)
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.5).step()


# ---- 4. bad input --------------------------------------------------------------------------------


def bad_arguments() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"density": 0}, "density is 0; it must be more than 0 and at most 1"),
        ({"density": 1.5}, "density is 1.5; it must be more than 0 and at most 1"),
        ({"density": float("nan")}, "density is nan"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and less than 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
        ({"nesterov": 1}, "nesterov is 1"),
        ({"nesterov": True, "momentum": 0}, "Nesterov's momentum must be more than 0"),
        ({"clip": 0}, "clip is 0; it must be a number above 0, or None"),
        ({"clip": float("inf")}, "clip is inf"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be an integer of at least 0"),
        ({"warmup_steps": 2.5}, "warmup_steps is 2.5"),
        ({"config": Config()}, "compressor is 'uniform'; Deep Gradient Compression sends"),
        ({"config": Config(compressor="topk", density=0.1)}, "Config.density is 0.1; give density"),
        ({"config": Config(compressor="topk", algorithm="sra")}, "algorithm is 'sra', which"),
        ({"config": Config(compressor="topk", residual_decay=0.9)}, "residual_decay 0.9"),
        ({"config": Config(compressor="topk", error_feedback=False)}, "error_feedback is False"),
        ({"carrier": "mpi"}, "carrier is 'mpi'; it must be 'native' or 'c10d'"),
        ({"config": 4}, "config is 4; it must be a cgx_ops.Config"),
    ]
    for options, words in refused:
        fails(InvalidArgument, words, lambda own=options: ddp.DeepGradientState(**own))


def bad_gradients() -> None:
    method_cases.bad_gradients(METHOD)
    rules = Rules([(r"2\.weight", {"compressor": "levels", "bits": 2})])
    model, _ = hooked(rules=rules)
    fails(Exception, "a rule gives layer '2.weight' compressor='le", lambda: backward(model, 0))


def bad_states() -> None:
    model, state = hooked()
    train(model, range(3))
    # States of another model, with a sparse layer that is now exact, and of another rank.
    for change, words in (
        (lambda s: s.residuals.tensors.update({"2.weight": torch.ones(5)}), "has 5 elements"),
        (lambda s: s.momenta.tensors.update({"2.bias": torch.ones(5)}), "has 5 elements"),
        (
            lambda s: setattr(s, "rules", Rules([("2", 32)])),
            "layer '2.weight' was sparse, so that its residuals differ",
        ),
    ):
        other, broken = hooked(rules=Rules())
        broken.load_state_dict(state.state_dict() | {"rules": Rules()})
        change(broken)
        fails(Exception, words, lambda m=other: backward(m, 0))
    other, broken = hooked(rules=Rules())
    state.residuals.owner = RANK, 7  # as saved in another job
    broken.load_state_dict(state.state_dict() | {"rules": Rules()})
    fails(Exception, f"those of rank {RANK} of 7", lambda: backward(other, 0))
    method_cases.bad_states(METHOD)


CHECKS = [resumed, optimizers, bad_arguments, bad_gradients]
CHECKS += [buckets, carried_by_torch, inside_torchs_wrapper, rules_and_blocks, bad_states]
