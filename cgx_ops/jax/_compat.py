"""Every name of JAX that is private or differs between versions (0.10 and 0.11).

Three parts: the types of arrays inside shard_map, where a lowering happens, and the runtime.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax._src import config, core, dispatch, xla_bridge
from jax._src.interpreters import mlir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad

Tracer = core.Tracer

# ---- the types of arrays inside shard_map ------------------------------------------------------


def varying_axes(x: Any) -> frozenset[Hashable]:
    """Return the mesh axes over which an array (or abstract value) may differ between devices."""
    aval = x if isinstance(x, core.ShapedArray) else jax.typeof(x)
    return frozenset(aval.mat.varying)


def with_varying_axes(aval: core.ShapedArray, axes: frozenset[Hashable]) -> core.ShapedArray:
    """Return the same abstract value, varying over exactly these axes."""
    return aval.update(manual_axis_type=aval.mat.update(varying=axes), weak_type=False)


def types_are_checked() -> bool:
    """Tell whether the shard_map here has check_vma=True, so that types say what varies."""
    return config._check_vma.value


def zero_tangent(primal: Any) -> Any:
    """Return the symbolic zero of a value's tangent type."""
    return ad.Zero(core.typeof(primal).to_tangent_aval())


def axis_size(name: Hashable) -> int | None:
    """Return the size of an axis that some transformation has bound here, or None."""
    env = core.get_axis_env()
    return env.axis_size(name) if env.axis_exists(name) else None


def is_shard_map_axis(name: Hashable) -> bool:
    """Tell whether a bound axis is one of shard_map's, not of vmap's."""
    return name in jax.sharding.get_abstract_mesh().manual_axes


def automatic_axes() -> tuple[str, ...]:
    """Return the axes larger than one that the shard_map here leaves to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        str(name) for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes
    )


# ---- where a lowering happens ------------------------------------------------------------------

# How many indices next_index has given out in each module that is being lowered.
_indices: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def module_name(ctx: Any) -> str:
    """Return the name of the module being lowered, such as "jit_step"."""
    return str(ctx.module_context.module.operation.attributes["sym_name"]).strip('"')


def next_index(ctx: Any) -> int:
    """Count 0, 1, 2, ... within one module being lowered."""
    module = ctx.module_context.module
    index = _indices.get(module, 0)
    _indices[module] = index + 1
    return index


def mesh_of(ctx: Any) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """Return the mesh of the shard_map around a lowering."""
    return ctx.module_context.axis_context.mesh


def scalar_u32() -> core.ShapedArray:
    """Return the abstract value of a partition id."""
    return core.ShapedArray((), jax.numpy.uint32)


def plain(aval: core.ShapedArray) -> core.ShapedArray:
    """Return the shape and dtype alone of an abstract value."""
    return core.ShapedArray(aval.shape, aval.dtype)


def collective_channel() -> Any:
    """Return what says that the replica groups of an HLO collective are partition ids."""
    return stablehlo.ChannelHandle.get(mlir.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE)


# ---- the runtime -------------------------------------------------------------------------------


def backends_started() -> bool:
    """Tell whether some XLA backend exists already, so that jax.distributed comes too late."""
    return xla_bridge.backends_are_initialized()


def call_around_compile(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Have `begin` and `end` called around every compilation by XLA from here on.

    That is also around loading an executable from the persistent cache. JAX reports the start of a
    compilation as a scalar event and its end, also a failed one's, as a duration.
    """

    def on_begin(event: str, value: float | int, **_: str | int) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            begin()

    def on_end(event: str, duration_secs: float, **_: str | int) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            end()

    jax.monitoring.register_scalar_listener(on_begin)
    jax.monitoring.register_event_duration_secs_listener(on_end)
