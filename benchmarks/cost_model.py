"""A cost model of allreduces: counts bytes, messages and values, then prices them.

    ALGORITHMS, PEERS   the work of a rank and of the link of its host, by index arithmetic
    seconds()           the time of that work with given Constants
    predict()           both together

The model is alpha-beta-gamma: a latency for each step, a time for each byte on a link, a time for
each value worked on. Counts of the exact peers are those of R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH" (2005) and of E. Chan, M. Heimlich,
A. Purkayastha, R. van de Geijn, "Collective communication: theory, practice, and experience"
(2007); those of cgx are of csrc/algorithm, headers included.

Two things are added. Messages take processor time, which ranks of one core share. And large
messages travel in chunks: link and processor work at the same time, except for the first chunk.

Ranks are spread evenly over hosts; the ranks of a host are consecutive.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

CHUNK_BYTES = 32 * 1024  # of a message at most: csrc/transport/table.cc
SHARED_CHUNK_BYTES = 128 * 1024  # the same where all ranks are on one host,
CHUNKS_OF_SHARD = 8  # and a shard is that many messages: csrc/algorithm/layout.cc
EAGER_BYTES = 8 * 1024  # kEagerBytes of csrc/algorithm/one_shot.h: values that ride in headers
HEADER_BYTES = 208  # docs/reference/control_messages.md
BUCKET = 512  # values
EXACT = 32  # bits


# ---- Counts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Ranks, as many on each host."""

    hosts: int
    per_host: int

    @property
    def size(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Traffic:
    """The traffic that a rank sends; it receives as much.

    Attributes:
        steps: messages of which each waits for the one before.
        messages: all of them.
        bytes: in all of them.
    """

    steps: int = 0
    messages: int = 0
    bytes: float = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.steps + other.steps, self.messages + other.messages, self.bytes + other.bytes
        )


@dataclass(frozen=True)
class Work:
    """The work of an allreduce for the busiest rank and for the link of a host.

    Attributes:
        far: sent to ranks of other hosts.
        near: sent to ranks of the same host.
        link_bytes: that the host sends to others; it receives as many.
        values: that are worked on, by operation ("encode", "add": decode and add, "decode") and
            bits.
        chunks: messages of a step; sending one overlaps with work on the others.
    """

    far: Traffic
    near: Traffic
    link_bytes: float
    values: Mapping[tuple[str, int], float]
    chunks: int = 1

    @property
    def sent(self) -> float:
        """Bytes that the rank sends."""
        return self.far.bytes + self.near.bytes


