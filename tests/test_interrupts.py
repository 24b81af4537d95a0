"""Exceptions of signal handlers (Ctrl-C) in and around collectives of numpy arrays.

The core must not write to memory that Python has freed, wherever the exception strikes; a wait
notices signals; and the process, its communicator and the collective go on.
"""

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import c_double
from types import FrameType
from typing import Any

import numpy as np
import pytest

from cgx_ops import CgxError, Communicator, Config, Request, request

# A destructor may be interrupted as well.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EXACT = Config(bits=32)
NUMEL = 50_000  # larger than what travels with the header


class Stop(BaseException):
    """What a signal handler raises."""


def _raise_at(step: int, call: Callable[[], object]) -> bool:
    """Run call() with Stop raised before the step-th bytecode of the code that starts and waits.

    Returns:
        Whether it got there.
    """
    steps = iter(range(step + 1))

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith("cgx_ops/request.py") and code.co_name not in (
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
    act: Callable[[Communicator, np.ndarray, np.ndarray], object], peer_first: bool
) -> None:
    """Interrupt act(comm, source, out) at every bytecode, and look at what becomes of the arrays.

    peer_first: the other rank has started, so act can end. Else the steps end with 300.
    """
    kept = 0
    for step in range(300):
        first, second = Communicator.local(2, timeout=30)
        theirs = np.full(NUMEL, 2, np.float32)
        request_of_peer = second.allreduce_async(theirs, config=EXACT) if peer_first else None
        source, out = np.ones(NUMEL, np.float32), np.zeros(NUMEL, np.float32)
        references = weakref.ref(source), weakref.ref(out)
        arrays = [source, out]
        del source, out
        interrupted = _raise_at(step, lambda: act(first, *arrays))  # noqa: B023
        arrays.clear()
        gc.collect(0)
        alive = [reference() is not None for reference in references]
        assert alive[0] == alive[1]
        kept += alive[0]
        request_of_peer = request_of_peer or second.allreduce_async(theirs, config=EXACT)
        if interrupted and not alive[0]:  # then nothing may have been started
            time.sleep(0.002)
            assert not request_of_peer.done()
        first.close()
        with contextlib.suppress(CgxError):  # it was not started, or not over yet
            assert (request_of_peer.wait() == 3).all()
        second.close()
        request.collect_dropped()
        if not interrupted:
            break
    assert kept > 10


def test_a_start_may_be_interrupted_anywhere() -> None:
    def act(comm: Communicator, source: np.ndarray, out: np.ndarray) -> object:
        return comm.allreduce_async(source, config=EXACT, out=out)

    _interrupt_everywhere(act, peer_first=True)


def test_a_call_may_be_interrupted_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        request, "_LOOK_UP_S", c_double(0.0)
    )  # so that it is in its wait all the time

    _interrupt_everywhere(_call, peer_first=False)


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Give a function after whose seconds a signal handler raises Stop in the main thread."""

    def handler(_signal: int, _frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds) and None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _call(comm: Communicator, source: np.ndarray, out: np.ndarray) -> np.ndarray:
    return comm.allreduce(source, config=EXACT, out=out)


def _start_and_wait(comm: Communicator, source: np.ndarray, out: np.ndarray) -> np.ndarray:
    return comm.allreduce_async(source, config=EXACT, out=out).wait()


@pytest.mark.parametrize("act", [_call, _start_and_wait])
def test_a_wait_notices_signals_and_the_collective_goes_on(
    act: Callable[..., np.ndarray], alarm: Callable[[float], None]
) -> None:
    first, second = Communicator.local(2, timeout=20)
    out = np.zeros(NUMEL, np.float32)
    alarm(0.05)
    with pytest.raises(Stop):
        act(first, np.ones(NUMEL, np.float32), out)
    assert not first.closed  # as it would be after its deadline
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


def test_a_process_that_was_interrupted_ends() -> None:
    script = (
        "import os, signal, threading, numpy as np\n"
        "from cgx_ops import Communicator\n"
        # A shell ignores it for its jobs in the background, and they pass that on.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "first, second = Communicator.local(2)\n"
        "threading.Timer(.1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "first.allreduce(np.ones(100000, np.float32))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert b"KeyboardInterrupt" in ended.stderr
    assert ended.returncode == -signal.SIGINT


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
        assert not mine.done()  # at once, though others wait
    theirs = second.allreduce_async(np.ones(NUMEL, np.float32), config=EXACT)
    for thread in waiting:
        thread.join()
    theirs.wait()
    assert mine.done()
    assert len(results) == 3
    assert all((result == 2).all() for result in results)
