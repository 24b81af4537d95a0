"""Send and apply one fragment of the parameters, inside of shard_map.

1. fragments of a tree: the same tree, with None in place of the leaves of other fragments
2. send: average over devices the difference of outer parameters and parameters, plus residuals
3. apply: the outer optimizer steps from the outer parameters, and parameters follow
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cgx_ops.config import Config
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups, require_own_messages
from cgx_ops.jax._src.collectives.options import Options, name_of_leaf
from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.collectives.trees import checked_leaf
from cgx_ops.jax._src.transforms.base import is_none
from cgx_ops.methods.outer_loop import strided

CALLER = "diloco"

# ---- 1. fragments of a tree ----------------------------------------------------------------------


def values_of(tree: Any) -> Any:
    """Return a tree with None for the leaves that are not averaged: see is_value().

    Raises:
        TypeError: a leaf is of float64 or complex.
    """

    def value(path: Any, leaf: Any) -> Any:
        return checked_leaf(CALLER, path, leaf) if is_value(leaf) else None

    return jax.tree_util.tree_map_with_path(value, tree)


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is averaged: it is floating-point and not empty.

    jaxlib 0.11 crashes while it compiles a shard_map in which some operands are empty.
    """
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) and 0 not in jnp.shape(leaf)


def merged(tree: Any, values: Any) -> Any:
    """Return a tree with the leaves of `values`, a tree like it, where these are not None."""
    return jax.tree.map(
        lambda value, leaf: leaf if value is None else value, values, tree, is_leaf=is_none
    )


def part(like: Any, tree: Any, fragment: int, fragments: int) -> Any:
    """Return a fragment of a tree.

    Args:
        like: The outer parameters. Their leaves and the order of these define the fragments.
        tree: A tree like it, or with None in place of further leaves.
        fragment: The index of the fragment.
        fragments: The number of fragments.

    Raises:
        InvalidArgument (a ValueError): There are fewer layers than fragments.
    """
    structure = jax.tree.structure(like)
    members = _members(structure, fragments)[fragment]
    leaves = structure.flatten_up_to(tree)
    return structure.unflatten([x if i in members else None for i, x in enumerate(leaves)])


@functools.cache
def _members(structure: Any, fragments: int) -> list[frozenset[int]]:
    """Return the indices of the leaves of each fragment."""
    indices = structure.unflatten(range(structure.num_leaves))
    if not structure.num_leaves:
        return [frozenset()] * fragments
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(indices)]
    names = [name_of_leaf(path) for path in paths]  # "blocks.3.kernel" belongs to layer "blocks.3"
    return [frozenset(members) for members in strided(names, fragments)]


