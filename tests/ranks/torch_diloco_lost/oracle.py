"""The oracle of a loop: what each rank of a group must have after each step, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import reference
import torch
from support import torch_cases as tc
from torch import nn

from cgx_ops.torch.diloco import DiLoCo

Values = dict[str, npt.NDArray[np.float32]]
_ROUNDED: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
}


def moves(loop: DiLoCo, member: int, step: int) -> Values:
    """Return how a member's inner optimizer changes the parameters in a step."""
    random = np.random.default_rng([member, step])
    return {
        name: (0.1 * random.standard_normal(p.numel())).astype(np.float32)
        for name, p in zip(loop.names, loop.parameters, strict=True)
    }


def flat(loop: DiLoCo, tensors: list[nn.Parameter]) -> Values:
    """Return copies by name, flat, float32."""
    return {
        n: tc.to_numpy(p.detach().float()).copy() for n, p in zip(loop.names, tensors, strict=True)
    }


def momenta(loop: DiLoCo) -> Values:
    """Return the momenta of the outer optimizer, zeros before the first outer step."""
    found = {}
    for name, outer in zip(loop.names, loop.outer_parameters, strict=True):
        of = loop.outer_optimizer.state[outer].get("momentum_buffer")
        found[name] = tc.to_numpy(torch.zeros_like(outer) if of is None else of).copy()
    return found


def residuals(loop: DiLoCo) -> Values:
    """Return this rank's residuals, zeros where it has none."""
    known = loop.exchange.residuals.tensors
    return {
        n: tc.to_numpy(known[n]).copy() if n in known else np.zeros(p.numel(), np.float32)
        for n, p in zip(loop.names, loop.parameters, strict=True)
    }


class Oracle:
    """All ranks of a group that train without a loss.

    Attributes:
        members: the number of each rank, which determines its training.
        loop: the reference, a rank for each member.
        applied: number of applied averages.
        history: the values after each number of averages, and the names that the last one changed.
        sums: of all messages of applied averages: sizes times means, and differences of all ranks.
    """

    def __init__(self, like: DiLoCo, members: list[int], states: list[dict[str, Any]]) -> None:
        """Create the oracle from the states of all ranks, in order; see state_of()."""
        config, self.members, self._like = like.exchange.config, members, like
        self._round = _ROUNDED[like.parameters[0].dtype]

        def segment_of(_: str, numel: int) -> reference.Segment:
            return reference.Segment(
                0, numel, config.bits, config.bucket_size, config.compressor, rounding="nearest"
            )

        fragments = [[like.names[i] for i in places] for places in like.fragments]
        first = states[0]
        self.loop = reference.OuterLoop(
            first["outer"], len(members), like.schedule, fragments, segment_of,
            rate=0.5, momentum=0.5, feedback=config.keeps_residuals,
        )  # fmt: skip
        self.loop.params = [copy.deepcopy(each["params"]) for each in states]
        self.loop.momentum = copy.deepcopy(first["momentum"])
        self.loop.residuals = {n: [s["residuals"][n] for s in states] for n in like.names}
        self.loop.steps, self.applied = first["steps"], first["applied"]
        self.history: dict[int, dict[str, Any]] = {}
        self.sums: list[tuple[Values, Values]] = []
        self._differences: Values = {}
        self._remember([])

    def _remember(self, names: list[str]) -> None:
        self.history[self.applied] = {
            "names": names,
            "outer": copy.deepcopy(self.loop.anchor),
            "momentum": copy.deepcopy(self.loop.momentum),
            "residuals": copy.deepcopy(self.loop.residuals),
            "sums": list(self.sums),
        }

    def step(self) -> None:
        """Let all members train for a step."""
        loop, step = self.loop, self.loop.steps
        for member, params in zip(self.members, loop.params, strict=True):
            for name, change in moves(self._like, member, step).items():
                params[name] = self.rounded(params[name] + self.rounded(change))
        schedule = self._like.schedule
        sent, applied = schedule.sent_after(step + 1), schedule.applied_after(step + 1)
        if sent is not None:
            self._differences = {
                n: np.sum([loop.anchor[n].astype(np.float64) - p[n] for p in loop.params], axis=0)
                for n in loop.members[sent]
            }
        before = copy.deepcopy(loop.momentum)
        if applied is not None and not self._differences:  # sent before the group was made
            loop.steps += 1
            return
        loop.step()
        loop.params = [{n: self.rounded(x) for n, x in each.items()} for each in loop.params]
        if applied is not None:
            means = {
                n: len(self.members) * (loop.momentum[n].astype(np.float64) - 0.5 * before[n])
                for n in self._differences
            }
            self.sums.append((means, self._differences))
            self._differences = {}
            self.applied += 1
            self._remember(loop.members[applied])

    def rounded(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return x.astype(self._round).astype(np.float32)


def state_of(loop: DiLoCo) -> dict[str, Any]:
    """Return the state of this rank."""
    return {
        "steps": loop.steps,
        "applied": loop.applied,
        "exchanges": loop.exchange.steps,
        "outer": flat(loop, loop.outer_parameters),
        "momentum": momenta(loop),
        "params": flat(loop, loop.parameters),
        "residuals": residuals(loop),
    }


def same(a: Values, b: Values, what: str) -> None:
    """Require equal arrays, bit for bit."""
    for name, x in a.items():
        assert np.array_equal(x, b[name]), f"{what}: {name} differs"
