"""Where the ranks of a benchmark run: numbers of ranks and hosts, and the links, as text."""

import platform

from mpi4py import MPI

from cgx_ops._core.units import rate_text


def host_count() -> int:
    """Return the number of hosts of all ranks. Collective."""
    return len(set(MPI.COMM_WORLD.allgather(platform.node())))


def described(hosts: int, link_rate: float | None) -> str:
    """Return, for example, "4 ranks on 2 hosts, links of 1 Gbit/s"; without a rate, no links."""
    links = f", links of {rate_text(link_rate)}" if link_rate else ""
    return f"{MPI.COMM_WORLD.size} ranks on {hosts} hosts{links}"
