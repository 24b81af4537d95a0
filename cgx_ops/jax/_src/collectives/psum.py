"""psum_q and pmean_q: sums and means over mesh axes whose operands travel compressed."""

import math
from collections.abc import Hashable
from typing import Any, Unpack

import jax

from cgx_ops._core.user_warnings import warn_once
from cgx_ops.config import Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes, mesh_groups
from cgx_ops.jax._src.collectives.options import Carrier, Options, checked_options
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
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Sum `x` over mesh axes like `jax.lax.psum`, compressed: 4 bits an element by default.

    Inside `jax.shard_map` only. Every device of a group gets the same bits. Leaves with fewer than
    max(16, config.minimal_size) elements are summed exactly. Every leaf, and each example of a
    vmap, is compressed separately.

    Where a group has several devices in each of several processes, the devices of a process are
    summed first, exactly, and processes send compressed sums to each other.

    The derivative is that of `jax.lax.psum`: tangents and cotangents are summed exactly. To
    compress gradients, apply psum_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape.
        axis_name: name of a mesh axis, or a tuple of names, as for `jax.lax.psum`.
        config: `cgx_ops.Config`, how values are sent; None: Config(). Its `error_feedback` and
          `residual_decay` have no effect here.
        key: a PRNG key (typed or raw), the source of randomness. Give another key in every step.
          Two calls with one key have the same noise if their verb, axes and name are the same;
          leaves, examples of a vmap, devices, and groups whose values vary over other axes (if
          types are checked) have different noise. Devices may have equal or different keys;
          "randk", whose key decides which values are sent, needs equal ones.
        name: identifies the collective among processes, and is unique among those that run at the
          same time. "": the call's place in the program that is being compiled.
        rules: `cgx_ops.Rules`, settings of leaves by their paths, such as "layers.0.bias". None:
          all leaves are sent by `config`, vectors too.
        fuse: leaves of a dtype share messages of about 4 MiB of values, the last leaves first; each
          travels while the leaves of others are computed. Less than 8 MiB are one message. False:
          one for each leaf. A cgx_ops.planner.Plan: one for each of its groups (and dtype); the
          plan has every leaf, by its path, and processes compare it when they compile it, unless
          XLA carries the bytes. See docs/guides/planner.md.
        carrier: "native": cgx moves the bytes, through memory and MPI. "xla": XLA's own collectives
          do, wherever those work, with or without MPI; the bits of the result are those of the same
          algorithm. Not for "ring" and "hierarchical", nor for groups with more devices in one
          process than in another.
        residual: error feedback: what compression lost before, a tree like `x`, added to it in
          float32. None, also for some leaves: nothing is added, and the new quantization error is
          not returned. Compressors with which it would not converge refuse it.
        **keywords: fields that replace those of `config`: `bits`, 1 to 8, or 32 (exact);
          `bucket_size`, elements that share one minimum and step; `compressor`, "uniform",
          "levels", "sign" (a sum is a majority vote), "onebit", "ternary", "qsgd", "half", "topk",
          "threshold" (on CPUs only) or "randk"; `rounding`, "nearest", "stochastic" or "shift",
          by default nearest without `key`, at random with it, if the compressor can.

    Returns:
        The sums, in the structure, shapes and dtypes of `x`; equal on all devices of a group. With
        `residual` a pair of them and the new residual, a tree like `x` too, which varies over the
        axes: over all devices, `x` and the old residuals add up to the result (as a sum) and the
        new residuals, up to rounding in float32 and the dtype. Given to the next call, it makes
        sure that errors are only delayed. Where devices of a process are summed first, the first
        of them has the residual of all. A residual that is not finite becomes 0.

    Raises:
        NameError: an axis name is not bound here.
        NotImplementedError: an axis belongs to a vmap; the shard_map leaves axes to the compiler;
          the platform is not CPU or CUDA. On CUDA: carrier="xla"; a group has several GPUs in
          each of several processes.
        TypeError: a leaf is not float32, float16 or bfloat16; a residual has another dtype than its
          leaf; an argument is not a static value; `key` is not a key.
        ValueError: a field is out of its range, or does not belong to the compressor; the config is
          random and there is no key; error feedback would not converge, or bits=32 leaves it
          nothing; `residual` has another structure or shape than `x`; the plan is of another tree.
        cgx_ops.MismatchError: processes have different plans; it names the first leaf that differs.
        RuntimeError: processes of the mesh cannot reach each other natively; the shard_map has no
          jax.sharding.Mesh, of several processes or GPUs.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is CGX_TIMEOUT; unless that is set, 300 s where each process has one device
          of the group, and 20 s otherwise, because XLA:CPU aborts a process whose own devices wait
          for 40 s. On GPUs the results are NaN then, and the next call raises.

    Example:
        >>> mesh = jax.make_mesh((1,), ("d",))
        >>> total = jax.shard_map(
        ...     lambda x: psum_q(x, "d", config=Config(algorithm="sra"), bits=8),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
        ... )
        >>> total(jax.numpy.ones(4))
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
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
    **keywords: Unpack[Keywords],
) -> Any:
    """Average `x` over mesh axes like `jax.lax.pmean`; everything else as in `psum_q`.

    The float32 sum is divided before the reduced values are compressed. Residuals are in the units
    of `x`, as in `psum_q`: that of the average is multiplied again.
    """
    options = checked_options(
        "pmean_q", config, keywords, key=key, name=name, rules=rules, fuse=fuse, carrier=carrier
    )
    return _reduce_users(options, x, residual, axis_name, "avg")


def _reduce_users(options: Options, x: Any, residual: Any, axis_name: Axes, op: str) -> Any:
    """Reduce what a user gives, as reduce_over() does, and warn of likely mistakes."""
    options.refuse_idle_residual(residual)
    groups = mesh_groups(options.caller, axis_name)
    options.warn_of_unmatched(x)
    warn_of_equal_leaves(options.caller, x, groups.axes)
    total, lost = reduce_tree(options, x, residual, groups, op)
    return total if residual is None else (total, lost)


def warn_of_equal_leaves(caller: str, x: Any, axes: tuple[Hashable, ...]) -> None:
    """Warn, once, of leaves that are equal on all devices, as gradients of shared weights are."""
    if not compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        same = [axis for axis in axes if axis not in compat.varying_axes(leaf)]
        if math.prod(compat.axis_size(axis) or 1 for axis in same) == 1:
            continue
        warn_once(
            f"{caller}: x{jax.tree_util.keystr(path)} is the same on all devices of {same}. If it "
            "is a gradient, jax.grad has summed it over them already, exactly: that sum was not "
            "compressed, and is not the mean. Use cgx_ops.jax.compress_grads(weights, axis) in the "
            "loss, or cgx_ops.jax.value_and_grad, or differentiate weights that vary: "
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
