"""PRNG keys: what is one, and the seeds of noise that follow from it."""

import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.runtime import compat


def check_key(caller: str, key: Any) -> None:
    """Require None or one PRNG key: typed (jax.random.key) or raw (jax.random.PRNGKey).

    Raises:
        TypeError: it is something else.
        ValueError: it is an array of keys.
    """
    if key is None:
        return
    remedy = "give jax.random.key(step), or None to round to nearest"
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(
                f"{caller}: key is an array of {key.size} keys, of shape {key.shape}; a call takes "
                "one: index it, or vmap over it"
            )
        return
    if dtype != jnp.uint32:
        raise TypeError(f"{caller}: key is {key!r}, not a PRNG key; {remedy}")
    shape = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape
    if key.shape != shape:
        raise ValueError(
            f"{caller}: key is a uint32 array of shape {key.shape}; a raw key has shape {shape}; "
            f"{remedy}"
        )


class CallSeeds:
    """The seeds of one call's leaves, from its key.

    Errors of the groups along one mesh axis may be summed along another, so their noise must
    differ: a seed depends on the call, and on the device's place along the other axes over which
    its leaf varies. Where it does not vary, groups hold the same values, and get the same sums.
    """

    def __init__(self, key: jax.Array | None, call: str, axes: Iterable[Hashable] = ()) -> None:
        """Take the call's key.

        key: None: rounds to nearest, all seeds are 0. call: what it is and over what, so that calls
        of other verbs, axes and names with this key have other noise. axes: those it reduces over.
        """
        self._axes = frozenset(axes)
        self._keys: dict[tuple[Hashable, ...], jax.Array] = {}  # by axes that part groups
        if key is not None:
            self._keys[()] = jax.random.fold_in(key, zlib.crc32(call.encode()))

    def of(self, index: int, leaf: jax.Array) -> jax.Array:
        """Return the seed of leaf `index`, uint32 (1, 2)."""
        if not self._keys:
            return jnp.zeros((1, 2), jnp.uint32)
        others = tuple(sorted(compat.varying_axes(leaf) - self._axes, key=str))
        if others not in self._keys:
            key = self._keys[()]
            for axis in others:
                key = jax.random.fold_in(key, jax.lax.axis_index(axis))
            self._keys[others] = key
        return jax.random.bits(jax.random.fold_in(self._keys[others], index), (1, 2), jnp.uint32)


def example_seeds(seeds: jax.Array, examples: int, over: Sequence[Hashable] | None) -> jax.Array:
    """Return seeds for each example of a vmap under one key: uint32 (n, 2) to (examples, n, 2).

    over: the mesh axes that vmap's spmd_axis_name spreads all examples over; so many are here.
    """

    def of(example: jax.Array, seed: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, example))

    numbers = jnp.arange(examples, dtype=jnp.uint32)
    bound = tuple(axis for axis in over or () if compat.is_shard_map_axis(axis))
    if bound:
        numbers += examples * jax.lax.axis_index(bound).astype(jnp.uint32)
    return jax.vmap(lambda number: jax.vmap(lambda seed: of(number, seed))(seeds))(numbers)