# ---- 2, 3. send and apply ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Method:
    """How fragments are sent and applied.

    Attributes:
        axis_name: The mesh axes over which devices train independently.
        optimizer: The outer optimizer, an optax.GradientTransformation.
        alpha: The share of a device's own parameter that is kept when a fragment is applied.
        options: How leaves are sent.
        senders: Whether a mean is over the devices that sent a value, instead of all devices.
        mesh: The mesh of the devices, if it is known.
        is_configured: Whether the user gave a config. Then a setting without effect is an error.
    """

    axis_name: Axes
    optimizer: Any
    alpha: float
    options: Options
    senders: bool
    mesh: Mesh | None
    is_configured: bool

    def kept(self, tree: Any) -> Any:
        """Return a tree with None in place of the leaves that have no residual."""

        def kept(path: Any, leaf: Any) -> Any:
            config = self.options.of(path, leaf)
            kept_back = config.compressor == "topk" and config.keeps_residuals
            if self.senders and not (config.is_exact or kept_back):
                raise ValueError(
                    f"{CALLER}: mean_over='senders' needs leaves of which each device sends some "
                    f"values, and '{name_of_leaf(path)}' has {config}: use compressor='topk', and "
                    "only rules with 'topk' or 32 bits"
                )
            return leaf if self.options.keeps(path, leaf) else None

        if self.is_configured:
            self.options.refuse_idle_feedback(tree)
        return jax.tree_util.tree_map_with_path(kept, tree)

    def settings(self) -> dict[str, Any]:
        """Return settings that must be equal in all processes and are not part of programs."""
        options = self.options
        return {
            "config": str(options.config),
            "rules": repr(options.rules),
            "carrier": options.carrier,
            "a key": options.key is not None,
            "mean_over": "senders" if self.senders else "ranks",
        }

    def send(
        self, fragment: int, params: Any, outer_parameters: Any, residual: Any, step: jax.Array
    ) -> tuple[Any, Any]:
        """Return the average of a fragment, and its quantization error: the next residual.

        Args:
            fragment: The index of the fragment.
            params: Parameters, (1, *shape), as all per-device values.
            outer_parameters: float32.
            residual: The last quantization error, or None.
            step: The number of inner steps done, which changes the noise if there is a key.
        """
        groups = mesh_groups(CALLER, self.axis_name)
        axes = groups.axes
        if self.senders:
            require_own_messages(CALLER, self.mesh, groups, "spread parameters over it")
        # As in all frameworks, the subtraction is in float32, and the core adds the residual.
        delta = jax.tree.map(lambda a, p: a - p[0].astype(jnp.float32), outer_parameters, params)
        configs = self.options.of_tree(delta)

        def decayed(config: Config, e: jax.Array | None) -> jax.Array | None:
            if e is None:
                return None
            return e[0] if config.residual_decay == 1 else e[0] * config.residual_decay

        own = jax.tree.map(decayed, configs, residual)
        options = self.options.at_step(step).of_message(str(fragment))
        mean, lost = reduce_over(options, delta, own, axes, "avg", configs)
        if self.senders:
            mean = self._of_senders(options, mean, delta, own, lost, configs)
        return mean, jax.tree.map(lambda e: e[None], lost)

    def _of_senders(
        self, options: Options, mean: Any, delta: Any, own: Any, lost: Any, configs: Any
    ) -> Any:
        """Return the average over the devices that sent a value, from the average over all devices.

        A second message counts the senders: each device sends 1 at the indices of its values. It
        costs the indices once more, which is still a small fraction of a bit per value.
        """

        def sent_values(
            config: Config, d: jax.Array, e: jax.Array | None, kept: Any
        ) -> jax.Array | None:
            if e is None or config.is_short(d.size) or config.is_exact:
                return None
            # A value that is not sent stays whole: it is the core's d + e. XLA's may differ by the
            # rounding of e's decay and of the sum, each at most 2^-24 of |d| + |e|.
            is_whole = jnp.abs(kept - (d + e)) <= 2.0**-22 * (jnp.abs(d) + jnp.abs(e))
            return (~is_whole).astype(jnp.float32)

        sent = jax.tree.map(sent_values, configs, delta, own, lost)
        ones = jax.tree.map(
            lambda config, s: None if s is None else replace(config, value_bits=1), configs, sent
        )
        axes = mesh_groups(CALLER, self.axis_name).axes
        count, _ = reduce_over(options.of_message("sent"), sent, None, axes, "sum", ones)
        devices = mesh_groups(CALLER, axes).size

        def of_senders(x: jax.Array, n: jax.Array | None) -> jax.Array:
            return x if n is None else x * devices / jnp.maximum(jnp.round(n), 1)

        return jax.tree.map(of_senders, mean, count)

    def apply(
        self, params: Any, outer_parameters: Any, outer: Any, average: Any
    ) -> tuple[Any, Any, Any]:
        """Return parameters, outer parameters and the outer optimizer's state after its step."""
        axes = mesh_groups(CALLER, self.axis_name).axes
        updates, outer = self.optimizer.update(average, outer, outer_parameters)
        stepped = jax.tree.map(lambda a, u: (a + u).astype(jnp.float32), outer_parameters, updates)

        def mixed(p: jax.Array, a: jax.Array) -> jax.Array:
            if self.alpha:
                a = self.alpha * p[0].astype(jnp.float32) + (1 - self.alpha) * a
            return a.astype(p.dtype)[None]

        return vary_tree(jax.tree.map(mixed, params, stepped), axes), stepped, outer
