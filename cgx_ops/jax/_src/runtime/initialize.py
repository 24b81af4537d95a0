"""initialize(): connect processes, for JAX and for cgx.

mpirun (Open MPI 5) is not detected by JAX. Under it, ranks communicate over cgx's communicator:

  1. every rank sends whether it can start, and its host name; all ranks raise if one cannot
  2. each takes one of the GPUs of its host, if there are any
  3. rank 0 starts the coordinator (coordinator.py) and sends its address to all
  4. every rank connects to it

With another launcher that JAX detects, or with arguments, they communicate over the coordinator:

  1. process 0 starts it; every process connects, even if it called initialize() too late
  2. every process sends whether it can continue; all raise if one cannot
  3. they create a communicator: over shared memory within a host, TCP between hosts
"""

import itertools
import json
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax

from cgx_ops import Communicator, Unsupported
from cgx_ops._core import launchers, library, world
from cgx_ops._core.exchange import exchange, free_address
from cgx_ops.jax._src.runtime import compat, processes, threads
from cgx_ops.jax._src.runtime.launching import claim

_NAME = "cgx_ops.jax.initialize"  # the name of this file's collectives
_LAST_PORT = 65535

_lifeline: socket.socket | None = None  # open until this process ends: see coordinator.py


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Connect several processes: for JAX, as `jax.distributed.initialize` does, and for cgx_ops.

    Call it once in every process, before anything that starts an XLA backend (`jax.devices()`,
    array creation). Call it from the thread that launches programs. In a single process it does
    nothing.

    Under mpirun no argument is needed: JAX's process index is the MPI rank, and each process sees
    one GPU of its host, assigned round-robin, unless `jax_cuda_visible_devices` is set. A process
    may have several CPU devices (`jax_num_cpu_devices`).

    Other launchers need no arguments either if they set torchrun's variables (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT) or if JAX detects them (SLURM, Kubernetes). With torchrun's variables
    the coordinator listens on MASTER_PORT + 1. These processes communicate over shared memory
    within a host and TCP between hosts; `CGX_SOCKET_IFNAME` selects the interfaces.

    XLA's own CPU collectives, such as `jax.lax.psum`, use gloo afterwards. If a process dies, the
    others continue, and their collectives raise. (After `jax.distributed.initialize` JAX would
    abort them.)

    Args:
        coordinator_address: "host:port" of a free port on the host of process 0. Under mpirun pass
            it only if other hosts cannot reach the address of rank 0 that is found automatically.
        num_processes: The number of processes. None (default): from the launcher.
        process_id: The index of this process, from 0. None (default): from the launcher.

    Raises:
        RuntimeError: It was called twice; an XLA backend runs already, in any process; an argument
            contradicts mpirun; the coordinator does not start; a process does not connect within
            `CGX_TIMEOUT`.
        ValueError: An argument is missing and JAX does not detect the launcher; the coordinator's
            address has no port, or one over 65535.

    Example:
        Without a launcher this process is the only one:

        >>> import jax
        >>> import cgx_ops.jax
        >>> cgx_ops.jax.initialize()
        >>> jax.process_count()
        1
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "cgx_ops.jax.initialize: jax.distributed is initialized already. Call only "
            "cgx_ops.jax.initialize(), and only once"
        )
    claim()
    threads.provide()
    under_mpirun = launchers.place().launcher == "mpirun"
    if under_mpirun and (ranks := world.of_launcher()).size > 1:
        _initialize_by_mpirun(ranks, coordinator_address, num_processes, process_id)
    elif num_processes is not None or process_id is not None or _launched_by_another():
        _initialize_by_jax(coordinator_address, num_processes, process_id)
    processes.note_initialized()


def _launched_by_another() -> bool:
    """Return whether a launcher is detected. mpirun -n 1 in a SLURM job is not SLURM."""
    if launchers.place().launcher == "mpirun" or launchers.independent():
        return False
    return compat.cluster_is_detected() or _place_by_torchrun() is not None


def _place_by_torchrun() -> tuple[str, int, int] | None:
    """Return coordinator address, process count and process index from torchrun's variables."""
    place = launchers.place()
    if place.launcher != "torchrun" or not place.host or not place.port:
        return None
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"{host}:{place.port + 1}", place.size, place.rank


# ---- mpirun ------------------------------------------------------------------------------------


