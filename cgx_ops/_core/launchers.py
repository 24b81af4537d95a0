"""Read the launcher's variables: this process's rank, the number of ranks, the address of rank 0.

Supported are mpirun (Open MPI), torchrun and programs that set the same variables (RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and srun. The innermost launcher counts: torchrun inside
mpirun is torchrun.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cgx_ops.errors import InvalidArgument

_LONGEST_S = 1e6  # eleven days; the operating system does not accept much longer waits
# These ports lie above those that Linux assigns automatically. JAX's coordinator and the
# rendezvous of cgx_ops use the two ports after MASTER_PORT.
_FIRST_PORT, _PORTS = 61440, 4094

MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
TORCHRUN = ("RANK", "WORLD_SIZE")
SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# Numbers of ranks of launchers whose ranks cgx_ops cannot connect itself.
_OTHERS = ("PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class Place:
    """The position of a process among those that its launcher started.

    Attributes:
        launcher: "mpirun", "torchrun" (or a program that sets its variables), "srun", or "" for
            none.
        rank: Rank of this process, from 0.
        size: Number of processes.
        host: MASTER_ADDR, or the first host of the SLURM step; "" if unknown.
        port: MASTER_PORT, or a port derived from the SLURM job; 0 if unknown.
    """

    launcher: str = ""
    rank: int = 0
    size: int = 1
    host: str = ""
    port: int = 0


def place(environ: Mapping[str, str] = os.environ) -> Place:
    """Return this process's place by the variables of the innermost launcher.

    Raises:
        InvalidArgument: A variable is not an integer, or a rank is not less than the number of
            ranks.
    """
    by_mpirun, by_torchrun = (_rank_and_size(environ, names) for names in (MPIRUN, TORCHRUN))
    # Some programs copy mpirun's numbers to torchrun's variables.
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
    """Return the address of rank 0 in a SLURM step: its first host, and a port of the job."""
    host = environ.get("MASTER_ADDR") or _first_host(environ.get("SLURM_STEP_NODELIST", ""))
    port = _FIRST_PORT + (_integer(environ, "SLURM_JOB_ID") or 0) % _PORTS
    return host, _integer(environ, "MASTER_PORT") or port


def ranks_shown(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the largest number of ranks in any launcher's variable, and the name of the variable.

    Raises:
        InvalidArgument: A variable is not an integer.
    """
    names = [names[1] for names in (TORCHRUN, MPIRUN, SRUN)]
    shown = [(_integer(environ, name) or 1, name) for name in (*names, *_OTHERS)]
    return max(shown, key=lambda pair: pair[0])


def independent(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether CGX_WORLD=single makes processes independent of each other.

    Raises:
        InvalidArgument: CGX_WORLD has another value.
    """
    text = environ.get("CGX_WORLD", "")
    if text not in ("", "single"):
        raise InvalidArgument(
            f"CGX_WORLD is {text!r}; accepted: single (processes are independent), or "
            "unset (the launcher's processes form one group of ranks)"
        )
    return text == "single"


def timeout(default: float = 300) -> float:
    """Return the seconds to wait for other ranks: CGX_TIMEOUT, or a default.

    Raises:
        InvalidArgument: CGX_TIMEOUT is not a positive number.
    """
    text = os.environ.get("CGX_TIMEOUT")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidArgument(f"CGX_TIMEOUT is {text!r}; it must be a number of seconds > 0")
    return min(seconds, _LONGEST_S)


def _rank_and_size(environ: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int] | None:
    rank, size = (_integer(environ, name) for name in names)
    if rank is None or size is None:
        return None
    if not rank < size:
        raise InvalidArgument(
            f"{names[0]} is {rank} and {names[1]} is {size}; the rank must be less than the number "
            "of ranks"
        )
    return rank, size


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise InvalidArgument(f"{name} is {text!r}; it must be an integer >= 0")
    return int(text) if text else None


def _first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: "gpu07-ib" of "gpu[07-09,12]-ib,login1"."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", nodes)
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else nodes)
