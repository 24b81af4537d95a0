"""compress_grads and value_and_grad: gradients, compressed while they are summed over mesh axes.

Both are for weights that all devices of the axis share:

    compress_grads(weights, axis)      inside the loss: its backward pass is psum_q
    value_and_grad(loss, axis)         around the loss: jax.value_and_grad, then pmean_q

JAX sums the gradients of shared weights automatically and exactly, unless the weights vary over the
axis. Both functions make the weights vary first. Without that, a psum_q after JAX's own sum would
return gradients that are N times too large, without an error.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import jax
from jax.sharding import AbstractMesh, Mesh

from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes, axes_of, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, checked_options
from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.collectives.trees import checked_leaf
from cgx_ops.jax._src.gradients.device_gradients import device_value_and_grad
from cgx_ops.jax._src.gradients.sharded import value_and_grad_of_shards
from cgx_ops.jax._src.runtime import compat
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules


def compress_grads(
    params: Any,
    axis_name: Axes,
    *,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    **keywords: Unpack[Keywords],
) -> Any:
    """Return `params` unchanged, and compress the sum of their gradients over mesh axes.

    Call it inside the loss, on the weights, before they are used::

        def loss(weights, batch):
            weights = cgx_ops.jax.compress_grads(weights, "data", bits=4, key=key)
            return jax.lax.pmean(loss_of(weights, batch), "data")

    The backward pass sums the gradients over the devices by `psum_q`, where JAX would sum them
    exactly. Apart from quantization, `jax.grad(loss)` returns the same gradient as without this
    call. For a loss that is averaged over the axis, it is the gradient of the average. For each
    device's own loss, it is the gradient of their sum. `jax.grad` may stand inside or around the
    `shard_map`.

    Args:
        params: An array or a pytree of arrays of float32, float16 or bfloat16, equal on all devices
            of the axis. The `in_specs` of the `shard_map` must not split them over it.
        axis_name: Name of a mesh axis, or a tuple of names.
        config: How values are sent, as in `psum_q`. Error feedback needs state: use
            `average_gradients` for it.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`.
        rules: Settings per leaf, by its path. `Rules()` (default) sends biases and other leaves of
            at most one dimension exactly; `Rules(exact_vectors=False)` compresses them too.
        fuse: How leaves share messages, as in `psum_q`. With False, each gradient is sent as soon
            as it is computed, even in small models.
        carrier: "native" (default) or "xla", as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        `params`. Their checked type varies over the axes.

    Raises:
        NameError: An axis name is not bound by a `shard_map` around the call.
        ValueError: `params` vary over the axes already; the key varies over an axis over which they
            do not; a setting does not fit, as in `psum_q`.
        NotImplementedError: The `shard_map` has `check_vma=False`; the axes or the platform are not
            supported, as in `psum_q`.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`; or the loss is
            differentiated in forward mode (`jax.jvp`).
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import compress_grads
        >>> def loss(weights):
        ...     weights = compress_grads(weights, "data", bits=8)
        ...     return (weights ** 2).sum()
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        >>> step(jax.numpy.ones(4))
        Array([2., 2., 2., 2.], dtype=float32)
    """
    caller = "compress_grads"
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    axes = mesh_groups(caller, axis_name).axes
    if not compat.types_are_checked():
        # If jax.grad is around the shard_map, JAX would sum the result of psum_q a second time. In
        # the body it would ignore a psum or pmean of the loss. This code cannot detect either.
        raise NotImplementedError(
            f"{caller} in a shard_map with check_vma=False: JAX would sum the gradients of "
            "replicated weights a second time, and they would be N times too large. Leave "
            "check_vma at its default, True, or take the gradient in the body with "
            "cgx_ops.jax.value_and_grad"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        checked_leaf(caller, path, leaf)
        options.of(path, leaf)  # raises if it is invalid
        _check_shared(caller, f"params{jax.tree_util.keystr(path)}", leaf, axes, key)
    options.warn_of_unmatched(params)

    @jax.custom_vjp
    def shared(params: Any, key: jax.Array | None) -> Any:
        del key
        return vary_tree(params, axes)

    def forward(params: Any, key: jax.Array | None) -> tuple[Any, jax.Array | None]:
        return shared(params, key), key

    def backward(key: jax.Array | None, cotangents: Any) -> tuple[Any, None]:
        # Use the key from the residuals: that of the forward pass may belong to another shard_map.
        return reduce_over(options.with_key(key), cotangents, None, axes, "sum")[0], None

    shared.defvjp(forward, backward)
    return shared(params, key)


def value_and_grad(
    fun: Callable[..., Any],
    axis_name: Axes,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    in_specs: Sequence[Any] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    **keywords: Unpack[Keywords],
) -> Callable[..., Any]:
    """Create a function like `jax.value_and_grad` that averages compressed gradients over devices.

    Use it inside `jax.shard_map`, with `check_vma` True or False. `loss_of` returns the mean loss
    of the device's own part of the batch::

        gradient_of = cgx_ops.jax.value_and_grad(loss_of, "data", bits=4, key=key)
        loss, gradients = gradient_of(weights, batch)

    In plain `jax.jit` over sharded arrays (pjit), pass `in_specs`. XLA would reduce these gradients
    itself, so `value_and_grad` adds a `shard_map` over the data axes::

        gradient_of = cgx_ops.jax.value_and_grad(
            loss_of, "data", in_specs=(P(), P("data")), mesh=mesh, bits=4, key=key
        )

    XLA still partitions `loss_of` over the other axes of the mesh.

    Args:
        fun: The loss function. It returns a scalar, or a pair of a scalar and anything with
            `has_aux`. The scalar must not have been reduced over the axes by `psum` or `pmean`.
        axis_name: Name of a mesh axis, or a tuple of names.
        argnums: Which positional arguments to differentiate, as in `jax.value_and_grad`. Each is a
            pytree of float32, float16 or bfloat16. For several arguments, leaf paths in rules begin
            with the position in `argnums`, such as "0.kernel". Weights that differ between devices
            all get the mean of their gradients.
        has_aux: Whether `fun` returns a pair, of which only the first part is differentiated.
        in_specs: For calls outside of a `shard_map`: the sharding of each argument, as a
            `PartitionSpec` or a tree of them. Weights may be split over the data axes along one
            dimension (FSDP). They are gathered exactly before `fun`, and their gradients are
            reduced to the same shards by `psum_scatter_q`. Axes of tensor parallelism must be
            named, too: each part's gradient is sent by the devices that hold it. An argument that
            is not differentiated reaches `fun` as the device's shard.
        mesh: The mesh of `in_specs`. None (default) is the mesh of `jax.set_mesh`.
        config: How values are sent, as in `psum_q`. Error feedback needs state: use
            `average_gradients` for it.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`. Threads need `launching`
            as well, because XLA averages the value.
        rules: Settings per leaf, by its path. `Rules()` (default) sends biases and other leaves of
            at most one dimension exactly; `Rules(exact_vectors=False)` compresses them too.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        A function with the arguments of `fun`. It returns `(value, gradients)`, or
        `((value, aux), gradients)` with `has_aux`. `value` is the exact mean over the devices.
        `gradients` are averaged by `pmean_q` and equal on all devices of the axis. `aux` is the
        device's own; with `in_specs` it is the mean over devices.

    Raises:
        NameError: At the call, an axis name is not bound by a `shard_map`, and there are no
            `in_specs`.
        ValueError: `mesh` is given without `in_specs`. At the call, the value is equal on all
            devices, so it was reduced already; or the specs or a setting do not fit.
        TypeError: At the call, the number of arguments does not match; a leaf, key or static
            argument has the wrong type, as in `psum_q`.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        Inside a `shard_map`:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from cgx_ops.jax import value_and_grad
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> def loss_of(weights, batch):
        ...     return (batch @ weights).mean()
        >>> step = jax.shard_map(
        ...     value_and_grad(loss_of, "data", bits=8),
        ...     mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(),
        ... )
        >>> weights = jnp.ones(4)
        >>> batch = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("data")))
        >>> step(weights, batch)
        (Array(4., dtype=float32), Array([1., 1., 1., 1.], dtype=float32))

        In plain `jax.jit`:

        >>> gradient_of = value_and_grad(
        ...     loss_of, "data", in_specs=(jax.P(), jax.P("data")), mesh=mesh, bits=8
        ... )
        >>> jax.jit(gradient_of)(weights, batch)[0]
        Array(4., dtype=float32)
    """
    caller = "value_and_grad"
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    options = replace(options, uses_xla=True)  # for the mean of the value
    if in_specs is not None:
        return value_and_grad_of_shards(
            fun, axes_of(axis_name), argnums, has_aux, in_specs, mesh, options
        )
    if mesh is not None:
        raise ValueError(
            f"{caller}: mesh is given without in_specs: inside a shard_map pass neither; in plain "
            "jax.jit pass both"
        )

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        axes = mesh_groups(caller, axis_name).axes
        own_value_and_grad = device_value_and_grad(caller, fun, axes, argnums, has_aux)
        result, gradients = own_value_and_grad(*args, **kwargs)
        options.warn_of_unmatched(gradients)
        value = jax.lax.pmean(result[0] if has_aux else result, axes)
        mean, _ = reduce_over(options, gradients, None, axes, "avg")
        return ((value, result[1]) if has_aux else value), mean

    return differentiated


def _check_shared(
    caller: str, what: str, leaf: Any, axes: tuple[Hashable, ...], key: jax.Array | None
) -> None:
    """Require that the checked type of a leaf is equal on all devices of the axes, and stays so."""
    own = compat.varying_axes(leaf)
    if own & frozenset(axes):
        raise ValueError(
            f"{caller}: {what} varies over {_names(own & frozenset(axes))} already, so JAX would "
            "sum its gradient a second time, and it would be N times too large. Pass the weights "
            "as shard_map passes them, without lax.pcast, with in_specs that do not name these "
            "axes"
        )
    foreign = (frozenset() if key is None else compat.varying_axes(key)) - frozenset(axes) - own
    if foreign:
        raise ValueError(
            f"{caller}: the key varies over {_names(foreign)}, where {what} does not: devices that "
            "share a weight would get different gradients. Pass the same key on these devices"
        )


def _names(axes: frozenset[Hashable]) -> list[Hashable]:
    return sorted(axes, key=str)