def wire_bytes(values: int, bits: int) -> int:
    """Return the bytes of encoded values: a bucket is its minimum, its step, then the levels."""
    if bits == EXACT:
        return 4 * values
    full, rest = divmod(values, BUCKET)
    last = 8 + math.ceil(rest * bits / 8) if rest else 0
    return full * (8 + BUCKET * bits // 8) + last


def _largest_shard(values: int, bits: int, owners: int) -> int:
    """Return its values. Cuts fall between buckets."""
    grain = 1 if bits == EXACT else BUCKET
    return min(values, math.ceil(math.ceil(values / grain) / owners) * grain)


def _messages(shard: float, ranks: Ranks) -> int:
    longest = CHUNK_BYTES
    if ranks.hosts == 1:
        longest = min(max(shard / CHUNKS_OF_SHARD, CHUNK_BYTES), SHARED_CHUNK_BYTES)
    return math.ceil(shard / longest)


def _to_each(ranks: Ranks, steps: int, messages: int, size: float) -> tuple[Traffic, Traffic]:
    """Return far and near traffic of a rank that sends every other as much."""
    far, near = (
        Traffic(steps * (peers > 0), peers * messages, peers * size)
        for peers in (ranks.size - ranks.per_host, ranks.per_host - 1)
    )
    return far, near


def _headers(ranks: Ranks) -> tuple[Traffic, Traffic]:
    """Return the traffic of the headers, which go from everyone to everyone before any value."""
    return _to_each(ranks, steps=1, messages=1, size=HEADER_BYTES)


# ---- cgx's algorithms ----------------------------------------------------------------------------


def one_shot(values: int, bits: int, ranks: Ranks) -> Work:
    """Everything from everyone to everyone; in the headers if it is small."""
    size = wire_bytes(values, bits)
    rides = size <= EAGER_BYTES
    messages = _messages(size, ranks)
    far, near = _to_each(ranks, 0 if rides else 1, 0 if rides else messages, size)
    far_headers, near_headers = _headers(ranks)
    far, near = far + far_headers, near + near_headers
    added = ranks.size * values  # its own are among them, so that all add the same
    return Work(
        far,
        near,
        ranks.per_host * far.bytes,
        {("encode", bits): values, ("add", bits): added},
        messages,
    )


def sra(values: int, bits: int, ranks: Ranks) -> Work:
    """Scatter-reduce-allgather, as the owner of the largest shard sees it."""
    peers = ranks.size - 1
    shard = _largest_shard(values, bits, ranks.size)
    size = wire_bytes(shard, bits)
    scattered = (wire_bytes(values, bits) - size) / peers  # to each; `size` is gathered
    far, near = _to_each(ranks, 2, 2 * _messages(size, ranks), scattered + size)
    far_headers, near_headers = _headers(ranks)
    far, near = far + far_headers, near + near_headers
    return Work(
        far,
        near,
        ranks.per_host * far.bytes,
        {("encode", bits): values, ("add", bits): peers * shard, ("decode", bits): values},
        peers * _messages(size, ranks),
    )


def ring(values: int, bits: int, ranks: Ranks) -> Work:
    """2(n-1) steps to the right-hand neighbor, as the last rank of a host sees it."""
    shards = ranks.size - 1  # that it adds to, and decodes
    size = wire_bytes(values, bits) / ranks.size
    messages = _messages(size, ranks)
    far, near = _rightwards(ranks, messages, size)
    far_headers, near_headers = _headers(ranks)
    share = values * shards / ranks.size
    return Work(
        far + far_headers,
        near + near_headers,
        far.bytes + ranks.per_host * far_headers.bytes,  # one rank of a host sends to the next
        {("encode", bits): values, ("add", bits): share, ("decode", bits): share},
        messages,
    )


def _rightwards(ranks: Ranks, messages: int, size: float) -> tuple[Traffic, Traffic]:
    steps = 2 * (ranks.size - 1)
    data = Traffic(steps, steps * messages, steps * size)
    return (data, Traffic()) if ranks.hosts > 1 else (Traffic(), data)


def hierarchical(values: int, bits: int, ranks: Ranks) -> Work:
    """Exactly within hosts, encoded between them, lane by lane; as the largest owner sees it."""
    hosts, lanes = ranks.hosts, ranks.per_host
    if hosts == 1 or lanes == 1:  # one level only
        return sra(values, bits, ranks)
    shard = _largest_shard(values, bits, ranks.size)  # of a host, in one lane
    size = wire_bytes(shard, bits)
    messages = _messages(size, ranks)
    others = hosts * shard * (lanes - 1)  # values of other lanes: sent exactly, and got as many
    far = Traffic(2, 2 * (hosts - 1) * messages, 2 * (hosts - 1) * size)
    near = Traffic(
        2,
        2 * (lanes - 1) * hosts * messages,
        4 * values * (lanes - 1) / lanes + (lanes - 1) * hosts * size,
    )
    far_headers, near_headers = _headers(ranks)
    far, near = far + far_headers, near + near_headers
    return Work(
        far,
        near,
        lanes * far.bytes,
        {
            ("encode", EXACT): others,
            ("add", EXACT): others,
            ("encode", bits): hosts * shard,
            ("add", bits): (hosts - 1) * shard,
            ("decode", bits): values,
        },
        (hosts - 1) * messages,
    )


# ---- Exact peers ---------------------------------------------------------------------------------
# As MPI libraries have them, for powers of two: one message a step, added when it is all there.


def mpi_ring(values: int, _bits: int, ranks: Ranks) -> Work:
    """2(n-1) steps, 2(n-1)/n of the bytes."""
    far, near = _rightwards(ranks, 1, 4 * values / ranks.size)
    return _exact(far, near, far.bytes, values * (ranks.size - 1) / ranks.size)


def recursive_doubling(values: int, _bits: int, ranks: Ranks) -> Work:
    """Partners at distance 1, 2, 4...: log2(n) steps, all the bytes in each."""
    far, near = (
        Traffic(steps, steps, 4 * values * steps)
        for steps in (_log2(ranks.hosts), _log2(ranks.per_host))
    )
    return _exact(far, near, ranks.per_host * far.bytes, values * (far.steps + near.steps))


def rabenseifner(values: int, _bits: int, ranks: Ranks) -> Work:
    """Halving with partners at distance 1, 2, 4..., then doubling back: 2 log2(n) steps."""
    hosts, per_host = ranks.hosts, ranks.per_host
    within, between = 2 * _log2(per_host), 2 * _log2(hosts)
    near = Traffic(within, within, 2 * 4 * values * (per_host - 1) / per_host)
    far = Traffic(between, between, 2 * 4 * values / per_host * (hosts - 1) / hosts)
    return _exact(far, near, per_host * far.bytes, values * (ranks.size - 1) / ranks.size)


def _exact(far: Traffic, near: Traffic, link_bytes: float, added: float) -> Work:
    """Return the work: what comes by shared memory is copied before it is added."""
    values = {("add", EXACT): added, ("decode", EXACT): near.bytes / 4}
    return Work(far, near, link_bytes, values)


def _log2(count: int) -> int:
    return math.ceil(math.log2(count))


Algorithm = Callable[[int, int, Ranks], Work]  # of values, bits, ranks
ALGORITHMS: dict[str, Algorithm] = {
    "one_shot": one_shot,
    "sra": sra,
    "ring": ring,
    "hierarchical": hierarchical,
}
PEERS: dict[str, Algorithm] = {
    "MPI ring": mpi_ring,
    "MPI recursive doubling": recursive_doubling,
    "MPI Rabenseifner": rabenseifner,
}


# ---- Costs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Path:
    """From a rank to another.

    Attributes:
        alpha: seconds from a message's sending until the other acts on it, on an idle path.
        message: processor seconds of a message, for its sender as for its receiver.
        byte: processor seconds of a byte, for the sender and for the receiver.
        turn: seconds that it waits for its receiver to get a core, for each rank on that core but
            the receiver.
    """

    alpha: float = 0
    message: float = 0
    byte: float = 0
    turn: float = 0


@dataclass(frozen=True)
class Constants:
    """A machine.

    Attributes:
        link_rate: bytes a second that a host can send, and receive at the same time.
        far: between hosts.
        near: within a host.
        call: seconds of an allreduce that does nothing.
        cores: of a host, which its ranks share; less than 1 where hosts share a core.
        rates: seconds a value, by operation and bits, as Work has them.
    """

    link_rate: float
    far: Path = Path()
    near: Path = Path()
    call: float = 0
    cores: float = math.inf
    rates: Mapping[tuple[str, int], float] = field(default_factory=dict)


def seconds(work: Work, ranks: Ranks, constants: Constants) -> float:
    """Return the time of an allreduce."""
    paths = ((work.far, constants.far), (work.near, constants.near))
    sharing = max(1, ranks.per_host / constants.cores)  # ranks of a core
    latency = sum(
        traffic.steps * (path.alpha + (sharing - 1) * path.turn) for traffic, path in paths
    )
    processor = sum(
        2 * (traffic.messages * path.message + traffic.bytes * path.byte) for traffic, path in paths
    )
    processor += sum(count * constants.rates.get(what, 0) for what, count in work.values.items())
    processor *= sharing
    link = work.link_bytes / constants.link_rate
    overlapping = max(processor, link) + min(processor, link) / work.chunks
    return constants.call + latency + overlapping


def predict(name: str, size: int, bits: int, ranks: Ranks, constants: Constants) -> float:
    """Return the seconds of an algorithm on `size` bytes of fp32."""
    algorithm = (ALGORITHMS | PEERS)[name]
    return seconds(algorithm(size // 4, bits, ranks), ranks, constants)


@dataclass(frozen=True)
class Machine:
    """The constants of a machine, without the rate of its links and the cores of its hosts.

    Defaults are where simulator.py's fit begins.

    Attributes:
        rates: as in Constants.
        far_message: of the path between hosts.
        far_byte: of the same.
        far_alpha: of the same.
        far_turn: of the same.
        near_message: of the path within a host. Its alpha and byte are 0: who waits there
            spins, and the codec writes and reads shared memory itself.
        near_turn: of the same.
        call: as in Constants.
        efficiency: part of a link's rate that carries messages: the rest is TCP's and IP's.
    """

    rates: Mapping[tuple[str, int], float]
    far_message: float
    far_byte: float
    far_alpha: float = 1e-4
    far_turn: float = 1e-4
    near_message: float = 1e-6
    near_turn: float = 1e-5
    call: float = 1e-5
    efficiency: float = 0.9

    def constants(self, link_rate: float, cores: float) -> Constants:
        """Return the constants for links of this rate (bytes a second) and hosts of so many cores.

        cores: less than 1 where hosts share one.
        """
        near = Path(message=self.near_message, turn=self.near_turn)
        far = Path(self.far_alpha, self.far_message, self.far_byte, self.far_turn)
        return Constants(link_rate * self.efficiency, far, near, self.call, cores, self.rates)
