"""value_and_grad outside of a shard_map: in plain jax.jit, over arrays with shardings.

XLA's partitioner reduces such gradients automatically and exactly, so there is no call to replace.
Instead:

  1. a shard_map over the data axes alone; XLA partitions over the other axes
  2. weights that are sharded over data axes (FSDP, ZeRO) are gathered, exactly; then each device
     computes the loss of its part of the batch, and its gradients
  3. gradients are compressed: those of shared weights by pmean_q, those of sharded weights by
     psum_scatter_q. This runs in a nested shard_map over all other axes, in which a device sends
     the part of a weight that its spec assigns to it
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from cgx_ops.config import Config
from cgx_ops.jax._src.collectives.options import COMPRESS_ALL, Options
from cgx_ops.jax._src.collectives.primitive import vary_tree
from cgx_ops.jax._src.collectives.psum import reduce_over
from cgx_ops.jax._src.collectives.scatter_gather import scatter_over
from cgx_ops.jax._src.gradients.device_gradients import (
    device_value_and_grad,
    differentiated_indices,
)
from cgx_ops.jax._src.runtime import compat
from cgx_ops.planner import Plan

Specs = Any  # a pytree of PartitionSpec


def value_and_grad_of_shards(
    fun: Callable[..., Any],
    axes: tuple[Any, ...],
    argnums: int | Sequence[int],
    has_aux: bool,
    in_specs: Sequence[Specs],
    mesh: Mesh | AbstractMesh | None,
    options: Options,
) -> Callable[..., Any]:
    """Implement gradients.value_and_grad() for calls with in_specs."""
    caller = options.caller
    own_value_and_grad = device_value_and_grad(caller, fun, axes, argnums, has_aux)

    def differentiated(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise TypeError(
                f"{caller}: {len(args)} arguments but {len(in_specs)} in_specs: give a "
                "PartitionSpec, or a tree of them, for each argument"
            )
        indices = differentiated_indices(caller, argnums, len(args))
        specs = [
            jax.tree.broadcast(spec, arg, is_leaf=_is_spec)
            for spec, arg in zip(in_specs, args, strict=True)
        ]
        data = jax.tree.map(lambda spec: _part(spec, axes), specs, is_leaf=_is_spec)

        def of_gradients(specs: list[Specs]) -> Specs:
            chosen = tuple(specs[index] for index in indices)
            return chosen[0] if isinstance(argnums, int) else chosen

        def of_shard(key: jax.Array | None, *shards: Any) -> Any:
            whole = [
                _gathered(shard, spec, axes) if index in indices else shard
                for index, (shard, spec) in enumerate(zip(shards, specs, strict=True))
            ]
            result, gradients = own_value_and_grad(*whole)
            reduced = _reduced(gradients, of_gradients(specs), axes, options.with_key(key))
            return jax.lax.pmean(vary_tree(result, axes), axes), reduced

        return jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(PartitionSpec(), *data),
            out_specs=(PartitionSpec(), of_gradients(data)),
            axis_names=set(axes),
        )(options.key, *args)

    return differentiated


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _entries(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Return the axes over which each dimension is sharded."""
    return [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]


def _part(spec: PartitionSpec, axes: Sequence[Any], *, others: bool = False) -> PartitionSpec:
    """Return a spec with these axes alone, or with all others."""
    return PartitionSpec(
        *(tuple(a for a in entry if (a in axes) != others) or None for entry in _entries(spec))
    )


def _sharded_dimension(spec: PartitionSpec, axes: tuple[Any, ...]) -> int | None:
    """Return the dimension that is sharded over the data axes, or None."""
    found = [d for d, entry in enumerate(_entries(spec)) if set(entry) & set(axes)]
    if not found:
        return None
    ours = tuple(axis for axis in _entries(spec)[found[0]] if axis in axes)
    if len(found) > 1 or ours != axes:
        raise ValueError(
            f"value_and_grad: weights have the spec {spec}, and the data axes are {axes}: shard "
            "one dimension over all of these axes, in their order, or none. If weights are "
            "sharded over one data axis of two (HSDP), pass only that one as axis_name: XLA "
            "averages over the other, exactly"
        )
    return found[0]


def _gathered(weights: Any, specs: Specs, axes: tuple[Any, ...]) -> Any:
    """Return whole weights, gathered over the data axes where their specs split them."""

    def whole(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        dimension = _sharded_dimension(spec, axes)
        if dimension is None:
            return leaf
        return jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True)

    return jax.tree.map(whole, weights, specs)


def _reduced(gradients: Any, specs: Specs, axes: tuple[Any, ...], options: Options) -> Any:
    """Return the mean over the data axes, each leaf sharded as its weights are."""
    options.warn_of_unmatched(gradients)
    leaves, tree = jax.tree.flatten(gradients)
    configs = jax.tree.leaves(options.of_tree(gradients))
    of_leaves = tree.flatten_up_to(specs)
    dimensions = [_sharded_dimension(spec, axes) for spec in of_leaves]
    if any(dimension is not None for dimension in dimensions):
        _check_scattered(options)

    size = jax.lax.axis_size(axes)
    rest = [_part(spec, axes, others=True) for spec in of_leaves]
    of_blocks = list(rest)
    for number, d in enumerate(dimensions):
        if d is not None:
            # A separate dimension for the devices' blocks, which no other mesh axis splits.
            shape, spec = leaves[number].shape, rest[number]
            cut = (*shape[:d], size, shape[d] // size, *shape[d + 1 :])
            leaves[number] = leaves[number].reshape(cut)
            of_blocks[number] = PartitionSpec(*spec[:d], None, *spec[d:])

    def reduce(key: jax.Array | None, leaves: list[jax.Array]) -> list[jax.Array]:
        own = options.with_key(key)
        pairs = list(zip(leaves, dimensions, strict=True))
        # None replaces sharded leaves, so that rules match the paths of the whole tree.
        shared = tree.unflatten([leaf if d is None else None for leaf, d in pairs])
        means = iter(jax.tree.leaves(reduce_over(own, shared, None, axes, "avg")[0]))
        return [
            next(means) if d is None else _scattered(leaf / size, d, axes, i, own, configs[i])
            for i, (leaf, d) in enumerate(pairs)
        ]

    named = {axis for spec in rest for entry in _entries(spec) for axis in entry}
    others = named | set(compat.automatic_axes())  # psum_q needs all axes to be manual
    if others:
        reduce = jax.shard_map(
            reduce, in_specs=(PartitionSpec(), of_blocks), out_specs=rest, axis_names=others
        )
    return tree.unflatten(reduce(options.key, leaves))


def _check_scattered(options: Options) -> None:
    """Refuse settings that psum_scatter_q does not support."""
    if options.carrier != "native" or isinstance(options.fuse, Plan):
        what = "a plan" if options.carrier == "native" else f"carrier={options.carrier!r}"
        raise ValueError(
            f"{options.caller}: {what} with weights that are sharded over the data axes: their "
            "gradients are reduced by psum_scatter_q, which does not support it. Leave it out, or "
            "give these weights a spec without the data axes"
        )


def _scattered(
    leaf: jax.Array,
    dimension: int,
    axes: tuple[Any, ...],
    number: int,
    options: Options,
    config: Config,
) -> jax.Array:
    """Return this device's block of a leaf's sum. Leaves have separate names and noise."""
    own = replace(
        options.of_message(str(number)), config=config, rules=COMPRESS_ALL, verb="reduce_scatter",
        key=None if options.key is None else jax.random.fold_in(options.key, number),
    )  # fmt: skip
    return scatter_over(own, leaf, axes, dimension, tiled=False)
