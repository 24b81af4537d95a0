"""The processes that play rounds.

With shared memory: workers forked by a zygote, reused for several rounds. With mpi and hybrid: jobs
of mpirun with four ranks each, some of which play a round. A killed worker is replaced. A job that
has lost a rank or its world is ended, and the next round starts another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Literal, Protocol

from chaos import machine
from chaos.messages import Ended, Hello, Quit
from chaos.rounds import JOB_DEADLINE, JOB_HOSTS, Round

_START = 60.0  # seconds until a process has connected
_EXIT = 30.0  # seconds to exit on request: an interpreter with torch takes a while
_TAIL = 6000  # characters of a log shown for a failure
# Workers count their threads: OpenBLAS creates none, the core always the same number.
# TCP uses the loopback interface only.
_ENVIRONMENT = {
    **os.environ, "OPENBLAS_NUM_THREADS": "1", "CGX_THREADS": "2", "CGX_SOCKET_IFNAME": "lo"
}  # fmt: skip
_numbers = itertools.count()

# A round's processes are reused, exit on request (a rank or their world is lost), or are killed.
Fate = Literal["keep", "end", "kill"]


class Worker:
    """A process that plays rounds, from the referee's side."""

    def __init__(self, connection: Connection, pid: int, log: Path, starter: _Starter) -> None:
        self.connection, self.pid, self.log, self._starter = connection, pid, log, starter

    def tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"{text[-_TAIL:]}{self._starter.tail()}"

    def code(self) -> int | None:
        """Return the exit code, if known."""
        return self._starter.code(self.pid)

    def tell_to_quit(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(Quit())

    def quit(self, seconds: float) -> str:
        """Make the worker exit its interpreter; return a complaint, or ""."""
        self.tell_to_quit()
        gone = machine.wait_gone(self.pid, seconds)
        complaint = "" if gone else f"did not exit within {seconds:.1f} s"
        if not gone:
            complaint += "\n" + machine.describe(self.pid) + "\n" + self.tail()
            self.kill()
        elif self.code():
            complaint = f"exited with {self.code()}\n{self.tail()}"
        self.connection.close()
        return complaint

    def kill(self) -> None:
        machine.kill(self.pid)
        machine.wait_gone(self.pid, 10)
        self.connection.close()


class _Starter(Protocol):
    """The source of workers."""

    def tail(self) -> str: ...

    def code(self, pid: int) -> int | None: ...


class Server:
    """Accept connections of started processes, and match them with their tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = str(folder / "socket")
        self._listener = Listener(self.address, backlog=64)
        self._waiting: dict[str, queue.SimpleQueue[tuple[Connection, Hello]]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection: Any = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _greet(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            hello = connection.recv()
            self._waiting[hello.token].put((connection, hello))

    def expect(self, what: str) -> str:
        """Return a new token."""
        token = f"{what}-{next(_numbers)}"
        self._waiting[token] = queue.SimpleQueue()
        return token

    def meet(self, token: str, seconds: float = _START) -> tuple[Connection, Hello]:
        """Return the next process that connects with this token.

        Raises queue.Empty if none did in time.
        """
        return self._waiting[token].get(timeout=seconds)


class Pool(Protocol):
    """The processes of a lane."""

    def take(self, spec: Round) -> list[Worker]:
        """Return the workers of a round, by rank."""
        ...

    def give_back(self, spec: Round, workers: list[Worker], fate: Fate) -> list[str]:
        """Take back the surviving workers; return complaints."""
        ...

    def close(self) -> list[str]:
        """End all of them; return complaints."""
        ...


# ---- Shared memory and TCP -----------------------------------------------------------------------


class Zygote:
    """A process that forks workers of one framework with one transport."""

    def __init__(self, server: Server, transport: str, framework: str) -> None:
        self._server = server
        environment = {**_ENVIRONMENT, "COMMUNICATOR_TYPE": transport.upper()}
        token = server.expect(f"zygote-{framework}")
        command = [sys.executable, "-m", "chaos.zygote", server.address, token]
        self.process = subprocess.Popen([*command, str(server.folder), framework], env=environment)
        self._connection, _ = server.meet(token)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while isinstance(ended := self._connection.recv(), Ended):
                self._codes[ended.pid] = ended.code

    def fork(self) -> Worker:
        token = self._server.expect("worker")
        with self._lock:
            self._connection.send(token)
        connection, hello = self._server.meet(token)
        self._codes.pop(hello.pid, None)
        return Worker(connection, hello.pid, self._server.folder / f"{token}.0.log", self)

    def tail(self) -> str:
        return ""

    def code(self, pid: int) -> int | None:
        until = time.monotonic() + 5
        while pid not in self._codes and time.monotonic() < until and not machine.alive(pid):
            time.sleep(0.005)
        return self._codes.get(pid)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


class Forked:
    """Workers forked by zygotes. Lanes share the zygotes, not the workers."""

    def __init__(self, zygotes: dict[str, Zygote]) -> None:
        self._zygotes = zygotes
        self._idle: dict[str, list[Worker]] = {framework: [] for framework in zygotes}

    def take(self, spec: Round) -> list[Worker]:
        idle = self._idle[spec.framework]
        return [idle.pop() if idle else self._zygotes[spec.framework].fork() for _ in spec.members]

    def give_back(self, spec: Round, workers: list[Worker], fate: Fate) -> list[str]:
        living = [worker for worker in workers if machine.alive(worker.pid)]
        if fate == "kill":
            for worker in living:
                worker.kill()
        else:  # they share no state that could be lost
            self._idle[spec.framework] += living
        return []

    def close(self) -> list[str]:
        for idle in self._idle.values():
            for worker in idle:
                worker.tell_to_quit()  # ask all first, then wait for one after the other
        complaints = [
            f"worker {worker.pid} {complaint}"
            for idle in self._idle.values()
            for worker in idle
            if (complaint := worker.quit(_EXIT))
        ]
        for idle in self._idle.values():
            idle.clear()
        return complaints


# ---- Jobs of mpirun ------------------------------------------------------------------------------


class Job:
    """Four ranks under mpirun, which survive the death of one of them."""

    def __init__(self, server: Server, transport: str, framework: str) -> None:
        token = server.expect(f"{transport}-{framework}")
        self._log = server.folder / f"{token}.log"
        hosts = JOB_HOSTS[transport]
        size = len(hosts.split(","))
        command = [str(Path(sys.prefix, "bin", "mpirun")), "--allow-run-as-root"]
        command += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--with-ft", "ulfm"]
        command += ["-n", str(size), sys.executable, "-m", "chaos.worker", server.address, token]
        environment = {**_ENVIRONMENT, "CGX_TIMEOUT": str(JOB_DEADLINE)}
        environment["COMMUNICATOR_TYPE"] = "MPI" if transport == "mpi" else "AUTO"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(server.folder), framework, hosts],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.workers: list[Worker] = []
        self._names: set[str] = set()  # names in /dev/shm, of any rank
        try:
            met = [server.meet(token) for _ in range(size)]
        except queue.Empty:
            self.kill()
            raise RuntimeError(f"mpirun started no {size} ranks:\n{self.tail()}") from None
        for connection, hello in sorted(met, key=lambda pair: pair[1].rank):
            log_of_rank = server.folder / f"{token}.{hello.rank}.log"
            self.workers.append(Worker(connection, hello.pid, log_of_rank, self))
            self._names |= hello.names

    def tail(self) -> str:
        text = self._log.read_text(errors="replace")[-_TAIL:]
        return f"\n--- mpirun ---\n{text}" if text else ""

    def code(self, pid: int) -> int | None:
        return None  # ranks are mpirun's children

    def quit(self, *, whole: bool) -> list[str]:
        """Make all ranks exit; return complaints. whole: no rank was lost."""
        seconds = (
            2 * JOB_DEADLINE + _EXIT
        )  # at exit each step has a deadline: docs/explanation/failures.md
        for worker in self.workers:
            worker.tell_to_quit()
        complaints = []
        try:
            code = self.process.wait(seconds)
            if whole and code:
                complaints.append(f"the job ended with status {code}\n{self.tail()}")
        except subprocess.TimeoutExpired:
            stuck = "\n".join(
                f"--- rank {rank} ---\n{machine.describe(worker.pid)}\n{worker.tail()}"
                for rank, worker in enumerate(self.workers)
                if machine.alive(worker.pid)
            )
            complaints.append(f"the job did not end within {seconds:.0f} s\n{stuck}")
        if left := [name for name in self._names if os.path.exists(name)]:
            complaints.append(f"the job left {left}")
        self.kill()
        return complaints

    def kill(self) -> None:
        """Kill the remaining processes."""
        self.process.terminate()  # mpirun then removes Open MPI's files in /dev/shm
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for pid in machine.session(self.process.pid):
            machine.kill(pid)
        self.process.wait()
        for name in self._names:
            Path(name).unlink(missing_ok=True)
        for worker in self.workers:
            worker.connection.close()


class Jobs:
    """At most one job per framework, for one lane."""

    def __init__(self, server: Server, transport: str) -> None:
        self._server, self._transport = server, transport
        self._jobs: dict[str, Job] = {}
        self.started = 0

    def take(self, spec: Round) -> list[Worker]:
        if spec.framework not in self._jobs:
            self._jobs[spec.framework] = Job(self._server, self._transport, spec.framework)
            self.started += 1
        workers = self._jobs[spec.framework].workers
        return [workers[member] for member in spec.members]

    def give_back(self, spec: Round, workers: list[Worker], fate: Fate) -> list[str]:
        if fate == "keep":
            return []
        job = self._jobs.pop(spec.framework)
        if fate == "end":
            living = all(machine.alive(worker.pid) for worker in job.workers)
            return job.quit(whole=living and len(spec.survivors) == spec.size)
        job.kill()
        return []

    def close(self) -> list[str]:
        complaints = [
            complaint for job in self._jobs.values() for complaint in job.quit(whole=True)
        ]
        self._jobs.clear()
        return complaints
