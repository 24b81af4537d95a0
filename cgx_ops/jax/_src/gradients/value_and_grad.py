"""compress_grads and value_and_grad: gradients whose sum over a mesh axis travels compressed.

Two ways to one result, for weights that all devices of the axis share:

    compress_grads(weights, axis)      inside the loss: its backward pass is psum_q
    value_and_grad(loss, axis)         around the loss: jax.value_and_grad, then pmean_q

JAX sums the gradients of shared weights automatically and exactly, unless the weights vary over the
axis. Both make them vary first; a psum_q after JAX's sum would silently be N times too large.
"""

from collections.abc import Callable, Hashable, Sequence
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
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    **keywords: Unpack[Keywords],
) -> Any:
    """Return `params` unchanged; their gradient is summed over mesh axes by `psum_q`.

    Call it on the weights inside `jax.shard_map`, before they are used:

        def loss(weights, batch):
            weights = cgx_ops.jax.compress_grads(weights, "data", bits=4, key=key)
            return lax.pmean(loss_of(model(weights, batch)), "data")

    It stands where JAX would sum over the devices itself and changes how that sum travels, never
    what it means: jax.grad of `loss`, in the body or around the shard_map, gives the gradient that
    it gives without this call, except for the compression. So of a loss that is averaged over the
    axis it is the gradient of the average; of each device's own loss, that of their sum.

    Args:
        params: an array or a pytree of arrays of float32, float16 or bfloat16, any shape, equal on
          all devices of the axis: passed to shard_map with in_specs that do not name it.
        axis_name: name of a mesh axis, or a tuple of names.
        config: as of `psum_q`; there is no error feedback: `average_gradients` has it.
        key: a PRNG key, as of `psum_q`: give another in every step.
        name: of the collective, as of `psum_q`.
        rules: as of `psum_q`. By default leaves of at most one dimension are sent exact; None
          compresses them too.
        fuse: as of `psum_q`: by default small trees are one message, which goes when the last
          gradient is computed. To overlap that with the rest of the backward pass, give False.
        carrier: as of `psum_q`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        `params`, varying over the axes for JAX's type checks.

    Raises:
        NameError: an axis name is not bound here: there is no shard_map around the call.
        ValueError: `params` vary over the axes already; else as `psum_q`.
        NotImplementedError: the shard_map has check_vma=False, where this cannot be right in every
          place that jax.grad may stand in; else as `psum_q`.
        TypeError: as `psum_q`; forward-mode differentiation (jax.jvp).

    Example:
        >>> loss = lambda w: (compress_grads(w, "d", bits=8) ** 2).sum()
        >>> mesh = jax.make_mesh((1,), ("d",))
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
        # Around the shard_map JAX would sum what psum_q summed, once more; in the body it would
        # leave a loss's own psum or pmean out of account. Neither can be seen from here.
        raise NotImplementedError(
            f"{caller} in a shard_map with check_vma=False: JAX would sum the gradients of "
            "replicated weights once more, and they would be N times too large. Leave check_vma at "
            "its default, True, or take the gradient in the body with cgx_ops.jax.value_and_grad"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        checked_leaf(caller, path, leaf)
        options.of(path, leaf)  # which checks it
        _check_shared(caller, f"params{jax.tree_util.keystr(path)}", leaf, axes, key)
    options.warn_of_unmatched(params)

    @jax.custom_vjp
    def shared(params: Any, key: jax.Array | None) -> Any:
        del key
        return vary_tree(params, axes)

    def forward(params: Any, key: jax.Array | None) -> tuple[Any, jax.Array | None]:
        return shared(params, key), key

    def backward(key: jax.Array | None, cotangents: Any) -> tuple[Any, None]:
        # The key came as a residual: the forward pass's own may belong to another shard_map.
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
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    **keywords: Unpack[Keywords],
) -> Callable[..., Any]:
    """Do as `jax.value_and_grad`, and average over mesh axes: the value exactly, gradients in bits.

    For use inside `jax.shard_map`, with check_vma True or False:

        gradient_of = cgx_ops.jax.value_and_grad(loss_of, "data", bits=4, key=key)
        loss, gradients = gradient_of(weights, batch)

    where `loss_of` is the device's own mean loss. Both results are those of the mean over devices.

    In plain `jax.jit`, over arrays with shardings, where XLA would reduce gradients automatically,
    it adds a shard_map:

        gradient_of = cgx_ops.jax.value_and_grad(
            loss_of, "data", in_specs=(P(), P("data")), mesh=mesh, bits=4, key=key
        )

    Axes that axis_name does not name stay the compiler's in `loss_of`.

    Args:
        fun: returns a scalar (or a scalar and anything, with has_aux) that no psum or pmean over
          the axes went into.
        axis_name: name of a mesh axis, or a tuple of names.
        argnums: which arguments to differentiate, as of jax.value_and_grad. Each is a pytree of
          float32, float16 or bfloat16. Weights that differ between devices all get the mean of
          their gradients. Gradients of several arguments travel as one tree, the tuple of them; so
          for rules a leaf's path begins with its place in argnums, such as "0.kernel".
        has_aux: whether fun returns a pair, of which only the first is differentiated.
        in_specs: how each argument is sharded, a PartitionSpec or a tree of them (a prefix of the
          argument's tree): outside a shard_map. Weights may be sharded over the data axes too,
          along one dimension (FSDP): they are gathered, exactly, before fun, and their gradients
          come back in the same shards, by `psum_scatter_q`. Other axes that a weight's spec names
          are those of its parts (tensor parallelism): each part's gradient is sent by its own
          devices. Only differentiated arguments are gathered. A frozen weight with a data axis in
          its spec reaches fun as a shard, like a batch.
        mesh: of in_specs; None: that of jax.set_mesh.
        config: as of `psum_q`; there is no error feedback: `average_gradients` has it.
        key: a PRNG key, as of `psum_q`: give another in every step.
        name: of the collective, as of `psum_q`.
        rules: as of `psum_q`. By default leaves of at most one dimension are sent exact; None
          compresses them too.
        fuse: as of `psum_q`.
        carrier: as of `psum_q`.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Returns:
        A function with fun's arguments. It returns (value, gradients), or ((value, aux), gradients)
        with has_aux: `value` by jax.lax.pmean and `gradients` by `pmean_q`, equal on all devices of
        the axis; `aux` as this device computed it, with in_specs its mean by jax.lax.pmean.

    Raises:
        NameError: at the call; an axis name is not bound here: there is no shard_map around it, and
          no in_specs.
        ValueError: at the call; the value is equal on all devices, so it was reduced already.
        TypeError, NotImplementedError, jax.errors.JaxRuntimeError: as `psum_q`.

    Example:
        >>> gradient_of = value_and_grad(lambda w: (w * w).sum(), "d", bits=8)
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> step = jax.shard_map(gradient_of, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        >>> step(jax.numpy.ones(4))
        (Array(4., dtype=float32), Array([2., 2., 2., 2.], dtype=float32))
    """
    caller = "value_and_grad"
    options = checked_options(
        caller, config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    if in_specs is not None:
        return value_and_grad_of_shards(
            fun, axes_of(axis_name), argnums, has_aux, in_specs, mesh, options
        )
    if mesh is not None:
        raise ValueError(f"{caller}: mesh without in_specs: inside a shard_map give neither")

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
    """Require that a leaf is the same on all devices of the axes, and stays so, as types show."""
    own = compat.varying_axes(leaf)
    if own & frozenset(axes):
        raise ValueError(
            f"{caller}: {what} varies over {_names(own & frozenset(axes))} already, so JAX would "
            "sum its gradient once more, and it would be N times too large. Give the weights as "
            "shard_map passed them, without lax.pcast, with in_specs that do not name these axes"
        )
    foreign = (frozenset() if key is None else compat.varying_axes(key)) - frozenset(axes) - own
    if foreign:
        raise ValueError(
            f"{caller}: the key varies over {_names(foreign)}, where {what} does not: devices that "
            "share a weight would get different gradients of it. Give them one key"
        )


def _names(axes: frozenset[Hashable]) -> list[Hashable]:
    return sorted(axes, key=str)
