"""Exceptions of signal handlers (Ctrl-C) in and around collectives of numpy arrays.

The core must not write to memory that Python has freed, wherever the exception is raised. A wait
must react to signals. The process, its communicator and the collective must continue.
"""

import contextlib
import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cgx_ops import CgxError, Communicator, Config, Request, _numpy_ops

# A destructor may be interrupted as well.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EXACT = Config(bits=32)
NUMEL = 50_000  # larger than the part sent with the header


class Stop(BaseException):
    """The exception that a signal handler raises."""


def _raise_at(step: int, call: Callable[[], object]) -> bool:
    """Call a function and raise Stop before the step-th bytecode of starting and waiting.

    Returns whether that bytecode was reached.
    """
    steps = iter(range(step + 1))

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith("cgx_ops/_core/request.py") and code.co_name not in (
            "allreduce_async",
            "call",
        ):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            sys.settrace(None)
            raise Stop
        return trace

    sys.settrace(trace)
    try:
        call()
    except Stop:
        return True
    finally:
        sys.settrace(None)
    return False


def _interrupt_everywhere(
    act: Callable[[Communicator, np.ndarray, np.ndarray], object],
    raise_at: Callable[[int, Callable[[], object]], bool],
    steps: int,
) -> None:
    """Interrupt act(comm, source, out) at every step, and check the arrays.

    raise_at(step, call) returns whether the call reached that step. The other rank starts later, so
    a collective that was started is in flight and keeps its arrays.
    """
    kept = 0
    for step in range(steps):
        first, second = Communicator.local(2, timeout=30)
        theirs = np.full(NUMEL, 2, np.float32)
        source, out = np.ones(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        references = weakref.ref(source), weakref.ref(out)
        arrays = [source, out]
        del source, out
        interrupted = raise_at(step, lambda: act(first, *arrays))  # noqa: B023
        arrays.clear()
        gc.collect(0)
        alive = [reference() is not None for reference in references]
        assert alive[0] == alive[1]
        kept += alive[0]
        request_of_peer = second.allreduce_async(theirs, config=EXACT)
        if interrupted and not alive[0]:  # in this case nothing may have been started
            time.sleep(0.002)
            assert not request_of_peer.done()
        first.close()
        with contextlib.suppress(CgxError):  # not started, or not complete
            assert (request_of_peer.wait() == 3).all()
        second.close()
        _numpy_ops.collect_dropped()
        if not interrupted:
            break
    assert kept > 3  # it was in flight at some steps


def test_a_start_may_be_interrupted_anywhere() -> None:
    def act(comm: Communicator, source: np.ndarray, out: np.ndarray) -> object:
        return comm.allreduce_async(source, config=EXACT, out=out)

    _interrupt_everywhere(act, _raise_at, steps=300)


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Yield a function that makes a signal handler raise Stop after some seconds."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _call(comm: Communicator, source: np.ndarray, out: np.ndarray) -> np.ndarray:
    return comm.allreduce(source, config=EXACT, out=out)


def test_a_call_may_be_interrupted_at_any_time(alarm: Callable[[float], None]) -> None:
    def raise_at(step: int, call: Callable[[], object]) -> bool:
        try:
            alarm(1e-5 * (step + 1))
            call()
        except Stop:
            return True
        return False

    _interrupt_everywhere(_call, raise_at, steps=60)


def _start_and_wait(comm: Communicator, source: np.ndarray, out: np.ndarray) -> np.ndarray:
    return comm.allreduce_async(source, config=EXACT, out=out).wait()


@pytest.mark.parametrize("act", [_call, _start_and_wait])
def test_wait_reacts_to_signals_and_collective_continues(
    act: Callable[..., np.ndarray], alarm: Callable[[float], None]
) -> None:
    first, second = Communicator.local(2, timeout=20)
    out = np.zeros(NUMEL, np.float32)
    alarm(0.05)
    with pytest.raises(Stop):
        act(first, np.ones(NUMEL, np.float32), out)
    assert not first.closed  # its deadline would close it
    assert (second.allreduce(np.full(NUMEL, 2, np.float32), config=EXACT) == 3).all()
    going = first.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    assert (second.allreduce(np.full(NUMEL, 2, np.float32), config=EXACT) == 3).all()
    assert (going.wait() == 3).all()
    assert (out == 3).all()


def test_an_interrupted_wait_may_be_repeated(alarm: Callable[[float], None]) -> None:
    first, second = Communicator.local(2, timeout=20)
    mine = first.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    alarm(0.05)
    with pytest.raises(Stop):
        mine.wait()
    theirs = second.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    assert (mine.wait() == 2).all()
    assert (theirs.wait() == 2).all()


def test_making_a_communicator_may_be_interrupted(alarm: Callable[[float], None]) -> None:
    """Run the handler when the next exchange begins, before the first line of any allgather."""
    blobs: dict[tuple[int, int], bytes] = {}
    written = threading.Condition()

    def create(rank: int) -> Communicator:
        rounds = itertools.count()

        def allgather(mine: bytes) -> list[bytes]:
            step = next(rounds)
            with written:
                blobs[step, rank] = mine
                written.notify_all()
                assert written.wait_for(lambda: (step, 1 - rank) in blobs, 3), "rank 0 is gone"
            if step == 1 and rank == 0:  # rank 0 now waits until rank 1 connects
                alarm(0.2)
            elif step == 1:
                time.sleep(1)
            return [blobs[step, 0], blobs[step, 1]]

        return Communicator.create(rank, 2, allgather, f"interrupted {rank}", transport="TCP")

    def peer() -> None:
        with pytest.raises(AssertionError, match="rank 0 is gone"):
            create(1)

    other = threading.Thread(target=peer)
    other.start()
    with pytest.raises(Stop):
        create(0)
    other.join()


def test_interrupted_process_exits() -> None:
    script = (
        "import os, signal, threading, numpy as np\n"
        "from cgx_ops import Communicator\n"
        # A shell ignores SIGINT for background jobs, which inherit this.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "first, second = Communicator.local(2)\n"
        "threading.Timer(.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "first.allreduce(np.ones(100000, np.float32))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert b"KeyboardInterrupt" in ended.stderr
    assert ended.returncode == -signal.SIGINT


@pytest.mark.parametrize("again", [False, True])
def test_process_exits_while_daemon_threads_wait(again: bool) -> None:
    """Python ends such a thread when it requests the GIL: there must be no C++ frame."""
    script = (
        "import threading, time, numpy as np\n"
        "from cgx_ops import Communicator, Config\n"
        "first, second = Communicator.local(2)\n"
        "out, config = np.ones(100000, np.float32), Config()\n"
        "call = lambda: first.allreduce(out, config=config, out=out)\n"
        f"if {again}:\n"
        "    other = second.allreduce_async(out.copy(), config=config)\n"
        "    call(), other.wait()\n"
        "for _ in range(8):\n"
        "    threading.Thread(target=call, daemon=True).start()\n"
        "time.sleep(.05)\n"
    )
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
        assert ended.returncode == 0, ended.stderr[-2000:]


def test_several_threads_may_wait_for_one_request() -> None:
    first, second = Communicator.local(2, timeout=20)
    mine = first.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    results: list[np.ndarray] = []

    def wait(on: Request) -> None:
        results.append(on.wait())

    waiting = [threading.Thread(target=wait, args=(mine,)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for _ in range(10):
        assert not mine.done()  # immediately, although others wait
    theirs = second.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    for thread in waiting:
        thread.join()
    theirs.wait()
    assert mine.done()
    assert len(results) == 3
    assert all((result == 2).all() for result in results)
