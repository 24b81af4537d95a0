"""Processes that mpirun or srun started find each other without a line of configuration.

  1. at import: the rank and the number of ranks, from Open MPI's or SLURM's variables to torch's
  2. the address of rank 0: under mpirun agreed over MPI, at `init_process_group`; under srun the
     first host of the step, at a port that follows from the job's number

Both only fill what is missing: under torchrun, and wherever RANK, WORLD_SIZE or MASTER_ADDR are
set, nothing happens here.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from cgx_ops import launchers, world
from cgx_ops.address import exchange, free_address
from cgx_ops.torch import _compat

_BY_MPIRUN = {
    "RANK": launchers.MPIRUN[0],
    "WORLD_SIZE": launchers.MPIRUN[1],
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_BY_SRUN = {
    "RANK": launchers.SRUN[0],
    "WORLD_SIZE": launchers.SRUN[1],
    "LOCAL_RANK": "SLURM_LOCALID",
}


def under_mpirun(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether mpirun started this process, and no torchrun in between."""
    return launchers.place(environ).launcher == "mpirun"


def register(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from the launcher's, and the address or how it is agreed."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    launcher = launchers.place(environ).launcher
    if launcher == "mpirun":
        _fill(environ, _BY_MPIRUN)
        _compat.wrap_env_rendezvous(_with_agreed_address)
    elif launcher == "srun":
        _fill(environ, _BY_SRUN)
        host, port = launchers.address_by_srun(environ)
        environ.setdefault("MASTER_ADDR", host)
        environ.setdefault("MASTER_PORT", str(port))


def _fill(environ: MutableMapping[str, str], names: Mapping[str, str]) -> None:
    for name, source in names.items():
        if source in environ:
            environ.setdefault(name, environ[source])


def _with_agreed_address(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, **options: Any) -> Iterator[Any]:
        if "MASTER_ADDR" in os.environ or os.environ.get("RANK") != os.environ[_BY_MPIRUN["RANK"]]:
            yield from original(url, **options)
            return
        address, port = _agree()
        # For this call only: the next init_process_group is to find a port that is free then.
        port = int(os.environ.get("MASTER_PORT") or port)
        with _environment(MASTER_ADDR=address, MASTER_PORT=str(port)):
            store = next(rendezvous := original(url, **options))
        yield store
        yield from rendezvous

    return handler


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _agree() -> tuple[str, int]:
    """Return rank 0's address, and a port that is free there."""
    name = "cgx_ops.torch.launch"
    ranks = world.of_launcher()
    hosts = exchange(socket.gethostname(), name, ranks)
    mine = free_address(hosts) if ranks.rank == 0 else ("", 0)
    address, port = json.loads(exchange(json.dumps(mine), name, ranks)[0])
    return address, port
