"""What value_and_grad differentiates: each device's own value, before anything is sent.

JAX automatically sums, exactly, the gradients of weights that all devices share. So the weights are
made to vary first; and a value that all devices share is refused, because its gradients are shares
of one sum, not each device's own.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.runtime import compat


def differentiated_places(caller: str, argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Return the places, from 0, of the arguments among `count` that argnums names."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -count <= number < count:
            raise TypeError(
                f"{caller}: argnums={argnums} of a call with {count} positional arguments: they "
                f"are {-count} to {count - 1}"
            )
    return tuple(number % count for number in numbers)


def device_value_and_grad(
    caller: str,
    fun: Callable[..., Any],
    axes: tuple[Hashable, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
) -> Callable[..., Any]:
    """Return jax.value_and_grad of `fun`, for the body of a shard_map, on each device separately.

    Raises:
        ValueError: at the call; the value is equal on all devices, so it was reduced already.
    """

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        places = differentiated_places(caller, argnums, len(args))
        copies = [vary_tree(arg, axes) if i in places else arg for i, arg in enumerate(args)]
        result, gradients = jax.value_and_grad(fun, argnums, has_aux)(*copies, **kwargs)
        shared = frozenset(axes) - compat.varying_axes(result[0] if has_aux else result)
        if compat.types_are_checked() and shared:
            raise ValueError(
                f"{caller}: the value of fun is the same on all devices of "
                f"{sorted(shared, key=str)}, so the gradients are not those of each device's own "
                "value, and their mean would be N times too small. Return the device's own value "
                "from fun, without psum or pmean over these axes; it is averaged here"
            )
        return result, gradients

    return differentiated
