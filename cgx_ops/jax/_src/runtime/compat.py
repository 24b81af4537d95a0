"""All names of JAX that are private or differ between versions (0.10 and 0.11).

Four parts: types of arrays inside shard_map, lowering, ordered effects, and the runtime.
"""

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
from jax._src import clusters, config, core, dispatch, distributed, effects, xla_bridge
from jax._src.interpreters import mlir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]  # a module without stubs

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
    """Return whether the surrounding shard_map has check_vma=True: types show what varies."""
    return config._check_vma.value


def zero_tangent(primal: Any) -> Any:
    """Return the symbolic zero of a value's tangent type."""
    return ad.Zero(core.typeof(primal).to_tangent_aval())


def axis_size(name: Hashable) -> int | None:
    """Return the size of an axis that a surrounding transformation binds, or None."""
    env = core.get_axis_env()
    return env.axis_size(name) if env.axis_exists(name) else None


def is_shard_map_axis(name: Hashable) -> bool:
    """Return whether a bound axis is one of shard_map's, not of vmap's."""
    return name in jax.sharding.get_abstract_mesh().manual_axes


def automatic_axes() -> tuple[str, ...]:
    """Return the axes larger than one that the surrounding shard_map leaves to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(
        str(name) for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes
    )


# ---- where a lowering happens ------------------------------------------------------------------

# The number of indices that next_index has returned for each module being lowered.
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
    """Return an abstract value with only the shape and dtype of another one."""
    return core.ShapedArray(aval.shape, aval.dtype)


def seed_rows(count: int) -> core.ShapedArray:
    """Return the abstract value of the seeds of that many segments."""
    return core.ShapedArray((count, 2), jax.numpy.uint32)


def concatenated(rows: Sequence[Any]) -> Any:
    """Concatenate HLO values (n, ...) of one dtype."""
    if len(rows) == 1:
        return rows[0]
    return stablehlo.concatenate(list(rows), dimension=0)


def collective_channel() -> Any:
    """Return the channel that makes the replica groups of an HLO collective partition ids."""
    return stablehlo.ChannelHandle.get(mlir.COLLECTIVE_CHANNEL_ID, mlir.DEVICE_TO_DEVICE_TYPE)


# ---- ordered effects ---------------------------------------------------------------------------

Effect = effects.Effect


def register_ordered_effect(kind: type[effects.Effect]) -> None:
    """Make JAX keep operations with this effect in order, in all contexts."""
    for allowed in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        allowed.add_type(kind)
    _mend_tokens(kind)


def _mend_tokens(kind: type[effects.Effect]) -> None:
    """Fix how launches take the tokens of an effect.

    JAX gives each launch the token of the previous one, waits for it, and copies it to where it is
    already, which costs about as much as the rest of the launch. The token of a launch that failed
    in the background is an error too: every later launch would fail with it.
    """
    tokens = dispatch.RuntimeTokenSet
    get_token_input = tokens.get_token_input

    def get_mended_token_input(self: Any, eff: effects.Effect, devices: Any) -> Any:
        token = self.current_tokens.get(eff) if isinstance(eff, kind) else None
        if token is not None:
            try:
                token.block_until_ready()
            except jax.errors.JaxRuntimeError:  # of a failed launch, whose results raise it
                del self.current_tokens[eff]
            else:
                if token._buf.devices() == set(devices):
                    return token
        return get_token_input(self, eff, devices)

    tokens.get_token_input = get_mended_token_input


def lower_in_order(
    ctx: Any,
    effect: effects.Effect,
    rule: Callable[..., Any],
    avals_in: Sequence[core.AbstractValue],
    *operands: Any,
    **attributes: Any,
) -> Any:
    """Lower a custom call that takes the effect's token before its operands and returns it."""
    with_token = ctx.replace(
        avals_in=[core.abstract_token, *avals_in],
        avals_out=[core.abstract_token, *ctx.avals_out],
    )
    token, *results = rule(with_token, ctx.tokens_in.get(effect), *operands, **attributes)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


# ---- the runtime -------------------------------------------------------------------------------


def backends_started() -> bool:
    """Return whether an XLA backend exists already, so that it is too late for jax.distributed."""
    return xla_bridge.backends_are_initialized()


def device_ids(platform: str) -> dict[int, int]:
    """Return JAX's ids of this process's devices of a platform, by the driver's device numbers.

    Starts the backends. Empty if JAX has no such devices.
    """
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        return {}
    return {device.local_hardware_id: device.id for device in devices}


