"""What tests of diloco share: a model, what inner steps make of it, a transcription in numpy."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import reference
from jax_cases import Values, normal, same_bits, spread

from cgx_ops.jax import DiLoCo
from cgx_ops.outer_loop import Schedule

# Three layers, in two or three fragments; a bias that travels exact by its size. XLA:CPU runs what
# is sent of the last one in the background; programs of less than 1000 operations or so it does not.
SHAPES = {
    "blocks/0/kernel": (24, 30),
    "blocks/0/bias": (12,),
    "blocks/1/kernel": (7, 90),
    "head/kernel": (1700,),
}
_F = np.float32


def weights(dtype: Any = np.float32) -> Any:
    """Return one device's parameters, as a tree."""
    leaves = [normal(i, *shape).astype(dtype) for i, shape in enumerate(SHAPES.values())]
    return tree_of(dict(zip(SHAPES, leaves, strict=True)))


def tree_of(leaves: dict[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *folders, last = name.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = leaf
    return tree


def leaf_of(tree: Any, name: str) -> Any:
    for word in name.split("/"):
        tree = tree[word]
    return tree


def moves(step: int, devices: int) -> dict[str, Values]:
    """Return what an inner step adds to each device's parameters, whatever they are."""
    return {
        name: 0.1 * normal(1000 * step + i, 1, *shape)
        + 0.2 * normal(1000 * step + 500 + i, devices, *shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def added(params: Any, by: Any) -> Any:
    """Return parameters after an inner step."""
    return jax.tree.map(lambda p, d: p + d.astype(p.dtype), params, by)


moved = jax.jit(added)


def spread_moves(mesh: Any, step: int, devices: int) -> Any:
    """Return them as arrays of the mesh."""
    rows = jax.P("d")
    return tree_of({n: spread(mesh, x, rows) for n, x in moves(step, devices).items()})


def trained(
    loop: DiLoCo, mesh: Any, start: Any, steps: Sequence[int],
    outer: Callable[..., Any] | None = None,
) -> Any:  # fmt: skip
    """Return parameters and state after these steps from others."""
    params, state = start
    for step in steps:
        params = moved(params, spread_moves(mesh, step, mesh.size))
        params, state = (outer or loop.outer)(params, state)
    return params, state


def all_same(a: Any, b: Any) -> bool:
    """Tell whether two trees have the same leaves, to the bit."""
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(map(same_bits, a, b))


class Transcription:
    """An outer loop over all ranks, in numpy: each operation rounded to float32.

    Attributes:
        params: of each rank, by name, flat.
        anchor, momentum, residuals: by name; residuals of each rank.
    """

    def __init__(
        self, ranks: int, schedule: Schedule, members: Sequence[Sequence[str]],
        segment_of: Callable[[str, int], reference.Segment], *, rate: float = 0.7,
        momentum: float = 0.9, decay: float = 1.0, senders: bool = False,
    ) -> None:  # fmt: skip
        first = {name: leaf_of(weights(), name).ravel() for name in SHAPES}
        self.params = [{n: x.copy() for n, x in first.items()} for _ in range(ranks)]
        self.anchor = {n: x.copy() for n, x in first.items()}
        self.momentum = {n: np.zeros_like(x) for n, x in first.items()}
        self.residuals = {n: [np.zeros_like(x) for _ in range(ranks)] for n, x in first.items()}
        self.schedule, self.members, self.segment_of = schedule, members, segment_of
        self.rate, self.mu, self.decay, self.senders = _F(rate), _F(momentum), _F(decay), senders
        self.steps, self.flight = 0, {}

    def step(self) -> None:
        """Do what is due after an inner step, by which `params` have changed."""
        self.steps += 1
        sent, applied = (
            of(self.steps) for of in (self.schedule.sent_after, self.schedule.applied_after)
        )
        if sent is not None:
            self.flight = {n: self._sent(n) for n in self.members[sent]}
        if applied is not None:
            for n in self.members[applied]:
                self._apply(n, *self.flight[n])

    def _sent(self, n: str) -> tuple[Values, list[Values]]:
        lost = [e * self.decay for e in self.residuals[n]]
        deltas = [self.anchor[n] - params[n] for params in self.params]
        segment = self.segment_of(n, deltas[0].size)
        if not self.senders:
            mean = reference.allreduce(deltas, [segment], op="avg", algorithm="sra", residuals=lost)
            return mean, lost
        owed = [d + e for d, e in zip(deltas, lost, strict=True)]
        if reference.travels_exact(segment, 0):
            return reference.allreduce(owed, [segment], op="avg", algorithm="one_shot"), lost
        total = reference.allreduce(deltas, [segment], algorithm="one_shot", residuals=lost)
        count = np.sum([a != e for a, e in zip(owed, lost, strict=True)], 0)
        return total / np.maximum(count, 1).astype(_F), lost

    def _apply(self, n: str, mean: Values, lost: list[Values]) -> None:
        self.momentum[n] = self.mu * self.momentum[n] + mean
        self.anchor[n] = self.anchor[n] - self.rate * (mean + self.mu * self.momentum[n])
        self.residuals[n] = lost
        alpha = _F(self.schedule.fragment_update_alpha)
        for params in self.params:
            params[n] = alpha * params[n] + (1 - alpha) * self.anchor[n]
