"""Rendezvous without configuration for processes that mpirun or srun started.

`init_process_group` requires RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before it calls a
backend. register() therefore wraps torch's handler of "env://", which reads them. The rank and the
number of ranks come from the launcher's variables. The address of rank 0 is agreed on over MPI
under mpirun; under srun it is the first host of the step, with a port derived from the job's
number. MASTER_ADDR overrides both. No environment variable is changed. Processes with RANK or
WORLD_SIZE, as under torchrun, use torch's handler.
"""

import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from cgx_ops._core import launchers, world
from cgx_ops._core.exchange import exchange, free_address
from cgx_ops._core.launchers import Place
from cgx_ops.torch._compat import parallel

_LAUNCHERS = ("mpirun", "srun")
_NUMBERS = ("rank", "world_size")  # keys in torch's URLs
_UNSET = "-1"


def under_mpirun() -> bool:
    """Return whether mpirun started this process directly, without torchrun in between."""
    return launchers.place().launcher == "mpirun"


def register() -> None:
    """Wrap torch's handler of "env://" under mpirun and srun. Call once per process."""
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    if launchers.place().launcher in _LAUNCHERS:
        parallel.wrap_env_rendezvous(_by_launcher)


def _by_launcher(env: parallel.Rendezvous, tcp: parallel.Rendezvous) -> parallel.Rendezvous:
    def handler(url: str, **options: Any) -> Iterator[Any]:
        place = launchers.place()
        if place.launcher not in _LAUNCHERS:  # the program set RANK and WORLD_SIZE after the import
            yield from env(url, **options)
            return
        query = complete_query(urlsplit(url).query, place)
        if place.launcher == "mpirun" and os.environ.get("MASTER_ADDR"):
            yield from env(f"env://?{query}", **options)
            return
        host, port = _agree() if place.launcher == "mpirun" else (place.host, place.port)
        host = f"[{host}]" if ":" in host else host
        yield from tcp(f"tcp://{host}:{port}?{query}", **options)

    return handler


def complete_query(query: str, place: Place) -> str:
    """Return the query of a torch URL, with missing numbers filled in from the launcher.

    Args:
        query: "rank=0&world_size=2", or a part of it; torch writes -1 for an unknown number.
        place: this process's rank and size according to the launcher.
    """
    given = dict(parse_qsl(query))
    numbers = zip(_NUMBERS, (place.rank, place.size), strict=True)
    missing = {name: n for name, n in numbers if given.get(name, _UNSET) == _UNSET}
    return urlencode(given | missing)


def _agree() -> tuple[str, int]:
    """Return rank 0's address and MASTER_PORT, or a port that is free there now."""
    name = "cgx_ops.torch.backend.launch"
    ranks = world.of_launcher()
    hosts = [host.decode() for host in exchange(socket.gethostname().encode(), name, ranks)]
    mine = free_address(hosts) if ranks.rank == 0 else ("", 0)
    address, port = json.loads(exchange(json.dumps(mine).encode(), name, ranks)[0])
    return address, int(os.environ.get("MASTER_PORT") or port)
