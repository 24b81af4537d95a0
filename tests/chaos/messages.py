"""What the referee and a worker say to each other: pickled, over a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.collective_cases import Case

from chaos.rounds import Round


@dataclass(frozen=True)
class Hello:
    """A process is there.

    token: what it was started for; rank: in its job; names: what it uses in /dev/shm.
    """

    token: str
    rank: int
    pid: int
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Play:
    """Play a round as this rank of it.

    store_port: of torch's TCPStore in the referee's process, which no fault of a rank reaches; None
    if the round needs none.
    """

    round: Round
    rank: int
    store_port: int | None


@dataclass(frozen=True)
class Gather:
    """Give these bytes to all ranks of the bootstrap. The answer: theirs, or why not (a text)."""

    blob: bytes


@dataclass(frozen=True)
class Outcome:
    """One call. Times are time.monotonic(), which all processes of a machine share.

    Attributes:
        what: the call, in words.
        case: if it gave values, of which call; size, hosts: among how many ranks, and each one's
            host (None: they share one); members: each one's number in the communicator that all
            others were made of, by which it draws noise (None: as here); place: this rank's among
            them; digest: of the values.
        error: the exception's class, "" if there was none; text: what it says.
        right_kind: whether it is of a kind that the library may raise.
        deadline: seconds that were allowed.
        making: it made a communicator: several waits, each with a deadline.
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
    """The traffic is over on this rank, and its communicator closed."""

    outcomes: list[Outcome]
    base_closed: bool  # of the job's world


@dataclass(frozen=True)
class Check:
    """All are done: check yourself; then reduce once more with these ranks, if they are several."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Checked:
    """What was found: complaints, and the calls of a new communicator."""

    complaints: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True)
class Quit:
    """Leave the interpreter."""


@dataclass(frozen=True)
class Ended:
    """A worker of a zygote has: its exit code, or minus a signal's number."""

    pid: int
    code: int
