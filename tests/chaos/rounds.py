"""The definition of a round. It follows from the transport and the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.faults import FAULTS
from chaos.traffic import KINDS

TRANSPORTS = ("shm", "tcp", "mpi", "hybrid")
JOB_HOSTS = {"mpi": "a,a,a,a", "hybrid": "a,a,b,b"}  # each rank's host, if mpirun starts them
JOB_DEADLINE = 2.0  # CGX_TIMEOUT of those jobs, in seconds


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        members: ranks of the job (shm: 0, 1, ...); rank i of the round is members[i].
        traffic: a key of traffic.KINDS, which determines the framework.
        passes: how often the traffic runs.
        deadline: seconds allowed for a collective.
        fault: a key of faults.FAULTS.
        victim: the rank of the round that has the fault.
        early: whether the fault may occur while the communicator is created, or only later.
        delay: seconds until the fault, for faults by timer.
        step: the step of the traffic before which the fault occurs, for the other faults.
        lasts: its duration in seconds (a stop, a sleep).
        amount: how much of an exhausted resource is left, from 0 to 3.
    """

    transport: str
    seed: int
    members: tuple[int, ...]
    traffic: str
    passes: int
    deadline: float
    fault: str
    victim: int
    early: bool
    delay: float
    step: int
    lasts: float
    amount: int

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def by_mpirun(self) -> bool:
        """Whether its ranks belong to a job of mpirun, instead of being forked."""
        return self.transport in JOB_HOSTS

    @property
    def framework(self) -> str:
        return KINDS[self.traffic].framework

    @property
    def hosts(self) -> tuple[int, ...] | None:
        """Each rank's host, if there are several."""
        if self.transport != "hybrid":
            return None
        hosts = JOB_HOSTS["hybrid"].split(",")
        return tuple("ab".index(hosts[member]) for member in self.members)

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks of the round that survive."""
        dead = self.victim if FAULTS[self.fault].kills else None
        return tuple(rank for rank in range(self.size) if rank != dead)

    def __str__(self) -> str:
        return (
            f"{self.transport} seed {self.seed}: {self.traffic} x {self.passes} on ranks "
            f"{list(self.members)}, deadline {self.deadline} s, {self.fault} on rank {self.victim}"
            f" ({'early, ' if self.early else ''}delay {self.delay * 1e3:.2f} ms, step {self.step},"
            f" lasts {self.lasts:.2f} s, amount {self.amount})"
        )


def transports_of(fault: str) -> tuple[str, ...]:
    """Return the transports that have a fault."""
    return FAULTS[fault].transports or TRANSPORTS


def make_round(transport: str, seed: int, only_fault: str | None = None) -> Round:
    """Return the round of a seed. only_fault: replaces the fault that the seed determines."""
    rng = random.Random(f"{transport} {seed}")
    size = rng.choice((3, 3, 4)) if transport == "hybrid" else rng.choice((2, 2, 3, 4))
    members = sorted(rng.sample(range(4), size)) if transport in JOB_HOSTS else range(size)
    possible = {name: each for name, each in FAULTS.items() if transport in transports_of(name)}
    name = rng.choices(list(possible), [fault.weight for fault in possible.values()])[0]
    name = only_fault or name
    fault = FAULTS[name]
    fitting = {key: kind for key, kind in KINDS.items() if kind.starts or fault.how != "started"}
    if fault.starves:  # these would wait forever for a thread that dies at its start:
        del fitting["torch backend"], fitting["threads"]  # gloo's constructor, Python's start()
    traffic = rng.choices(list(fitting), [kind.weight for kind in fitting.values()])[0]
    deadline = fault.deadline or rng.choice((1.0, 1.0, 1.5, 2.0))
    early = fault.may_be_early and rng.random() < 0.3
    return Round(
        transport=transport,
        seed=seed,
        members=tuple(members),
        traffic=traffic,
        passes=rng.randint(1, 4),
        deadline=deadline,
        fault=name,
        victim=rng.randrange(size),
        early=early,
        delay=10 ** rng.uniform(*fault.delay_exponents),
        step=rng.randrange(6),
        lasts=deadline * rng.uniform(*fault.lasts),
        amount=rng.randrange(4),
    )
