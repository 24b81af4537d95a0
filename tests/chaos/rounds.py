"""What a round is. Everything follows from the transport and the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.faults import FAULTS
from chaos.traffic import KINDS

TRANSPORTS = ("shm", "tcp", "mpi", "hybrid")
JOB_HOSTS = {"mpi": "a,a,a,a", "hybrid": "a,a,b,b"}  # of each rank, where mpirun starts them
JOB_DEADLINE = 2.0  # CGX_TIMEOUT of those jobs, in seconds


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        members: of the job's ranks (shm: 0, 1, ...); rank i of the round is members[i].
        traffic: a key of traffic.KINDS; framework is that kind's.
        passes: how often the traffic is run.
        deadline: seconds that a collective may take.
        fault: a key of faults.FAULTS.
        victim: the rank of the round that suffers it.
        early: the fault may come while the communicator is made, else after.
        delay: seconds from there to the fault, of those that a timer brings.
        step: before which step of the traffic it comes, of those that the rank does to itself.
        lasts: seconds that it lasts (a stop, a sleep).
        amount: how much is left of what runs out, from 0 to 3.
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
        """Whether its ranks are of a job of mpirun, not forked for this round."""
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
        """The ranks of the round that live on."""
        dead = self.victim if FAULTS[self.fault].kills else None
        return tuple(rank for rank in range(self.size) if rank != dead)

    def __str__(self) -> str:
        return (
            f"{self.transport} seed {self.seed}: {self.traffic} x {self.passes} on ranks "
            f"{list(self.members)}, deadline {self.deadline} s, {self.fault} on rank {self.victim}"
            f" ({'early, ' if self.early else ''}delay {self.delay * 1e3:.2f} ms, step {self.step},"
            f" lasts {self.lasts:.2f} s, amount {self.amount})"
        )


def make_round(transport: str, seed: int, only_fault: str | None = None) -> Round:
    """Return the round of a seed. only_fault: in place of the one that the seed picks."""
    rng = random.Random(f"{transport} {seed}")
    size = rng.choice((3, 3, 4)) if transport == "hybrid" else rng.choice((2, 2, 3, 4))
    members = sorted(rng.sample(range(4), size)) if transport in JOB_HOSTS else range(size)
    name = rng.choices(list(FAULTS), [fault.weight for fault in FAULTS.values()])[0]
    name = only_fault or name
    fault = FAULTS[name]
    fitting = {key: kind for key, kind in KINDS.items() if kind.starts or fault.how != "started"}
    if fault.starves:  # where a thread dies at its start, they wait for it for ever:
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
