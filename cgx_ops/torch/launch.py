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
import re
import socket
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import cgx_ops
from cgx_ops.address import exchange, free_address
from cgx_ops.torch import _compat

_BY_MPIRUN = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_BY_SRUN = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}
# Beyond those that Linux gives to whoever asks for any; 65535 is left to JAX, whose coordinator
# takes the port after MASTER_PORT.
_FIRST_PORT, _PORTS = 61440, 4095


def under_mpirun(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell whether mpirun started this process."""
    return _BY_MPIRUN["RANK"] in environ and _BY_MPIRUN["WORLD_SIZE"] in environ


def _under_srun(environ: MutableMapping[str, str]) -> bool:
    """Tell whether srun started this process among others; a batch script is not among others."""
    return "SLURM_PROCID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def register(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's variables from the launcher's, and the address or how it is agreed."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return
    if under_mpirun(environ):
        _fill(environ, _BY_MPIRUN)
        _compat.wrap_env_rendezvous(_with_agreed_address)
    elif _under_srun(environ):
        _fill(environ, _BY_SRUN)
        environ.setdefault("MASTER_ADDR", _first_host(environ["SLURM_STEP_NODELIST"]))
        port = _FIRST_PORT + int(environ["SLURM_JOB_ID"]) % _PORTS
        environ.setdefault("MASTER_PORT", str(port))


def _fill(environ: MutableMapping[str, str], names: Mapping[str, str]) -> None:
    for name, source in names.items():
        if source in environ:
            environ.setdefault(name, environ[source])


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: "gpu07-ib" of "gpu[07-09,12]-ib,login1"."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else nodes)


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
    hosts = exchange(socket.gethostname(), name)
    mine = free_address(hosts) if cgx_ops.rank() == 0 else ("", 0)
    address, port = json.loads(exchange(json.dumps(mine), name)[0])
    return address, port
