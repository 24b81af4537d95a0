"""The compiled handlers and the processes they talk to.

Registers the handlers of a platform with XLA at the first lowering for it (not at import: an import
starts no backend, and XLA:CPU refuses a state type that it learns before the backend exists), and
finds out in which processes the devices of a mesh are.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from cgx_ops import Communicator
from cgx_ops._core import launchers
from cgx_ops._core import world as world_of_ranks
from cgx_ops.jax._src.runtime import compat

Platform = Literal["cpu", "cuda"]  # those that are served, by JAX's names

# Half of what XLA:CPU lets its own collectives among the devices of a process wait before it aborts
# the process: a later deadline of ours would never be seen. Among processes XLA waits on.
_LOCAL_TIMEOUT_S = 20.0

_lock = threading.Lock()

# The communicator whose ranks are JAX's processes, or why there is none; None: cgx_ops.init()'s.
_world: Communicator | str | None = None
# Whether cgx_ops.jax.initialize() was called: then the number of JAX's processes is deliberate.
_initialized = False


def note_initialized() -> None:
    """Note that the user has decided which processes JAX has."""
    global _initialized
    _initialized = True


def set_world(world: Communicator | str) -> None:
    """Set the communicator of JAX's processes, or say why there is none. Before any lowering."""
    global _world
    _world = world
    if isinstance(world, Communicator):
        world_of_ranks.adopt_jax(world)


def world() -> Communicator:
    """Return the communicator whose ranks are JAX's processes.

    Raises:
        RuntimeError: there is none.
    """
    if isinstance(_world, str):
        raise RuntimeError(
            f"cgx cannot connect JAX's processes: {_world}. Let them reach each other, or pass "
            "carrier='xla'"
        )
    return _world or world_of_ranks.init()


class Place(NamedTuple):
    """The number of this process, and how its devices or processes exchange bytes."""

    rank: int
    transport: str


def place() -> Place:
    """Return where this process stands, without connecting anything."""
    if jax.process_count() > 1:
        several = _world.transport if isinstance(_world, Communicator) else "several processes"
        return Place(jax.process_index(), several)
    ranks = launchers.place()
    return Place(ranks.rank, "thread" if jax.device_count() > 1 else "several processes")


def used() -> bool:
    """Tell whether this process has lowered or loaded collectives."""
    return _binding.cache_info().currsize > 0


def target(name: str, platform: Platform = "cpu") -> str:
    """Return the name that XLA has for a target, such as "psum_q"; registers all if need be."""
    with _lock:
        _REGISTER[platform]()
    return f"cgx_{name}"


def targets() -> tuple[str, ...]:
    """Return the names of all FFI targets, registered if need be."""
    with _lock:
        return tuple({name: None for register in _REGISTER.values() for name in register()})


@functools.cache
def _binding() -> Any:
    from cgx_ops import _xla_ffi

    _count_compilations(_xla_ffi.compilation_begins, _xla_ffi.compilation_ends)
    _xla_ffi.set_local_timeout(launchers.timeout(_LOCAL_TIMEOUT_S))
    if isinstance(_world, Communicator):
        _xla_ffi.set_world(_world.id)
    return _xla_ffi


class _OfThread(threading.local):
    """Whether this thread compiles collectives, and how many of its compilations are under way."""

    compiles_collectives = False
    under_way = 0


_of_thread = _OfThread()


def note_collective() -> None:
    """Note that this thread lowers or loads collectives: from here on its compilations are counted.

    Those of a thread that never does are nobody's business. Counted, they would keep what is
    counted by compilation (xla_ffi/site.h) from beginning anew, in this process alone.
    """
    _of_thread.compiles_collectives = True


def _count_compilations(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    def begin() -> None:
        if _of_thread.compiles_collectives:
            _of_thread.under_way += 1
            begins()

    def end() -> None:
        if _of_thread.under_way:  # else it began before anybody listened, or counted
            _of_thread.under_way -= 1
            ends()

    compat.call_around_compile(begin, end)


def _register(handlers: dict[str, Any], platform: str) -> tuple[str, ...]:
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return tuple(handlers)


@functools.cache
def _register_cpu() -> tuple[str, ...]:
    binding = _binding()
    compat.device_ids("cpu")  # makes the backend
    jax.ffi.register_ffi_type("cgx_psum_q_site", binding.site_type(), platform="cpu")
    return _register(binding.cpu_handlers(), "cpu")


@functools.cache
def _register_cuda() -> tuple[str, ...]:
    binding = _binding()
    binding.set_cuda_devices(compat.device_ids("cuda"))
    # Where there is no GPU, for which programs may be lowered nevertheless, JAX only notes these.
    jax.ffi.register_ffi_type("cgx_psum_q_cuda_site", binding.cuda_site_type(), platform="CUDA")
    return _register(binding.cuda_handlers(), "CUDA")


_REGISTER: dict[Platform, Callable[[], tuple[str, ...]]] = {
    "cpu": _register_cpu,
    "cuda": _register_cuda,
}


def refusal(function: str, platforms: Sequence[str]) -> str:
    """Say that a function is not served on some platform, and what to do."""
    return (
        f"{function} runs on CPU and CUDA devices, not on {'/'.join(platforms)}: set "
        "JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda, or use JAX's own collective"
    )


def processes_of(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, carrier: str
) -> list[int] | None:
    """Return the process of each device of the mesh, in order; None if all are in this one.

    Raises:
        RuntimeError: the mesh has no devices; or cgx, which is to carry the bytes ("native"), does
          not know JAX's processes.
    """
    if jax.process_count() == 1:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        raise RuntimeError(
            "psum_q needs to know the devices of the mesh when there are several processes: give "
            "jax.shard_map a jax.sharding.Mesh, or call jax.set_mesh"
        )
    processes = [device.process_index for device in mesh.devices.flat]
    if set(processes) == {jax.process_index()}:
        return None
    if carrier == "xla":
        return processes
    ours, theirs = (world().rank, world().size), (jax.process_index(), jax.process_count())
    if ours != theirs:
        raise RuntimeError(
            f"this is rank {ours[0]} of {ours[1]} for cgx but process {theirs[0]} of {theirs[1]} "
            "for JAX: call cgx_ops.jax.initialize() instead of jax.distributed.initialize()"
        )
    return processes


def devices_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> list[int]:
    """Return the id of each device of the mesh, in order.

    Raises:
        RuntimeError: the mesh has no devices.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        raise RuntimeError(
            "psum_q needs to know the devices of the mesh when they are GPUs: give jax.shard_map a "
            "jax.sharding.Mesh, or call jax.set_mesh"
        )
    return [device.id for device in mesh.devices.flat]


def require_company(caller: str) -> None:
    """Raise RuntimeError if JAX has one process where the environment shows several.

    Whoever called cgx_ops.jax.initialize() or jax.distributed.initialize() wants it so.
    """
    if _initialized or jax.distributed.is_initialized() or jax.process_count() > 1:
        return
    shown, variable = launchers.ranks_shown()
    if shown > 1 and not launchers.independent():
        raise RuntimeError(
            f"{caller}: {variable}={shown} shows several processes, but JAX has this one only, so "
            "the result would be that of its own devices. Call cgx_ops.jax.initialize() first, "
            "which makes one JAX of all; or set CGX_WORLD=single if the processes are independent"
        )
