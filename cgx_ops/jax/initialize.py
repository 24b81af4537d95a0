"""initialize(): one JAX over all processes that mpirun started.

JAX does not recognize Open MPI 5, so the processes agree over cgx's own communicator:

  1. every rank says whether it can start, and its host name; all ranks raise if one cannot
  2. rank 0 picks the coordinator's address and sends it to all
  3. every rank calls jax.distributed.initialize with what was agreed
"""

import json
import socket

import jax

import cgx_ops
from cgx_ops.address import exchange, free_address
from cgx_ops.jax import _compat
from cgx_ops.jax.launching import claim

_NAME = "cgx_ops.jax.initialize"  # of the collectives here


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
    claim()
    cgx_ops.init()
    if cgx_ops.size() == 1:
        return
    mine = json.dumps([_obstacle(), socket.gethostname()])
    said = [json.loads(text) for text in exchange(mine, _NAME)]
    obstacles = [f"rank {rank}: {what}" for rank, (what, _) in enumerate(said) if what]
    if obstacles:
        raise RuntimeError("cgx_ops.jax.initialize: " + "; ".join(obstacles))
    if cgx_ops.rank() == 0:
        address = coordinator_address or "{}:{}".format(*free_address([host for _, host in said]))
    else:
        address = ""
    address = exchange(address, _NAME)[0]
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
