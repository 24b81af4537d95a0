"""Each device's own value and gradients, before anything is sent: the base of value_and_grad.

JAX sums the gradients of weights that all devices share, automatically and exactly. So the weights
are made to vary first. A value that all devices share is refused: its gradients are shares of one
sum, not each device's own.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.runtime import compat


def differentiated_indices(
    caller: str, argnums: int | Sequence[int], count: int
) -> tuple[int, ...]:
    """Return the positions, from 0, of the arguments among `count` that argnums selects."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -count <= number < count:
            raise TypeError(
                f"{caller}: argnums is {argnums}, and the call has {count} positional arguments: "
                f"use {-count} to {count - 1}"
            )
    return tuple(number % count for number in numbers)


def device_value_and_grad(
    caller: str,
    fun: Callable[..., Any],
    axes: tuple[Hashable, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Callable[..., Any]:
    """Return jax.value_and_grad of `fun`, on each device separately, for the body of a shard_map.

    Raises:
        ValueError: At the call, the value is equal on all devices, so it was reduced already.
    """

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        indices = differentiated_indices(caller, argnums, len(args))
        copies = [vary_tree(arg, axes) if i in indices else arg for i, arg in enumerate(args)]
        result, gradients = jax.value_and_grad(fun, argnums, has_aux)(*copies, **kwargs)
        shared = frozenset(axes) - compat.varying_axes(result[0] if has_aux else result)
        if compat.types_are_checked() and shared:
            raise ValueError(
                f"{caller}: the value of fun is the same on all devices of "
                f"{sorted(shared, key=str)}, so the gradients are not those of each device's own "
                "value, and their mean would be N times too small. Return the device's own value "
                f"from fun, without psum or pmean over these axes; {caller} averages it"
            )
        return result, gradients

    return differentiated
