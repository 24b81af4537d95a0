"""JAX's processes: their communicator, and which process holds which device of a mesh."""

from typing import Any, NamedTuple

import jax

from cgx_ops import Communicator
from cgx_ops._core import launchers
from cgx_ops._core import world as world_of_ranks

# The communicator whose ranks are JAX's processes, or why there is none. None: cgx_ops.init()'s.
_world: Communicator | str | None = None
# Whether cgx_ops.jax.initialize() was called: then the number of JAX's processes is intended.
_initialized = False


def note_initialized() -> None:
    """Note that the user has called initialize()."""
    global _initialized
    _initialized = True


def set_world(world: Communicator | str) -> None:
    """Set the communicator of JAX's processes, or why there is none. Before any lowering."""
    global _world
    _world = world
    if isinstance(world, Communicator):
        world_of_ranks.adopt_jax(world)


def world() -> Communicator:
    """Return the communicator whose ranks are JAX's processes.

    Raises:
        RuntimeError: There is none.
    """
    if isinstance(_world, str):
        raise RuntimeError(
            f"cgx cannot connect JAX's processes: {_world}. Make them reachable from each other, "
            "or pass carrier='xla'"
        )
    return _world or world_of_ranks.init()


def connected_world() -> Communicator | None:
    """Return the communicator of set_world(), if any."""
    return _world if isinstance(_world, Communicator) else None


class Place(NamedTuple):
    """The index of this process, and the transport between its devices or processes."""

    rank: int
    transport: str


def place() -> Place:
    """Return the place of this process, without connecting anything."""
    if jax.process_count() > 1:
        connected = connected_world()
        transport = connected.transport if connected else "several processes"
        return Place(jax.process_index(), transport)
    ranks = launchers.place()
    return Place(ranks.rank, "thread" if jax.device_count() > 1 else "several processes")


def processes_of(
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, carrier: str
) -> list[int] | None:
    """Return the process of each device of the mesh, in order; None if all are in this one.

    Raises:
        RuntimeError: The mesh has no devices; or carrier is "native" and cgx does not connect JAX's
            processes.
    """
    if jax.process_count() == 1:
        return None
    processes = [device.process_index for device in _devices(mesh, "there are several processes")]
    if set(processes) == {jax.process_index()}:
        return None
    if carrier == "xla":
        return processes
    ours, theirs = (world().rank, world().size), (jax.process_index(), jax.process_count())
    if ours != theirs:
        raise RuntimeError(
            f"this is rank {ours[0]} of {ours[1]} for cgx, but process {theirs[0]} of {theirs[1]} "
            "for JAX: call cgx_ops.jax.initialize() instead of jax.distributed.initialize()"
        )
    return processes


def devices_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> list[int]:
    """Return the id of each device of the mesh, in order.

    Raises:
        RuntimeError: The mesh has no devices.
    """
    return [device.id for device in _devices(mesh, "they are GPUs")]


def _devices(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, when: str) -> list[Any]:
    if not isinstance(mesh, jax.sharding.Mesh):
        raise RuntimeError(
            f"psum_q needs the devices of the mesh when {when}: pass a jax.sharding.Mesh to "
            "jax.shard_map, or call jax.set_mesh"
        )
    return list(mesh.devices.flat)


def require_company(caller: str) -> None:
    """Raise RuntimeError if JAX has one process and the environment shows several.

    After cgx_ops.jax.initialize() or jax.distributed.initialize() a single process is intended.
    """
    if _initialized or jax.distributed.is_initialized() or jax.process_count() > 1:
        return
    shown, variable = launchers.ranks_shown()
    if shown > 1 and not launchers.independent():
        raise RuntimeError(
            f"{caller}: {variable}={shown} shows several processes, but JAX has only this one, so "
            "only its devices would be reduced. Call cgx_ops.jax.initialize() first, which "
            "connects all processes; or set CGX_WORLD=single if the processes are independent"
        )
