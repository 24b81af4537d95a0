"""The launchers: failures are reported in time, and leave no process behind."""

import time
from pathlib import Path

import pytest
from support.launch import mpirun, threads

PROGRAM = """
import os, subprocess, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("rank", rank, "says", *sys.argv[1:], os.environ.get("WORD"), flush=True)
if "fail" in sys.argv and rank == 1:
    sys.exit("rank 1 gives up")
if "hang" in sys.argv:
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def _running(program: Path) -> bool:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(program).encode() in entry.read_bytes():
                return True
        except OSError:
            continue  # the process has just ended
    return False


def test_failing_rank_shows_all_outputs(program: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        mpirun(2, program, "fail", timeout=60)
    assert "ended with status 1" in str(caught.value)
    assert "rank 1 gives up" in str(caught.value)
    assert "rank 0 says fail" in str(caught.value)
    assert "rank 1 gives up" in mpirun(2, program, "fail", timeout=60, check=False)[1]


def test_hanging_ranks_are_killed_at_the_deadline(program: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match=r"ran past 3 s(.|\n)*rank 1 says hang"):
        mpirun(2, program, "hang", timeout=3)
    assert time.monotonic() - begun < 20
    assert not _running(program)


def test_first_failing_thread_is_raised_and_frees_its_peers() -> None:
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        threads(3, lambda rank, comm: 1 / (rank - 1) or comm.split(0, name="never"), timeout=30)
    assert time.monotonic() - begun < 20


def test_late_threads_are_shown() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 ranks ran past 0.5 s(.|\n)*time.sleep"):
        threads(2, lambda rank, _: time.sleep(2 * rank), timeout=0.5)
