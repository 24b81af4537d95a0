"""Ranks that are short of descriptors or memory, or late for memory that is gone, harm nobody."""

from pathlib import Path

import launch
import numpy as np
import pytest

from cgx_ops import Communicator, Config


@pytest.mark.parametrize("algorithm", ["one_shot", "sra"])
def test_memory_that_is_gone(algorithm: str, tmp_path: Path) -> None:
    """A rank that stood still does not read what has taken its peer's descriptors since."""
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
    """Ranks go on to the next transport together; nobody waits in a call of MPI."""
    outputs = launch.mpirun(3, "run_without_descriptors.py", left, hosts=hosts, timeout=60)
    assert len({output.strip() for output in outputs}) == 1, outputs
    assert "made by" in outputs[0], outputs


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ever_new_names() -> None:
    """They cost nothing beyond those whose seeds Python keeps (16,384); 620 bytes a call once."""
    warm_up, calls, ones = 17_000, 10_000, np.ones(4, np.float32)
    comms = Communicator.local(2)

    def run(first: int, last: int) -> None:
        for i in range(first, last):
            requests = [
                comm.allreduce_async(ones, config=Config(bits=32), name=f"{i} of many names")
                for comm in comms
            ]
            for request in requests:
                request.wait()

    run(0, warm_up)
    before = resident()
    run(warm_up, warm_up + calls)
    grown = resident() - before
    for comm in comms:
        comm.close()
    assert grown < calls * 60, f"{grown / calls:.0f} bytes a call"


def test_memory_of_many_threads_as_ranks() -> None:
    """What a rank keeps for each of the others is zeroed when it is used, not before."""
    before = resident()
    comms = Communicator.local(64)
    grown = resident() - before
    for comm in comms:
        comm.close()
    assert grown < 32 << 20, f"{grown >> 20} MiB; zeroed at once they are 260"
