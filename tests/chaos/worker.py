"""A rank: plays the rounds that the referee sends, then checks its own process.

    python -m chaos.worker ADDRESS TOKEN FOLDER FRAMEWORK HOSTS     under mpirun; see also zygote.py

Phases of a round: create the communicator; traffic, until it ends or raises; close; report.
When all ranks have reported: check this process, reduce once more, report again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

import numpy as np

import cgx_ops
from cgx_ops import (
    Communicator,
)
from chaos import faults, machine, traffic
from chaos.member import USABLE_TIMEOUT, Failed, Member
from chaos.messages import Check, Checked, Hello, Play, Played, Quit
from chaos.resources import ForeignFiles, Resources

FRAMEWORKS = {"numpy": [], "torch": ["torch", "cgx_ops.torch"], "jax": ["jax", "cgx_ops.jax"]}


def load(framework: str) -> None:
    """Import the modules for a framework's rounds. This starts no thread and no MPI."""
    if framework == "jax":
        os.environ["JAX_PLATFORMS"] = "cpu"
    for module in FRAMEWORKS[framework]:
        importlib.import_module(module)
    gc.freeze()  # imports are never garbage: rounds collect often, and torch has many objects


# ---- Checks after a round ------------------------------------------------------------------------


def check(member: Member, message: Check) -> None:
    """Reduce inside this process, then once more with the survivors."""
    member.timeout = USABLE_TIMEOUT
    _reap(member)
    pair = Communicator.local(2, timeout=USABLE_TIMEOUT)
    with contextlib.suppress(Failed):
        # Start calls, because that also frees requests without a wait.
        requests = [traffic.call(traffic.USABLE, comm, asynchronous=True) for comm in pair]
        for request in requests:
            member.attempt(traffic.USABLE, request.wait, local=2)
    for comm in pair:
        comm.close()
    if len(message.ranks) < 2:
        return
    with contextlib.suppress(Failed):
        again = member.attempt(None, lambda: member.again(message.ranks), making=True)
        member.attempt(
            traffic.USABLE,
            lambda: traffic.call(traffic.USABLE, again, timeout=USABLE_TIMEOUT),
            ranks=message.ranks,
        )
        member.attempt(None, again.close)


def _reap(member: Member) -> None:
    """Wait briefly for forked children; record those that failed."""
    deadline = time.monotonic() + 5
    while member.children and time.monotonic() < deadline:
        for child in list(member.children):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                member.children.remove(child)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    member.complaints.append(f"the forked child ended with {code}")
        time.sleep(0.005)
    for child in member.children:
        member.complaints.append(f"the forked child {child} still runs")
        os.kill(child, signal.SIGKILL)


# ---- The process ---------------------------------------------------------------------------------


def play(connection: Connection, message: Play, base: Communicator | None, notes: int) -> None:
    """Play one round and report."""
    before = Resources()
    os.pwrite(notes, bytes(8), 0)
    member = Member(message, connection, base, notes)
    member.play()
    failed = any(outcome.error for outcome in member.outcomes)
    # A peer that still read these files would crash with an empty one, and get wrong values from
    # another one.
    foreign = ForeignFiles((8 << 20) if message.round.amount else 0) if failed else None
    closed = base is not None and base.closed
    connection.send(Played(member.outcomes, closed))
    while not isinstance(answer := connection.recv(), Check):
        pass  # the answer to an interrupted bootstrap
    if foreign:
        foreign.close()
    member.outcomes = []
    check(member, answer)
    if member.survivors is not None:
        member.survivors.close()
    growth = Resources().more_than(before)
    until = time.monotonic() + 2  # time for threads to end
    while growth and time.monotonic() < until:
        time.sleep(0.01)
        growth = Resources().more_than(before)
    if growth:
        member.complaints.append(growth)
    if member.round.transport == "shm" and (names := machine.shared_memory_of("self")):
        member.complaints.append(f"has {names} in /dev/shm")
    connection.send(Checked(member.complaints, member.outcomes))


def serve(address: str, token: str, folder: str, rank: int, base: Callable[[], Any]) -> None:
    """Connect to the referee and play rounds until it sends Quit."""
    log = os.open(f"{folder}/{token}.{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(address)
    world = base()
    _warm_up()
    notes = os.open(f"{folder}/{token}.{rank}.fault", os.O_CREAT | os.O_RDWR, 0o600)
    connection.send(Hello(token, rank, os.getpid(), machine.shared_memory_of("self")))
    while not isinstance(message := connection.recv(), Quit):
        try:
            play(connection, message, world, notes)
        except faults.Uncaught:
            connection.close()  # under MPI this process remains until all others finalize
            raise


def _warm_up() -> None:
    """Create everything that a process creates once: the threads of the core and the frameworks."""
    pair = Communicator.local(2)
    requests = [traffic.call(traffic.LARGEST, comm, asynchronous=True) for comm in pair]
    for request in requests:
        request.wait()
    for comm in pair:
        comm.close()
    if "jax" in sys.modules:
        import jax

        jax.jit(lambda x: x + 1)(jax.numpy.ones(1 << 20)).block_until_ready()


def main() -> None:
    address, token, folder, framework, hosts = sys.argv[1:]
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["CGX_HOST_ID"] = hosts.split(",")[rank]
    load(framework)

    def world() -> Communicator:
        comm = cgx_ops.init()
        with comm.group(range(comm.size), name="warm-up") as group:
            for each in (comm, group):
                each.allreduce_async(np.ones(1 << 20, np.float32)).wait()
        return comm

    serve(address, token, folder, rank, world)


if __name__ == "__main__":
    main()
