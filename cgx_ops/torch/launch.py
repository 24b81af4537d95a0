"""Processes that mpirun started find each other without a line of configuration.

  1. at import: the rank and the number of ranks, from Open MPI's variables to torch's
  2. at `init_process_group`: the address of rank 0, agreed over MPI

Both only fill what is missing: under torchrun, and wherever RANK, WORLD_SIZE or MASTER_ADDR are
set, nothing happens here.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import cgx_ops
from cgx_ops.address import exchange, free_address
from cgx_ops.torch import _compat

_NAMES = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}


def under_mpirun(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Tell whether mpirun started this process."""
    return _NAMES["RANK"] in environ and _NAMES["WORLD_SIZE"] in environ


def register() -> None:
    """Set torch's variables from Open MPI's, and have the address agreed when it is needed."""
    if not under_mpirun() or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    for name, source in _NAMES.items():
        if source in os.environ:
            os.environ.setdefault(name, os.environ[source])
    _compat.wrap_env_rendezvous(_with_agreed_address)


def _with_agreed_address(original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def handler(url: str, **options: Any) -> Iterator[Any]:
        if "MASTER_ADDR" in os.environ or os.environ.get("RANK") != os.environ[_NAMES["RANK"]]:
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
