"""Messages between the referee and a worker: pickled, over a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.collective_cases import Case

from chaos.rounds import Round


@dataclass(frozen=True)
class Hello:
    """A process has started.

    token: identifies the purpose of the process; rank: its rank in the job; names: its files in
    /dev/shm.
    """

    token: str
    rank: int
    pid: int
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Play:
    """Play a round as this rank.

    store_port: port of torch's TCPStore in the referee's process, which is safe from faults of
    ranks; None if the round needs no store.
    """

    round: Round
    rank: int
    store_port: int | None


@dataclass(frozen=True)
class Gather:
    """Gather bytes from all ranks of the bootstrap. The answer is all bytes, or an error text."""

    blob: bytes


@dataclass(frozen=True)
class Outcome:
    """One call. Times are time.monotonic(), which all processes of a machine share.

    Attributes:
        what: a description of the call.
        case: the case, if the call returned values; size, hosts: number of ranks, and each
            rank's host (None: they share one); members: each one's number in the communicator
            from which all others were created, which determines its noise (None: as here); place:
            this rank's index among them; digest: of the values.
        error: the exception's class, "" if there was none; text: its message.
        right_kind: whether the library may raise this kind of error.
        deadline: allowed seconds.
        making: whether the call created a communicator: several waits, each with a deadline.
    """

    what: str
    begin: float
    end: float
    deadline: float
    case: Case | None = None
    size: int = 0
    hosts: tuple[int, ...] | None = None
    members: tuple[int, ...] | None = None
    place: int = 0
    digest: str = ""
    error: str = ""
    text: str = ""
    right_kind: bool = True
    making: bool = False


@dataclass(frozen=True)
class Played:
    """The traffic has ended on this rank, and its communicator is closed."""

    outcomes: list[Outcome]
    base_closed: bool  # the job's world is closed


@dataclass(frozen=True)
class Check:
    """All ranks are done: check this process, then reduce once more with these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Checked:
    """Results of the checks: complaints, and the calls of a new communicator."""

    complaints: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class Quit:
    """Exit the interpreter."""


@dataclass(frozen=True)
class Ended:
    """A worker of a zygote has ended: its exit code, or minus a signal's number."""

    pid: int
    code: int
