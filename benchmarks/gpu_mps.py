"""Run a command under NVIDIA's MPS, so that its processes use a GPU at the same time.

    python benchmarks/gpu_mps.py mpirun -n 2 python benchmarks/gpu_allreduce.py

Without MPS, processes take turns. A daemon of this user serves the command only: it has folders of
its own, changes no setting of the GPU, and ends with the command. If MPS is not available, the
command runs without it.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = "CUDA_MPS_PIPE_DIRECTORY"  # variable of clients and daemon
_DEFAULT = "/tmp/nvidia-mps"  # CUDA's
_DEADLINE_S = 30
_QUIT = "quit -t 10\n"  # servers end after 10 seconds


def running() -> bool:
    """Return whether CUDA programs that start here would use MPS, whose daemon must be alive."""
    pid = Path(os.environ.get(FOLDER) or _DEFAULT, "nvidia-cuda-mps-control.pid")
    with contextlib.suppress(OSError):
        return _is_mps(Path("/proc", pid.read_text().strip()))
    return False


def _is_mps(process: Path) -> bool:
    return (process / "comm").read_text().startswith("nvidia-cuda-mps")


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Start MPS and yield the variables of its clients; without MPS, print why and yield none."""
    if running():
        print("MPS: runs already.", flush=True)
        yield {}
        return
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        print("MPS: not available, because there is no nvidia-cuda-mps-control.", flush=True)
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="cgx-mps-", ignore_cleanup_errors=True) as folder:
        own = {FOLDER: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for each in own.values():
            os.mkdir(each)
        before = signal.signal(signal.SIGTERM, _exit)
        problem = ""
        try:
            problem = _control(program, own, "-d")
            print(f"MPS: {problem or 'started'}.", flush=True)
            yield {} if problem else own
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the daemon ended
            if not problem and (problem := _control(program, own)):
                print(f"MPS: killed, because it did not quit: {problem}.", flush=True)
            if problem:
                _kill(folder)
            signal.signal(signal.SIGTERM, before)


def _exit(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _control(program: str, own: dict[str, str], *options: str) -> str:
    """Start the daemon ("-d"), or make it quit; return the problem, if any."""
    # The daemon keeps its standard output open, so a pipe would not end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as orders:
        orders.write("" if options else _QUIT)
        orders.seek(0)
        try:
            done = subprocess.run(
                [program, *options],
                env={**os.environ, **own},
                stdin=orders,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            return f"nvidia-cuda-mps-control did not end within {_DEADLINE_S} s"
        output.seek(0)
        return output.read().strip() or "it failed" if done.returncode else ""


def _kill(folder: str) -> None:
    """Kill the processes that have this folder in their environment: daemon and servers."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _is_mps(process) and folder.encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs a command under NVIDIA's MPS")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    with daemon() as own:
        command = [options.program, *options.arguments]
        status = subprocess.call(command, env={**os.environ, **own})
    sys.exit(status)


if __name__ == "__main__":
    main()
