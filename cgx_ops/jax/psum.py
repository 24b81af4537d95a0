"""psum_q and pmean_q: sums and means over mesh axes whose operands travel compressed."""

import math
from collections.abc import Hashable
from typing import Any

import jax

from cgx_ops._warnings import warn_once
from cgx_ops.config import Algorithm, Compressor
from cgx_ops.jax import _compat
from cgx_ops.jax.knobs import checked_knobs, refuse_idle_residual
from cgx_ops.jax.mesh_groups import Axes, mesh_groups
from cgx_ops.jax.primitive import Carrier
from cgx_ops.jax.trees import reduce_tree
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules


def psum_q(
    x: Any,
    axis_name: Axes,
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    intra_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    compressor: Compressor = "uniform",
    density: float | None = None,
    value_bits: int | None = None,
    rotation: int | None = None,
    clip: bool = False,
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
) -> Any:
    """Sum `x` over mesh axes like `jax.lax.psum`, sending `bits` bits an element.

    Inside `jax.shard_map` only. Every device of a group gets the same bits. Leaves with fewer than
    max(16, minimal_size) elements are summed exactly. Every leaf, and each example of a vmap, is
    compressed by itself, as if it were summed alone.

    Where a group has several devices in each of several processes, the devices of a process are
    summed first, exactly, and processes send compressed sums to each other.

    The derivative is that of `jax.lax.psum`: tangents and cotangents are summed exactly. To
    compress gradients, apply psum_q to the gradients.

    Args:
        x: an array or a pytree of arrays of float32, float16 or bfloat16, any shape.
        axis_name: name of a mesh axis, or a tuple of names, as for `jax.lax.psum`.
        bits: of an element: 1 to 8 ("levels" has 1 to 4, "qsgd" 2 to 8, other compressors but
          "uniform" a width of their own), or 32: exact, whatever the compressor.
        bucket_size: elements that share one minimum and step, >= 1.
        key: a PRNG key (typed or raw): rounds stochastically, unbiased. Give another key in every
          step. Two calls with one key have the same noise if their verb, axes and name are the
          same; leaves, examples of a vmap, devices, and groups whose values vary over other axes
          (if types are checked) have noise of their own. Devices may have equal or different keys.
          None: rounds to nearest. Compressors that round in one way only do so with and without a
          key, but "ternary" and "qsgd" need one, and "randk" one that is equal on all devices: it
          says which values travel.
        name: identifies the collective among processes, and is unique among those that run at the
          same time. "": the call's place in the program that is being compiled.
        algorithm: "auto", "by_hosts", "one_shot", "sra", "ring", "hierarchical": see Config.
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: in "hierarchical", bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a leaf's last bucket exact if it is not full.
        minimal_size: leaves with fewer elements are summed exactly.
        compressor: what values become: "uniform", "levels", "sign" (a sum is a majority vote),
          "onebit", "ternary", "qsgd", "half", "topk", "threshold" (on CPUs only) or "randk".
        density: of "topk", "threshold" and "randk": the share of values that travel, more than 0
          and at most 1; None: 0.01.
        value_bits: of the values that "topk" and "threshold" send: 1-8, 16 or 32; None: 32, exact.
        rotation: so many values of a bucket, a power of two, are rotated by a Hadamard matrix
          before they are encoded; None: none.
        clip: "ternary" clips values at 2.5 times their bucket's root mean square.
        rules: `cgx_ops.Rules`, settings of leaves by their paths, such as "layers.0.bias". None:
          every leaf is sent as the other arguments say. With rules, leaves of at most one
          dimension are sent exact unless a rule sets their bits (`exact_vectors`).
        fuse: leaves of a dtype share messages of about 4 MiB of values, the last leaves first; each
          travels while the leaves of others are computed. Less than 8 MiB are one message. False:
          one for each leaf. A cgx_ops.planner.Plan: one for each of its groups (and dtype); the
          plan has every leaf, by its path, and processes compare it when they compile it, unless
          XLA carries the bytes. See docs/planner.md.
        carrier: "native": cgx moves the bytes, through memory and MPI. "xla": XLA's own collectives
          do, wherever those work, with or without MPI; the bits of the result are those of the same
          algorithm. Not for "ring" and "hierarchical", nor for groups with more devices in one
          process than in another.
        residual: error feedback: what compression lost before, a tree like `x`, added to it in
          float32. None, also for some leaves: nothing is added, and what is lost now is not
          returned. Compressors with which it would not converge refuse it.

    Returns:
        The sums, in the structure, shapes and dtypes of `x`; equal on all devices of a group. With
        `residual` a pair of them and the new residual, a tree like `x` too, which varies over the
        axes: over all devices, `x` and the old residuals add up to the result (as a sum) and the
        new residuals, but for what float32 sums and the dtype round. Given to the next call, it
        makes sure that nothing is lost for good. Where devices of a process are summed first, the
        first of them has what all of them lost. A loss that is not finite becomes 0.

    Raises:
        NameError: an axis name is not bound here.
        NotImplementedError: an axis belongs to a vmap; the shard_map leaves axes to the compiler;
          the platform is neither CPU nor CUDA. On CUDA: carrier="xla"; a group has several GPUs in
          each of several processes.
        TypeError: a leaf is not float32, float16 or bfloat16; a residual has another dtype than its
          leaf; a knob is not a static value; `key` is not a key.
        ValueError: a knob is out of its range, or does not belong to the compressor; the compressor
          needs a key; error feedback would not converge, or bits=32 leaves it nothing;
          `residual` has another structure or shape than `x`; the plan is of another tree.
        cgx_ops.MismatchError: processes have different plans; it names the first leaf that differs.
        RuntimeError: processes of the mesh cannot reach each other natively; the shard_map has no
          jax.sharding.Mesh, of several processes or GPUs.
        jax.errors.JaxRuntimeError: at run time; a peer is late or dead or called something else.
          The deadline is CGX_TIMEOUT; unless that is set, 300 s where each process has one device
          of the group, and 20 s otherwise, because XLA:CPU aborts a process whose own devices wait
          for 40 s. On GPUs the results are NaN then, and the next call raises.
    """
    refuse_idle_residual("psum_q", residual, bits, rules)
    pair = _reduce_users(
        "psum_q", x, residual, axis_name, "sum", key=key, name=name, bits=bits,
        bucket_size=bucket_size, algorithm=algorithm, gather_bits=gather_bits,
        intra_bits=intra_bits, skip_incomplete_buckets=skip_incomplete_buckets,
        minimal_size=minimal_size, compressor=compressor, density=density, value_bits=value_bits,
        rotation=rotation, clip=clip, rules=rules, fuse=fuse, carrier=carrier,
    )  # fmt: skip
    return pair[0] if residual is None else pair


