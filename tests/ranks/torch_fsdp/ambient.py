"""Averages have the same bits for every default dtype, default device and autocast setting."""

import contextlib
from collections.abc import Mapping

import torch
from ambient_settings import DEFAULTS, Setting, around_backward, autocast
from torch.nn.functional import cross_entropy

from cgx_ops import Config
from cgx_ops.torch import fsdp
from cgx_ops.torch.fsdp.feedback import Feedback

from .common import Model, batch, sharded, weights

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)
STEPS = 5


def trained(
    feedback: Feedback | None, consolidates: bool, forward: Setting, rest: Setting
) -> torch.Tensor:
    """Return the weights after some steps, with forward passes and the rest in these contexts."""
    model = sharded(Model())
    state = fsdp.compress(model, LEVELS, weights=Config(bits=8), feedback=feedback)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step, (x, labels) in enumerate([batch(step) for step in range(STEPS)]):
        with rest():
            if consolidates and step == 3:
                state.consolidate()
            with forward():
                loss = cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([x.flatten() for x in weights(model).values()])


def compare(forward: Setting, settings: Mapping[str, Setting]) -> None:
    for feedback in (None, fsdp.LOCO):
        for consolidates in (False, True):
            how = feedback, consolidates
            want = trained(*how, forward, contextlib.nullcontext)
            for what, rest in settings.items():
                assert torch.equal(trained(*how, forward, rest), want), (*how, what)


def defaults() -> None:
    compare(contextlib.nullcontext, DEFAULTS)


def in_autocast() -> None:
    compare(autocast(torch.bfloat16), around_backward(torch.bfloat16))


CHECKS = [defaults, in_autocast]