def choose_gpu(number: int) -> None:
    """Make one GPU visible to JAX, unless the user has selected some. Before any backend."""
    option = "jax_cuda_visible_devices"
    if jax.config.values[option] == "all":
        jax.config.update(option, str(number))


def cluster_is_detected() -> bool:
    """Return whether JAX recognizes the launcher of this process, such as SLURM's."""
    kinds = clusters.ClusterEnv._cluster_types
    return any(kind.is_env_present() for kind in kinds if not kind.opt_in_only_method)


def detected_place(
    address: str | None, size: int | None, rank: int | None, timeout_s: float
) -> tuple[str | None, int | None, int | None]:
    """Complete a coordinator address, process count and process index from the launcher.

    Also restricts JAX to the accelerators that the launcher assigned to this process.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    address, size, rank, devices = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, size, rank, None, None, math.ceil(timeout_s)
    )
    if devices is not None:
        for option in ("jax_cuda_visible_devices", "jax_rocm_visible_devices"):
            jax.config.update(option, ",".join(map(str, devices)))
    return address, size, rank


def connect(address: str, size: int, rank: int, timeout_s: float) -> None:
    """Do the work of jax.distributed.initialize, with a service that another process runs.

    Raises:
        RuntimeError: Not all processes connect in time.
    """
    # jaxlib's own callback also ends the process if the others do not connect. With any other
    # callback jaxlib raises std::bad_cast, since it cannot convert the status: from connect(),
    # which is an error here; and later, if the service is lost, on a separate thread, which still
    # aborts the process. A Python function would keep the client from being shut down at exit.
    client = _jax.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=math.ceil(timeout_s),
        use_compression=True,
        missed_heartbeat_callback=os.abort,
    )
    client.connect()
    state = distributed.global_state
    state.coordinator_address, state.num_processes, state.process_id = address, size, rank
    state.client = client
    state.initialize_preemption_sync_manager()


def leave_distributed() -> None:
    """Undo connect(): JAX has only this process again."""
    jax.distributed.shutdown()
    state = distributed.global_state
    state.coordinator_address, state.num_processes, state.process_id = None, 1, 0


def gather_from_processes(
    key: str, mine: bytes, timeout_s: float, processes: Sequence[int] | None = None
) -> list[bytes]:
    """Gather the bytes of all processes on all processes, by JAX's key-value store; once per key.

    processes: The participants; None: all.
    """
    state, timeout_ms = distributed.global_state, math.ceil(1000 * timeout_s)
    client = state.client
    if processes is None:
        processes = range(state.num_processes)
    assert client is not None, "jax.distributed is not initialized"
    client.key_value_set_bytes(f"{key}/{state.process_id}", mine)
    return [client.blocking_key_value_get_bytes(f"{key}/{i}", timeout_ms) for i in processes]


def set_execution_stream(number: int) -> None:
    """Run this thread's launches on one stream from now on: see execution_stream()."""
    _jax.set_execution_stream_id(number)


@contextlib.contextmanager
def execution_stream(number: int) -> Iterator[None]:
    """Run this thread's launches on XLA:CPU in parallel with launches of other streams.

    Programs of one number run in launch order. Programs of different numbers run at the same time
    if the process has one CPU device. GPUs run all in one order.
    """
    before = _jax.get_execution_stream_id()
    set_execution_stream(number)
    try:
        yield
    finally:
        set_execution_stream(before)


def call_around_compile(begin: Callable[[str], None], end: Callable[[], None]) -> None:
    """Call `begin` and `end` around every later compilation by XLA.

    This includes loading an executable from the persistent cache. JAX reports the start of a
    compilation as a scalar event and its end, even of a failed one, as a duration. If `begin`
    raises, the compilation raises this exception, and `end` is not called.

    Args:
        begin: Gets the name of the module, as module_name() returns it.
        end: Is called on the same thread.
    """

    def on_begin(event: str, value: float | int, fun_name: str | int = "", **_: str | int) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            begin(mlir.sanitize_name(str(fun_name)).rstrip("_"))

    def on_end(event: str, duration_secs: float, **_: str | int) -> None:
        if event == dispatch.BACKEND_COMPILE_EVENT:
            end()

    jax.monitoring.register_scalar_listener(on_begin)
    jax.monitoring.register_event_duration_secs_listener(on_end)
