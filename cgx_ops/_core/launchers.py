"""The variables that launchers set: which rank a process is, of how many, and where rank 0 is.

Reads the variables of mpirun (Open MPI), of torchrun and its like (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT) and of srun. The launcher nearest to the process counts: torchrun inside mpirun is
torchrun.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cgx_ops.errors import InvalidArgument

_LONGEST_S = 1e6  # eleven days: the operating system accepts no wait of many more
# Above the ports that Linux gives to whoever asks for any. The two ports after it are taken too:
# by JAX's coordinator and by the rendezvous of cgx_ops.
_FIRST_PORT, _PORTS = 61440, 4094

MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Number of ranks by launchers whose ranks cgx_ops cannot connect on its own.
_OTHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its launcher.

    Attributes:
        launcher: "mpirun", "torchrun" (or who sets the same variables), "srun", or "" without one.
        rank: of this process, from 0.
        size: number of processes.
        host, port: MASTER_ADDR and MASTER_PORT, or what srun's variables imply; "" and 0 if unset.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place by the variables of the launcher nearest to it.

    Raises:
        InvalidArgument: a variable is not an integer, or a rank is not below the number of ranks.
    """
    by_mpirun, by_torchrun = (_rank_and_size(environ, names) for names in (MPIRUN, TORCHRUN))
    # Programs copy mpirun's numbers to torchrun's variables.
    if by_mpirun and by_torchrun in (None, by_mpirun):
        return Place("mpirun", *by_mpirun)
    if by_torchrun:
        host = environ.get("MASTER_ADDR", "")
        return Place("torchrun", *by_torchrun, host, _integer(environ, "MASTER_PORT") or 0)
    by_srun = _rank_and_size(environ, SRUN)
    if by_srun and by_srun[1] > 1:  # a batch script is a step of one task
        return Place("srun", *by_srun, *address_by_srun(environ))
    return Place()


def address_by_srun(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return where rank 0 of a step of SLURM's is: its first host, and a port of the job's."""
    host = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    port = _FIRST_PORT + (_integer(environ, "SLURM_JOB_ID") or 0) % _PORTS
    return host, _integer(environ, "MASTER_PORT") or port


def ranks_shown(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the largest number of ranks that any launcher's variable shows, and which it is.

    Raises:
        InvalidArgument: the value of one is not an integer.
    """
    names = [names[1] for names in (TORCHRUN, MPIRUN, SRUN)]
    shown = [(_integer(environ, name) or 1, name) for name in (*names, *_OTHERS)]
    return max(shown, key=lambda pair: pair[0])


def independent(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether CGX_WORLD=single makes processes independent of each other.

    Raises:
        InvalidArgument: CGX_WORLD has another value.
    """
    text = environ.get("CGX_WORLD", "")
    if text not in ("", "single"):
        raise InvalidArgument(
            f"CGX_WORLD is {text!r}; accepted: single (processes are independent), or "
            "unset (the launcher's processes are one)"
        )
    return text == "single"


def timeout(default: float = 300) -> float:
    """Return how many seconds to wait for other ranks: CGX_TIMEOUT, or a default.

    Raises:
        InvalidArgument: CGX_TIMEOUT is not a positive number.
    """
    text = os.environ.get("CGX_TIMEOUT")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(
            f"CGX_TIMEOUT is {text!r}; it must be a number of seconds, more than 0"
        )
    return min(seconds, _LONGEST_S)


def _rank_and_size(environ: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    rank, size = (_integer(environ, name) for name in names)
    if rank is None or size is None:
        return None
    if not rank < size:
        raise InvalidArgument(
            f"{names[0]} is {rank} and {names[1]} is {size}; a rank must be less than their number"
        )
    return rank, size


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise InvalidArgument(f"{name} is {text!r}; it must be an integer of at least 0")
    return int(text) if text else None


def _first_host(nodes: str) -> str:
    """Return the first of SLURM's list of hosts: "gpu07-ib" of "gpu[07-09,12]-ib,login1"."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else nodes)
