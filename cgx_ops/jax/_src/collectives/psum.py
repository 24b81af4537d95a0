"""psum_q and pmean_q: compressed sums and means over mesh axes."""

import math
from collections.abc import Hashable
from typing import Any, Unpack

import jax

from cgx_ops._core.user_warnings import warn_once
from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import COMPRESS_ALL, Carrier, Options, checked_options
from cgx_ops.jax._src.collectives.trees import reduce_tree
from cgx_ops.jax._src.runtime import compat
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules


def psum_q(
    x: Any,
    axis_name: Axes,
    *,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = COMPRESS_ALL,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Sum an array or pytree over mesh axes like `jax.lax.psum`, with quantized messages.

    Call it inside `jax.shard_map`. All devices of a group get bit-identical results. Each leaf is
    quantized separately, and so is each example of a `jax.vmap`. Leaves with fewer than
    `max(16, config.minimal_size)` elements are summed exactly.

    If several processes hold several devices of a group each, a process first sums the values of
    its own devices, exactly, in float32. Then the processes exchange compressed sums.

    The derivative is the exact one of `jax.lax.psum`: tangents and cotangents are not compressed.
    To compress gradients, use `value_and_grad` or `compress_grads`, or apply `psum_q` to the
    gradients of each device.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16, of any shape.
        axis_name: Name of a mesh axis, or a tuple of names, as in `jax.lax.psum`.
        config: How values are sent. None (default) means `Config()`, which is 4 bits. The fields
            `error_feedback` and `residual_decay` have no effect here; pass `residual` instead.
        key: A PRNG key, typed or raw, for random rounding. Pass another key in every step. Devices
            may pass equal or different keys, but "randk" needs the same key on all of them. None
            (default) rounds to nearest.
        name: Identifies the collective across processes. Collectives that run at the same time need
            different names. "" (default) uses the position of the call in the compiled program.
        rules: Settings per leaf, by its path, such as "layers.0.bias". By default all leaves are
            sent with `config`, biases and other vectors too: `Rules(exact_vectors=False)`.
        fuse: How leaves share messages. True (default): messages of about 4 MiB per dtype, the last
            leaves first; trees of less than 8 MiB are one message per dtype. False: one message per
            leaf. A `cgx_ops.planner.Plan`: one message for each of its groups and dtype. Processes
            compare the plan when they compile, unless `carrier` is "xla".
        carrier: "native" (default) sends messages over cgx's own transport: threads, shared memory,
            TCP or MPI. "xla" sends them by XLA's collectives, which need no MPI. Results have the
            same bits for the same algorithm. "xla" runs on CPUs only, without the algorithms "ring"
            and "hierarchical", and needs the same number of devices in each process of a group.
        residual: Error feedback: the residual that the last call returned, a tree like `x`. Start
            with zeros. It is added to `x` in float32. None for a leaf disables feedback for it;
            None (default) disables it for all.
        **keywords: Override fields of `config`: `bits` (1 to 8, or 32 for exact), `bucket_size`
            (how many elements share a scale), `compressor` ("uniform", "levels", "sign", "onebit",
            "ternary", "qsgd", "half", "topk", "randk", "entropy", "lossless", "mxfp8",
            "mxfp8_e5m2", "mxfp4", "nvfp4") and `rounding` ("nearest", "stochastic", "shift"). By
            default rounding is nearest without `key`. With `key` it is stochastic if the compressor
            supports that.

    Returns:
        The sums, with the structure, shapes and dtypes of `x`, equal on all devices of a group.
        With `residual`, a pair `(sums, new_residual)`. The new residual is a tree like `x` that
        varies over the axes. Added up over all devices, `x` and the old residuals equal the sum and
        the new residuals, up to rounding in float32 and in the dtype. Residuals that are not finite
        become zero. If a process sums its devices first, the first of them gets the residual of
        all.

    Raises:
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf has another dtype; a residual has another dtype than its leaf; `key` is
            not a PRNG key; an argument other than `x`, `key` and `residual` is traced.
        ValueError: A setting is out of range or does not fit the compressor; a random setting has
            no key; error feedback would not converge, or everything is exact; `residual` has
            another structure or shape than `x`; the plan was made for another tree.
        NotImplementedError: An axis belongs to a `jax.vmap`; the `shard_map` leaves axes to the
            compiler; the platform is not CPU or CUDA. On CUDA also: `carrier` is "xla"; several
            processes have several GPUs of a group each.
        cgx_ops.MismatchError: Processes have different plans. The error names the first difference.
        RuntimeError: Processes cannot connect natively; or the `shard_map` has an abstract mesh
            where the program spans several processes or GPUs.
        jax.errors.JaxRuntimeError: At run time, a peer is late or lost, or called another
            collective. The deadline is `CGX_TIMEOUT`. Its default is 300 s, but 20 s among several
            CPU devices of one process. On GPUs the results become NaN, and the next call raises.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import psum_q
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
        ... def total(x):
        ...     return psum_q(x, "data", bits=8)
        >>> total(jax.device_put(jax.numpy.ones(4), jax.NamedSharding(mesh, jax.P("data"))))
        Array([1., 1., 1., 1.], dtype=float32)
    """
    options = checked_options(
        "psum_q", config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    return _reduce_users(options, x, residual, axis_name, "sum")


def pmean_q(
    x: Any,
    axis_name: Axes,
    *,
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = COMPRESS_ALL,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Average an array or pytree over mesh axes like `jax.lax.pmean`, with quantized messages.

    It works like `psum_q` in every other respect. The float32 sum is divided by the number of
    devices before it is compressed for the way back. Residuals have the scale of `x`, as in
    `psum_q`: the error of the mean is multiplied by the number of devices.

    Args:
        x: An array or a pytree of arrays of float32, float16 or bfloat16, of any shape.
        axis_name: Name of a mesh axis, or a tuple of names, as in `jax.lax.pmean`.
        config: How values are sent, as in `psum_q`. None (default) means `Config()`: 4 bits.
        key: A PRNG key for random rounding, another one in every step. None (default) rounds to
            nearest.
        name: Identifies the collective across processes, as in `psum_q`.
        rules: Settings per leaf, by its path. By default all leaves are sent with `config`.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        residual: Error feedback: the residual that the last call returned, as in `psum_q`.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        The means, with the structure, shapes and dtypes of `x`, equal on all devices of a group.
        With `residual`, a pair `(means, new_residual)`.

    Raises:
        NameError: An axis name is not bound by a `shard_map` around the call.
        TypeError: A leaf, residual, key or static argument has the wrong type, as in `psum_q`.
        ValueError: A setting, the residual or the plan does not fit, as in `psum_q`.
        NotImplementedError: The axes or the platform are not supported, as in `psum_q`.
        cgx_ops.MismatchError: Processes have different plans.
        RuntimeError: Processes cannot connect natively, or the mesh is abstract, as in `psum_q`.
        jax.errors.JaxRuntimeError: At run time, a peer failed, as in `psum_q`.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import pmean_q
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> zeros = jax.numpy.zeros((4, 8))
        >>> @jax.jit
        ... @jax.shard_map(mesh=mesh, in_specs=jax.P(), out_specs=(jax.P(), jax.P("data")))
        ... def mean(x):
        ...     x = jax.lax.pcast(x, "data", to="varying")  # each device has its own values
        ...     return pmean_q(x, "data", bits=2, residual=jax.numpy.zeros_like(x))
        >>> average, residual = mean(zeros)
        >>> average.shape, residual.shape
        ((4, 8), (4, 8))
    """
    options = checked_options(
        "pmean_q", config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    return _reduce_users(options, x, residual, axis_name, "avg")


def _reduce_users(options: Options, x: Any, residual: Any, axis_name: Axes, op: str) -> Any:
    """Reduce a user's tree with reduce_tree(), and warn about likely mistakes."""
    options.refuse_idle_residual(residual)
    groups = mesh_groups(options.caller, axis_name)
    options.warn_of_unmatched(x)
    warn_of_equal_leaves(options.caller, x, groups.axes)
    total, lost = reduce_tree(options, x, residual, groups, op)
    return total if residual is None else (total, lost)


def warn_of_equal_leaves(caller: str, x: Any, axes: tuple[Hashable, ...]) -> None:
    """Warn, once, about leaves that are equal on all devices, such as summed gradients."""
    if not compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        same = [axis for axis in axes if axis not in compat.varying_axes(leaf)]
        if math.prod(compat.axis_size(axis) or 1 for axis in same) == 1:
            continue
        warn_once(
            f"{caller}: x{jax.tree_util.keystr(path)} is the same on all devices of {same}. If it "
            "is a gradient, jax.grad has already summed it over them, uncompressed, and it is not "
            "the mean. Use cgx_ops.jax.compress_grads(weights, axis) in the loss, or "
            "cgx_ops.jax.value_and_grad, or differentiate weights that vary: "
            'jax.lax.pcast(weights, axis, to="varying")'
        )
        return


def reduce_over(
    options: Options,
    x: Any,
    residual: Any,
    axis_name: Axes,
    op: str,
    configs: Any = None,
    *,
    parts: bool = True,
) -> tuple[Any, Any]:
    """Reduce a tree over mesh axes; arguments and results are those of reduce_tree()."""
    groups = mesh_groups(options.caller, axis_name)
    return reduce_tree(options, x, residual, groups, op, configs, parts=parts)
