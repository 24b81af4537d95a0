"""all_to_all_q: a separate block for each device, and the gradient's way back."""

from functools import partial
from typing import Any, Unpack

import jax

from cgx_ops.config import Config, Keywords, check_config
from cgx_ops.jax._src.collectives.blocks import (
    blocks_of,
    check_split,
    dimension_of,
    each_leaf,
    joined,
)
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Options, checked_options
from cgx_ops.jax._src.collectives.primitive import Settings, bind, vary, vary_tree
from cgx_ops.jax._src.collectives.trees import checked_leaf, sends


def all_to_all_q(
    x: Any,
    axis_name: Axes,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    config: Config | None = None,
    grad_config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    **keywords: Unpack[Keywords],
) -> Any:
    """Exchange blocks among all devices of a group, quantized, like `jax.lax.all_to_all`.

    The sender encodes each block once, and the receiver decodes it. A device's block for itself is
    copied exactly. If several processes have several CPU devices of a group each, blocks between
    devices of one process are exact, too. The derivative is the exact one of `jax.lax.all_to_all`,
    unless `grad_config` is set.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16. Each leaf is a separate
            message.
        axis_name: Name of a mesh axis, or a tuple of names.
        split_axis: The dimension of `x` that is split into one block per device.
        concat_axis: The dimension of the result along which the received blocks lie.
        tiled: False (default): `split_axis` must have as many elements as there are devices, and is
            removed; `concat_axis` is a new dimension. True: it must be a multiple of that number,
            and blocks are concatenated along `concat_axis`.
        config: How values are sent, as in `psum_q`. `algorithm`, `gather_bits` and `intra_bits`
            have no effect.
        grad_config: How the gradient's blocks return to their senders, and further derivatives.
            None (default): exact. Otherwise there is no forward-mode derivative, as of any
            `jax.custom_vjp`.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest. The gradient uses `jax.random.fold_in(key, 1)`.
        name: Identifies the collective across processes, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        The received blocks, in the structure and dtypes of `x`.

    Raises:
        ValueError: A dimension does not exist or cannot be split; a setting does not fit, as in
            `psum_q`.
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf, key or static argument has the wrong type, as in `psum_q`.
        NotImplementedError: As in `psum_scatter_q`.
        RuntimeError: Processes cannot connect natively, or the mesh is abstract, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import all_to_all_q
        >>> mesh = jax.make_mesh((1,), ("expert",))
        >>> dispatch = jax.shard_map(
        ...     lambda x: all_to_all_q(x, "expert", 0, 0, tiled=True, bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P("expert"),
        ... )
        >>> dispatch(jax.numpy.ones((4, 2))).shape  # one device
        (4, 2)
    """
    options = checked_options(
        "all_to_all_q", config, keywords, key=key, name=name, verb="all_to_all"
    )
    if grad_config is None:
        return _exchange(options, x, axis_name, split_axis, concat_axis, tiled)
    check_config(grad_config, "all_to_all_q: grad_config")
    gradient = checked_options(
        "all_to_all_q", grad_config, {}, key=key, name=name, verb="all_to_all"
    )
    x = jax.tree_util.tree_map_with_path(partial(checked_leaf, options.caller), x)
    x = vary_tree(x, mesh_groups(options.caller, axis_name).axes)
    return _with_gradient(options, gradient, x, axis_name, split_axis, concat_axis, tiled)


def _exchange(
    options: Options, x: Any, axis_name: Axes, split_axis: int, concat_axis: int, tiled: bool
) -> Any:
    caller = options.caller

    def one(leaf: jax.Array, settings: Settings, seed: jax.Array) -> jax.Array:
        split = dimension_of(caller, "split_axis", split_axis, leaf.ndim)
        concat = dimension_of(caller, "concat_axis", concat_axis, leaf.ndim)
        check_split(caller, leaf, split, settings, tiled=tiled)
        size, axes = settings.groups.size, settings.groups.axes
        if leaf.size == 0 or not sends(settings.groups, settings.configs[0]):
            leaf = vary(leaf, frozenset(axes))
            return jax.lax.all_to_all(leaf, axes, split, concat, tiled=tiled)
        blocks = blocks_of(leaf, split, size)
        if not tiled:
            blocks = blocks.squeeze(split + 1)
        received = bind([blocks.reshape(size, 1, -1)], [seed], settings)[0].reshape(blocks.shape)
        return joined(received, concat, tiled=tiled)

    return each_leaf(options, x, axis_name, one)


def _with_gradient(
    options: Options,
    gradient: Options,
    x: Any,
    axis_name: Axes,
    split: int,
    concat: int,
    tiled: bool,
) -> Any:
    """Exchange blocks; exchange cotangents with the options `gradient`, along swapped axes."""

    @jax.custom_vjp
    def exchange(x: Any, key: jax.Array | None) -> Any:
        return _exchange(options.with_key(key), x, axis_name, split, concat, tiled)

    def forward(x: Any, key: jax.Array | None) -> tuple[Any, jax.Array | None]:
        return exchange(x, key), key

    def backward(key: jax.Array | None, cotangents: Any) -> tuple[Any, None]:
        noise = gradient.with_key(None if key is None else jax.random.fold_in(key, 1))
        return _with_gradient(noise, noise, cotangents, axis_name, concat, split, tiled), None

    exchange.defvjp(forward, backward)
    return exchange(x, options.key)
