"""initialize(): one JAX over all processes that mpirun started.

JAX does not recognize Open MPI 5, so the processes agree over cgx's own communicator:

  1. every rank says whether it can start, and its host name; all ranks raise if one cannot
  2. rank 0 picks the coordinator's address and sends it to all
  3. every rank calls jax.distributed.initialize with what was agreed
"""

import json
import socket

import jax
import numpy as np

import cgx_ops
from cgx_ops.jax import _compat

_BLOB = 512  # bytes that a rank may say at a time


def initialize(coordinator_address: str | None = None) -> None:
    """Starts jax.distributed for the processes of mpirun, one JAX process per rank.

    Process i of JAX is rank i of cgx. XLA's own CPU collectives (`jax.lax.psum`) go through gloo.
    Call it once, in every process, before anything that starts an XLA backend (jax.devices(),
    jax.numpy computations). Without mpirun, or with one rank, it does nothing.

    Args:
        coordinator_address: "host:port" of a free port on rank 0's host; None: rank 0 finds one.
          Needed only where other hosts cannot reach rank 0 by the address of its route to them.

    Raises:
        RuntimeError: on every rank, if any rank called it twice or too late.
    """
    cgx_ops.init()
    if cgx_ops.size() == 1:
        return
    said = [json.loads(text) for text in _exchange(json.dumps([_obstacle(), socket.gethostname()]))]
    obstacles = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(said) if what]
    if obstacles:
        raise RuntimeError("cgx_ops.jax.initialize: " + "; ".join(obstacles))
    if cgx_ops.rank() == 0:
        address = coordinator_address or _free_address([host for _, host in said])
    else:
        address = ""
    address = _exchange(address)[0]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=address, num_processes=cgx_ops.size(), process_id=cgx_ops.rank()
    )


def _obstacle() -> str:
    """Why this process cannot initialize; "" if it can."""
    if jax.distributed.is_initialized():
        return "jax.distributed is initialized already. Call initialize() once, and nothing else"
    if _compat.backends_started():
        return (
            "an XLA backend is running already. Call initialize() before jax.devices(), array "
            "creation or any other computation"
        )
    return ""


def _exchange(text: str) -> list[str]:
    """Gives every rank's text to every rank, in rank order."""
    data = text.encode()[:_BLOB]
    blob = np.zeros(_BLOB, np.float32)
    blob[: len(data)] = np.frombuffer(data, np.uint8)
    world = cgx_ops.init()
    blobs = world.all_gather(blob, cgx_ops.Config(bits=32), name="cgx_ops.jax.initialize")
    rows = np.asarray(blobs).reshape(world.size, _BLOB).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


def _free_address(hosts: list[str]) -> str:
    """An address of this host that processes on all the hosts can reach, with a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    others = [host for host in hosts if host != hosts[0]]
    return f"{_address_towards(others[0]) if others else '127.0.0.1'}:{port}"


def _address_towards(host: str) -> str:
    """The address that this host sends from to another host; nothing is sent to find out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:  # the name cannot be resolved from here
        return socket.getfqdn()