def _initialize_by_mpirun(
    ranks: Communicator,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> None:
    rank, size = ranks.rank, ranks.size
    obstacle = _obstacle()
    if num_processes not in (None, size) or process_id not in (None, rank):
        obstacle = (
            f"this is process {process_id} of {num_processes} by the arguments, but rank {rank} of "
            f"{size} under mpirun. Leave the arguments out"
        )
    mine = json.dumps([obstacle, socket.gethostname()]).encode()
    replies = [json.loads(text) for text in exchange(mine, _NAME, ranks)]
    _require_none([obstacle for obstacle, _ in replies])
    _choose_gpu([host for _, host in replies], rank)
    found: tuple[_Coordinator | None, str] = (None, "")
    if rank == 0:
        address = coordinator_address or f"{free_address([host for _, host in replies])[0]}:0"
        try:
            found = (_start_coordinator(address, size), "")
        except RuntimeError as error:
            found = (None, str(error))
    coordinator, failure = json.loads(exchange(json.dumps(found).encode(), _NAME, ranks)[0])
    if failure:
        raise RuntimeError(failure)
    address = _hold(_Coordinator(*coordinator))
    _connect(address, size, rank)
    processes.set_world(ranks)


def _choose_gpu(hosts: list[str], rank: int) -> None:
    """Assign one GPU of the host to this process, round-robin."""
    gpus = len(library.describe()["cuda"]["devices"])
    if gpus:
        compat.choose_gpu(hosts[:rank].count(hosts[rank]) % gpus)


# ---- other launchers ---------------------------------------------------------------------------


def _initialize_by_jax(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    timeout_s = launchers.timeout()
    known = _place_by_torchrun() or (None, None, None)
    place = compat.detected_place(
        known[0] if coordinator_address is None else coordinator_address,
        known[1] if num_processes is None else num_processes,
        known[2] if process_id is None else process_id,
        timeout_s,
    )
    address, size, rank = place
    if address is None or size is None or rank is None:
        raise ValueError(
            "cgx_ops.jax.initialize: coordinator_address, num_processes and process_id are "
            f"{place}, and JAX does not detect a launcher: pass all three, or use mpirun"
        )
    port = address.rpartition(":")[2]
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ValueError(
            f"cgx_ops.jax.initialize: the coordinator's address is {address!r}; it must end with a "
            f"port, of at most {_LAST_PORT}. With torchrun's variables the port is MASTER_PORT + 1"
        )
    obstacle = _obstacle()
    coordinator = _start_coordinator(address, size) if rank == 0 else None
    _connect(address, size, rank)
    steps = itertools.count()

    def allgather(mine: bytes) -> list[bytes]:
        return compat.gather_from_processes(f"{_NAME}/{next(steps)}", mine, timeout_s)

    replies = [json.loads(text) for text in allgather(json.dumps([obstacle, coordinator]).encode())]
    _hold(_Coordinator(*replies[0][1]))
    obstacles = [obstacle for obstacle, _ in replies]
    if any(obstacles):
        compat.leave_distributed()
        _require_none(obstacles)
    try:
        processes.set_world(Communicator.create(rank, size, allgather, "jax"))
    except Unsupported as error:
        processes.set_world(str(error))


# ---- shared by both ----------------------------------------------------------------------------


def _obstacle() -> str:
    """Return why this process cannot initialize; "" if it can."""
    if compat.backends_started():
        return (
            "an XLA backend is running already. Call initialize() before jax.devices(), array "
            "creation or any other computation"
        )
    return ""


def _require_none(obstacles: list[str]) -> None:
    found = [f"rank {rank}: {what}" for rank, what in enumerate(obstacles) if what]
    if found:
        raise RuntimeError("cgx_ops.jax.initialize: " + "; ".join(found))


def _connect(address: str, size: int, rank: int) -> None:
    """Connect to the coordinator, as all processes do.

    Raises:
        RuntimeError: Not all processes connect within CGX_TIMEOUT.
    """
    timeout_s = launchers.timeout()
    try:
        compat.connect(address, size, rank, timeout_s)
    except RuntimeError as error:
        raise RuntimeError(
            f"cgx_ops.jax.initialize: process {rank} of {size} did not reach the others at "
            f"{address} within {timeout_s:g} s: each process must call initialize(), with this "
            "address and a separate process_id, and the port must be free on process 0's host"
        ) from error


class _Coordinator(NamedTuple):
    """The coordinator's address, its lifeline's port, and the word that identifies us."""

    address: str
    lifeline: int
    word: str


def _start_coordinator(address: str, processes: int) -> _Coordinator:
    """Start the coordinator at an address of this host; port 0 means any free port.

    Raises:
        RuntimeError: It does not start.
    """
    host, _, port = address.rpartition(":")
    program = Path(__file__).with_name("coordinator.py")
    timeout_s = launchers.timeout()
    process = subprocess.Popen(
        [sys.executable, "-P", program, host, port, str(processes), str(timeout_s)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a launcher that reads our stderr would wait for its end
        process_group=0,  # a signal to our process group must not end it
        text=True,
    )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    fields = process.stdout.readline().split() if ready else []
    if len(fields) != 3:
        process.kill()
        raise RuntimeError(
            f"cgx_ops.jax.initialize: process 0 cannot start the coordinator at {address}: is the "
            "port free?"
        )
    return _Coordinator(f"{host}:{fields[0]}", int(fields[1]), fields[2])


def _hold(coordinator: _Coordinator) -> str:
    """Keep the coordinator alive until this process ends; make XLA's collectives use gloo.

    Returns:
        The coordinator's address.
    """
    global _lifeline
    host = coordinator.address.rpartition(":")[0].strip("[]")
    _lifeline = socket.create_connection((host, coordinator.lifeline), launchers.timeout())
    _lifeline.sendall(coordinator.word.encode())
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    return coordinator.address