def pmean_q(
    x: Any,
    axis_name: Axes,
    *,
    bits: int = 4,
    bucket_size: int = 512,
    key: jax.Array | None = None,
    name: str = "",
    algorithm: Algorithm = "auto",
    gather_bits: int | None = None,
    intra_bits: int | None = None,
    skip_incomplete_buckets: bool = False,
    minimal_size: int = 0,
    compressor: Compressor = "uniform",
    density: float | None = None,
    value_bits: int | None = None,
    rotation: int | None = None,
    clip: bool = False,
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    residual: Any = None,
) -> Any:
    """Average `x` over mesh axes like `jax.lax.pmean`; everything else as in `psum_q`.

    The float32 sum is divided before the reduced values are compressed. Residuals are in the units
    of `x`, as in `psum_q`: that of the average is multiplied again.
    """
    refuse_idle_residual("pmean_q", residual, bits, rules)
    pair = _reduce_users(
        "pmean_q", x, residual, axis_name, "avg", key=key, name=name, bits=bits,
        bucket_size=bucket_size, algorithm=algorithm, gather_bits=gather_bits,
        intra_bits=intra_bits, skip_incomplete_buckets=skip_incomplete_buckets,
        minimal_size=minimal_size, compressor=compressor, density=density, value_bits=value_bits,
        rotation=rotation, clip=clip, rules=rules, fuse=fuse, carrier=carrier,
    )  # fmt: skip
    return pair[0] if residual is None else pair


def _reduce_users(
    caller: str, x: Any, residual: Any, axis_name: Axes, op: str, /, **knobs: Any
) -> tuple[Any, Any]:
    """Reduce what a user gives, as reduce_over() does, and warn of likely mistakes."""
    checked = checked_knobs(caller, **knobs)
    groups = mesh_groups(caller, axis_name)
    checked.warn_of_unmatched(x)
    warn_of_equal_leaves(caller, x, groups.axes)
    return reduce_tree(caller, x, residual, groups, op, checked)


def warn_of_equal_leaves(caller: str, x: Any, axes: tuple[Hashable, ...]) -> None:
    """Warn, once, of leaves that are equal on all devices, as gradients of shared weights are."""
    if not _compat.types_are_checked():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(x):
        same = [axis for axis in axes if axis not in _compat.varying_axes(leaf)]
        if math.prod(_compat.axis_size(axis) or 1 for axis in same) == 1:
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
    caller: str, x: Any, residual: Any, axis_name: Axes, op: str, /, *, parts: bool = True,
    **knobs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Reduce a tree as psum_q (op "sum") or pmean_q ("avg") do; `knobs` are theirs.

    parts: whether a large tree is several messages.

    Returns:
        The reduced tree, and the new residual (None without one).
    """
    checked = checked_knobs(caller, **knobs)
    groups = mesh_groups(caller, axis_name)
    return reduce_tree(caller, x, residual, groups, op, checked, parts=parts)
