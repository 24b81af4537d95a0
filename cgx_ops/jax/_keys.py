"""PRNG keys: what is one, and the seeds of noise that follow from it."""

from typing import Any

import jax
import jax.numpy as jnp


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


def leaf_seed(key: jax.Array | None, index: int) -> jax.Array:
    """Return the seed of a call's leaf, uint32 (1, 2); zeros without a key."""
    if key is None:
        return jnp.zeros((1, 2), jnp.uint32)
    return jax.random.bits(jax.random.fold_in(key, index), (1, 2), jnp.uint32)
