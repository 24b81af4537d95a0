"""What an outer loop (diloco.py) does with one fragment of the parameters, inside of shard_map.

1. fragments of a tree: the same tree, with None in place of the leaves that are in others
2. send: the average over devices of how far parameters have come from the anchors, with what
   compression lost before
3. apply: the outer optimizer steps from the anchors, and parameters follow
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cgx_ops import _native
from cgx_ops.config import Config
from cgx_ops.jax.knobs import Knobs, keeps_by_default, name_of_leaf
from cgx_ops.jax.mesh_groups import Axes, mesh_groups, require_own_messages
from cgx_ops.jax.primitive import vary_tree
from cgx_ops.jax.psum import reduce_over
from cgx_ops.jax.trees import checked_leaf
from cgx_ops.outer_loop import strided
from cgx_ops.rules import EXACT_BITS

CALLER = "diloco"

# ---- 1. fragments of a tree ----------------------------------------------------------------------


def values_of(tree: Any) -> Any:
    """Return a tree with None for the leaves that an outer loop leaves alone: see is_value().

    Raises:
        TypeError: a leaf is of float64 or complex.
    """

    def value(path: Any, leaf: Any) -> Any:
        return checked_leaf(CALLER, path, leaf) if is_value(leaf) else None

    return jax.tree_util.tree_map_with_path(value, tree)


def is_value(leaf: Any) -> bool:
    """Tell whether a leaf is averaged: it is floating-point and not empty.

    jaxlib 0.11 crashes while it compiles a shard_map in which some operands are empty.
    """
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and 0 not in jnp.shape(leaf)


def merged(tree: Any, values: Any) -> Any:
    """Return a tree with the leaves of `values`, a tree like it, where there are some."""
    return jax.tree.map(
        lambda value, leaf: leaf if value is None else value, values, tree, is_leaf=_is_none
    )


def part(like: Any, tree: Any, fragment: int, fragments: int) -> Any:
    """Return a fragment of a tree.

    Args:
        like: the anchors; it says which leaves there are, and in which fragments.
        tree: like it, or with None in place of some more leaves.
        fragment: which one.
        fragments: how many there are.

    Raises:
        InvalidArgument (a ValueError): there are fewer layers than fragments.
    """
    structure = jax.tree.structure(like)
    members = _members(structure, fragments)[fragment]
    leaves = structure.flatten_up_to(tree)
    return structure.unflatten([x if i in members else None for i, x in enumerate(leaves)])


@functools.cache
def _members(structure: Any, fragments: int) -> list[frozenset[int]]:
    """Return which leaves each fragment has, by their places."""
    places = structure.unflatten(range(structure.num_leaves))
    if not structure.num_leaves:
        return [frozenset()] * fragments
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(places)]
    names = [name_of_leaf(path) for path in paths]  # "blocks.3.kernel" is of the layer "blocks.3"
    return [frozenset(members) for members in strided(names, fragments)]


def _is_none(leaf: Any) -> bool:
    return leaf is None


# ---- 2, 3. send and apply ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Method:
    """How fragments are sent and applied.

    Attributes:
        axis_name: the mesh axes over which devices train by themselves.
        optimizer: the outer one, an optax.GradientTransformation.
        alpha: how much of a parameter stays the device's own when it is applied.
        checked: how leaves travel; `knobs` unchecked, as `psum_q` takes them.
        knobs: so.
        error_feedback: as of diloco().
        residual_decay: so.
        senders: whether a mean is over the devices that sent a value, not over all.
        mesh: of the devices, if it is known.
    """

    axis_name: Axes
    optimizer: Any
    alpha: float
    checked: Knobs
    knobs: dict[str, Any]
    error_feedback: bool | None
    residual_decay: float
    senders: bool
    mesh: Mesh | None

    def kept(self, tree: Any) -> Any:
        """Return a tree with None in place of the leaves that have no residual."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if self.keeps(self.checked.config_of(path, leaf)) else None,
            tree,
        )

    def settings(self) -> dict[str, Any]:
        """Return what all processes must have alike, but for what programs say."""
        checked = self.checked
        return {
            "knobs": str(checked.config),
            "rules": repr(checked.rules),
            "carrier": checked.carrier,
            "a key": checked.key is not None,
            "error_feedback": self.error_feedback,
            "residual_decay": self.residual_decay,
            "mean_over": "senders" if self.senders else "ranks",
        }

    def keeps(self, config: Config) -> bool:
        """Tell whether what leaves lose that travel so is kept."""
        if config.bits == EXACT_BITS:
            return False
        return keeps_by_default(config) if self.error_feedback is None else self.error_feedback

    def send(
        self, fragment: int, params: Any, anchor: Any, residual: Any, step: jax.Array
    ) -> tuple[Any, Any]:
        """Return the average of a fragment, and what is lost of it: the next residual.

        Args:
            fragment: its number.
            params: (1, *shape), as all that is a device's own.
            anchor: float32.
            residual: what was lost before, or None.
            step: the inner steps done: of noise, if there is a key.
        """
        groups = mesh_groups(CALLER, self.axis_name)
        axes = groups.axes
        if self.senders:
            require_own_messages(CALLER, self.mesh, groups, "spread parameters over it")
        # float32 subtracts here, and adds the residual in the core: all frameworks do.
        delta = jax.tree.map(lambda a, p: a - p[0].astype(jnp.float32), anchor, params)
        own = jax.tree.map(lambda e: e[0], residual)
        if self.residual_decay != 1:
            own = jax.tree.map(lambda e: e * self.residual_decay, own)
        key = self.checked.key
        noise = None if key is None else jax.random.fold_in(key, step)
        name = f"{self.checked.name}/{fragment}"
        knobs = {**self.knobs, "key": noise}
        average = self._average_of_senders if self.senders else self._average
        mean, lost = average(delta, own, axes, name, knobs)
        return mean, jax.tree.map(lambda e: e[None], lost)

    def _average(self, delta: Any, own: Any, axes: Any, name: str, knobs: Any) -> tuple[Any, Any]:
        return reduce_over(CALLER, delta, own, axes, "avg", name=name, **knobs)

    def _average_of_senders(
        self, delta: Any, own: Any, axes: Any, name: str, knobs: Any
    ) -> tuple[Any, Any]:
        """Average what devices have sent over those that sent it.

        How many these were is a second message, in which each says 1 at its places. It costs their
        indices once more, which is still a small part of a bit a value.
        """
        mean, lost = reduce_over(CALLER, delta, own, axes, "avg", name=name, **knobs)

        def places(path: Any, d: jax.Array, e: jax.Array | None, kept: Any) -> jax.Array | None:
            config = self.checked.config_of(path, d)
            small = d.size < max(_native.SMALLEST_COMPRESSED, config.minimal_size)
            if e is None or small or config.bits == EXACT_BITS:
                return None
            # What is not sent is kept whole: the core's d + e, from which XLA's may differ by the
            # rounding of e's decay and of the sum, each at most 2^-24 of |d| + |e|.
            is_whole = jnp.abs(kept - (d + e)) <= 2.0**-22 * (jnp.abs(d) + jnp.abs(e))
            return (~is_whole).astype(jnp.float32)

        sent = jax.tree_util.tree_map_with_path(places, delta, own, lost)
        ones = {**knobs, "value_bits": 1}
        if (rules := knobs.get("rules")) is not None:  # all values are 1
            ones["rules"] = rules.with_first(("", {"value_bits": 1}))
        count, _ = reduce_over(CALLER, sent, None, axes, "sum", name=f"{name}/sent", **ones)
        devices = mesh_groups(CALLER, axes).size

        def of_senders(x: jax.Array, n: jax.Array | None) -> jax.Array:
            return x if n is None else x * devices / jnp.maximum(jnp.round(n), 1)

        return jax.tree.map(of_senders, mean, count), lost

    def apply(self, params: Any, anchor: Any, outer: Any, average: Any) -> tuple[Any, Any, Any]:
        """Return parameters, anchors and the outer optimizer's state after its step."""
        axes = mesh_groups(CALLER, self.axis_name).axes
        updates, outer = self.optimizer.update(average, outer, anchor)
        anchor = jax.tree.map(lambda a, u: (a + u).astype(jnp.float32), anchor, updates)

        def mixed(p: jax.Array, a: jax.Array) -> jax.Array:
            if self.alpha:
                a = self.alpha * p[0].astype(jnp.float32) + (1 - self.alpha) * a
            return a.astype(p.dtype)[None]

        return vary_tree(jax.tree.map(mixed, params, anchor), axes), anchor, outer
