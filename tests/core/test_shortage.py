"""Ranks without descriptors or memory, or that return late to released memory, do no harm."""

from pathlib import Path

import pytest
from support import launch

from cgx_ops import Communicator


@pytest.mark.parametrize("algorithm", ["one_shot", "sra"])
def test_released_memory(algorithm: str, tmp_path: Path) -> None:
    """Check that a stalled rank does not read files that reuse its peer's descriptors."""
    late = launch.processes(2, "run_shortage.py", algorithm, tmp_path)[1]
    assert "told" in late or "right values" in late, late


@pytest.mark.parametrize(
    ("what", "remedy"), [("open_files", "raise the limit of open files"), ("memory", "ftruncate")]
)
def test_a_shortage_fails_one_collective(what: str, remedy: str, tmp_path: Path) -> None:
    for output in launch.processes(2, "run_shortage.py", what, tmp_path):
        assert "told" in output and remedy in output, output


def test_descriptors(tmp_path: Path) -> None:
    outputs = launch.processes(4, "run_shortage.py", "many", tmp_path)
    assert all("descriptors" in output for output in outputs)


@pytest.mark.parametrize("left", [0, 1, 2])
@pytest.mark.parametrize("hosts", ["a,a,b", "a,a,a"])
def test_a_group_without_descriptors(hosts: str, left: int) -> None:
    """Check that all ranks use the next transport together, and none waits in MPI."""
    outputs = launch.mpirun(3, "run_without_descriptors.py", left, hosts=hosts, timeout=60)
    assert len({output.strip() for output in outputs}) == 1, outputs
    assert "made by" in outputs[0], outputs


@pytest.mark.slow
def test_many_different_names(tmp_path: Path) -> None:
    """Check that names use no memory beyond the 16,384 cached seeds."""
    grown = int(launch.processes(1, "run_shortage.py", "names", tmp_path)[0])
    assert grown < 60, f"{grown} bytes a call"


def test_memory_of_many_threads_as_ranks() -> None:
    """Check that a rank's memory for each of the others is zeroed on first use, not before."""
    statm = Path("/proc/self/statm")
    before = int(statm.read_text().split()[1])
    comms = Communicator.local(64)
    grown = (int(statm.read_text().split()[1]) - before) * 4096
    for comm in comms:
        comm.close()
    assert grown < 32 << 20, f"{grown >> 20} MiB; if zeroed in advance, it is 260"
