"""PRNG keys: checks, and the seeds of random rounding derived from them."""

import zlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.runtime import compat


def check_key(caller: str, key: Any) -> None:
    """Require None or one PRNG key: typed (jax.random.key) or raw (jax.random.PRNGKey).

    Raises:
        TypeError: It is something else.
        ValueError: It is an array of keys.
    """
    if key is None:
        return
    remedy = "give jax.random.key(step), or None to round to nearest"
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(
                f"{caller}: key is an array of {key.size} keys, of shape {key.shape}; a call takes "
                "one key: index the array, or vmap over it"
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
    """The seeds of one call's leaves, derived from its key.

    The errors of groups along one mesh axis may be summed along another, so their noise must
    differ. So a seed depends on the call, and on the device's index along the other axes over which
    its leaf varies. Where a leaf does not vary, groups hold the same values, and get the same sums.

    Args:
        key: The key; None rounds to nearest, and all seeds are 0.
        call: The verb, axes and name of the call. Calls with other texts have other noise.
        axes: The axes that are reduced.
    """

    def __init__(self, key: jax.Array | None, call: str, axes: Iterable[Hashable] = ()) -> None:
        self._axes = frozenset(axes)
        self._keys: dict[tuple[Hashable, ...], jax.Array] = {}  # by the axes that separate groups
        if key is not None:
            self._keys[()] = jax.random.fold_in(key, zlib.crc32(call.encode()))

    def of(self, index: int, leaf: jax.Array) -> jax.Array:
        """Return the seed of leaf `index`: uint32 (1, 2)."""
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
    """Return seeds for each example of a vmap with one key: uint32 (n, 2) to (examples, n, 2).

    `over`: The mesh axes over which vmap's spmd_axis_name spreads the examples. `examples` of them
    are on this device.
    """

    def of(example: jax.Array, seed: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, example))

    numbers = jnp.arange(examples, dtype=jnp.uint32)
    bound = tuple(axis for axis in over or () if compat.is_shard_map_axis(axis))
    if bound:
        numbers += examples * jax.lax.axis_index(bound).astype(jnp.uint32)
    return jax.vmap(lambda number: jax.vmap(lambda seed: of(number, seed))(seeds))(numbers)
