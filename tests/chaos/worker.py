"""A rank: plays rounds that the referee gives it, then checks its own process.

    python -m chaos.worker ADDRESS TOKEN FOLDER FRAMEWORK HOSTS     under mpirun; see also zygote.py

Phases of a round: make the communicator; traffic, until it ends or an error comes; close; tell.
When all ranks have told: check this process, reduce once more, tell again.
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
    """Import what rounds of a framework need. It starts no thread and no MPI."""
    if framework == "jax":
        os.environ["JAX_PLATFORMS"] = "cpu"
    for module in FRAMEWORKS[framework]:
        importlib.import_module(module)
    gc.freeze()  # what is imported is never garbage: rounds collect often, torch has much


# ---- Afterwards ----------------------------------------------------------------------------------


def check(member: Member, message: Check) -> None:
    """Reduce inside this process, then once more with the survivors."""
    member.timeout = USABLE_TIMEOUT
    _reap(member)
    pair = Communicator.local(2, timeout=USABLE_TIMEOUT)
    with contextlib.suppress(Failed):
        # Started, since that also frees what requests that nobody waited for still hold.
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
    """Wait for forked children, a while; note those that did not end well."""
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
    """Play one round and tell."""
    before = Resources()
    os.pwrite(notes, bytes(8), 0)
    member = Member(message, connection, base, notes)
    member.play()
    failed = any(outcome.error for outcome in member.outcomes)
    # A peer that still read them would die of an empty one, and get wrong values from another.
    foreign = ForeignFiles((8 << 20) if message.round.amount else 0) if failed else None
    closed = base is not None and base.closed
    connection.send(Played(member.outcomes, closed))
    while not isinstance(answer := connection.recv(), Check):
        pass  # the answer to a bootstrap that was interrupted
    if foreign:
        foreign.close()
    member.outcomes = []
    check(member, answer)
    if member.survivors is not None:
        member.survivors.close()
    growth = Resources().more_than(before)
    until = time.monotonic() + 2  # what ends, ends on threads of its own
    while growth and time.monotonic() < until:
        time.sleep(0.01)
        growth = Resources().more_than(before)
    if growth:
        member.complaints.append(growth)
    if member.round.transport == "shm" and (names := machine.shared_memory_of("self")):
        member.complaints.append(f"has {names} in /dev/shm")
    connection.send(Checked(member.complaints, member.outcomes))


def serve(address: str, token: str, folder: str, rank: int, base: Callable[[], Any]) -> None:
    """Connect to the referee and play rounds until it says Quit."""
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
            connection.close()  # under MPI this process stays until all others finalize
            raise


def _warm_up() -> None:
    """Make now what a process makes once: the core's threads, those of the frameworks."""
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
