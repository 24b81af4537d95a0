"""Check the arguments of a collective and convert them to a cgx_collective_t."""

import functools
import hashlib
import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cgx_ops import _numpy_ops
from cgx_ops._core import library, structs, tables
from cgx_ops._core.arrays import Array, address, as_output, dtype_code
from cgx_ops._core.splits import Splits
from cgx_ops.config import Config, check_config
from cgx_ops.errors import InvalidArgument, checked_seed

Op = Literal["sum", "avg", "min", "max", "product"]
Verb = str  # a name of tables.VERBS


@dataclass(frozen=True)
class Segment:
    """A run of elements with its own compression, such as one tensor of a fused message.

    The arguments are attributes, too.

    Args:
        offset: Index of the first element, from the start of the array (or of a rank's block).
        numel: Number of elements.
        config: The compression of these elements. None: the Config of the call. The algorithm is
            that of the call.

    Raises:
        InvalidArgument: `offset` or `numel` is negative, or `config` is not a Config.
        TypeError: `offset` or `numel` is not an integer.

    Example:
        >>> import numpy as np
        >>> from cgx_ops import Communicator, Config, Segment
        >>> [comm] = Communicator.local(1)
        >>> segments = [Segment(0, 1000), Segment(1000, 24, Config(bits=32))]  # weights, bias
        >>> comm.allreduce(np.zeros(1024, np.float32), segments=segments).shape
        (1024,)
        >>> comm.close()
    """

    offset: int
    numel: int
    config: Config | None = None

    def __post_init__(self) -> None:
        for name in ("offset", "numel"):
            value = operator.index(getattr(self, name))
            if not 0 <= value < 2**63:
                raise InvalidArgument(f"Segment.{name} is {value}; it must be an integer >= 0")
        check_config(self.config)


_64_BITS = 2**64 - 1


def call_seed(seed: int, name: str, occurrence: int, comm: str = "") -> int:
    """Return the seed of the noise of one call.

    Args:
        seed: The caller's seed, such as that of a hook's state.
        name: Name of the call.
        occurrence: How many calls of this name came before.
        comm: Name of the communicator, so that each communicator has its own noise.
    """
    return nth_seed(seed_stream(seed, name, comm), occurrence)


@functools.lru_cache(maxsize=4096)  # hashing takes longer than the rest of a seed
def seed_stream(seed: int, name: str, comm: str = "") -> int:
    """Return the first of the seeds of the calls of one name; see call_seed()."""
    digest = hashlib.blake2b(repr((seed, name, comm)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


_CALLS, _SEGMENTS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95  # steps between seeds


def nth_seed(stream: int, n: int, step: int = _CALLS) -> int:
    """Return the n-th seed of a stream, like cgx/call_seeds.h and csrc/base/seeds.h."""
    if n == 0:
        return stream
    z = stream + n * step & _64_BITS
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _64_BITS
    z ^= z >> 31
    return z - (z >> 63 << 64)


class Counter:
    """Count a communicator's calls by name, to derive the seeds of their noise.

    The counts make the noise reproducible even if threads start named collectives in any order. The
    last MOST names are stored; older ones are dropped. A dropped or new name continues at the
    highest count of any dropped name, so that no seed is used twice. From then on the count of a
    new name depends on the order of names. With "randk" this order must be the same on all ranks.
    """

    MOST = 16384

    def __init__(self) -> None:
        self._unnamed = itertools.count()  # calls without a name
        self._counts: dict[str, int] = {}  # the name used last comes last
        self._forgotten = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, name: str) -> Callable[[], int]:
        """Return a function that does next(name); for unnamed calls it runs no Python code."""
        return functools.partial(self.next, name) if name else self._unnamed.__next__

    def next(self, name: str) -> int:
        """Count a call of this name and return how many came before."""
        if not name:
            return next(self._unnamed)
        with self._lock:
            count = self._counts.pop(name, self._forgotten)
            self._counts[name] = count + 1
            if len(self._counts) > self.MOST:
                self._forgotten = max(self._forgotten, self._counts.pop(next(iter(self._counts))))
            return count


def check_timeout(timeout: float | None) -> None:
    """Raise InvalidArgument unless a timeout is positive or None."""
    if timeout is not None and not timeout > 0:
        raise InvalidArgument(f"timeout is {timeout!r}; it must be seconds > 0, or None")


class Call:
    """The checked arguments of one collective."""

    def __init__(
        self,
        verb: Verb,
        op: Op,
        config: Config,
        name: str,
        segments: Sequence[Segment] | None,
        seed: int | Sequence[int] | None,
        timeout: float | None,
    ) -> None:
        if op not in tables.OPS:
            raise InvalidArgument(f"op is {op!r}; it must be one of {', '.join(tables.OPS)}")
        check_timeout(timeout)
        if not isinstance(name, str):
            raise InvalidArgument(f"name is {name!r}; it must be a string")
        self.verb: Verb = verb
        self.op: Op = op
        self.name, self.segments = name, segments
        self.config = config
        self.timeout = timeout
        own = [each.config or config for each in segments or ()]
        used = {self.config, *own}
        self._draws = any(each.is_random for each in used)
        sums = op in ("sum", "avg")  # the core refuses residuals of other operations
        self._loses_nothing = sums and all(each.is_exact for each in used)
        # By segment: whether its seed selects indices ("randk"), equal on all ranks, or noise.
        self._places = [each.compressor == "randk" for each in own or [self.config]]
        # Whether equal arguments make the same call again.
        self.repeatable = segments is None and seed is None
        self.seed = self.seeds = None  # of the call, and of its segments
        if isinstance(seed, Sequence):
            if segments is None or len(seed) != len(segments):
                raise InvalidArgument(
                    f"seed is a list of {len(seed)} for "
                    f"{'no' if segments is None else len(segments)} segments; give one seed each"
                )
            self.seeds = [checked_seed(each) for each in seed]
        elif seed is not None:
            self.seed = checked_seed(seed)

    def seed_stream(self, comm_name: str) -> int:
        """Return the stream of this call's seed, for callers that pass no seed.

        For "randk" it does not depend on the communicator's name, which differs between ranks that
        are threads.
        """
        places = all(self._places)
        return seed_stream(0, self.name, "" if places else comm_name)

    def collective(
        self,
        comm: int,
        dtype: int,
        source: int,
        result: int,
        block: int,
    ) -> structs.Collective:
        """Return the call as a cgx_collective_t on contiguous memory, with the caller's seed.

        Args:
            comm: Id of the communicator.
            dtype: A cgx_dtype_t.
            source: Address of the input.
            result: Address of the result.
            block: Elements per rank.
        """
        config = self.config
        make = _known_pattern if self.segments is None else _pattern
        pattern = make(
            comm, self.verb, self.op, config, self.name, self.timeout, dtype, block, self.segments
        )
        native = _copy(pattern)
        native.pattern = pattern  # owns the memory behind the copy's pointers
        native.seed, native.input, native.output = self.seed or 0, source, result
        if self.seeds is not None:
            native.seeds = (c_int64 * len(self.seeds))(*self.seeds)
        return native

    def draw_seed(
        self, native: structs.Collective, comm_name: str, next_call: Callable[[str], int]
    ) -> None:
        """Count the call and set its seed, unless the caller passed one. The last step before it.

        With "randk" all ranks must count the same calls, or they draw different indices from then
        on. So the core checks such a call first, and a call that one rank refuses is not counted.

        Args:
            native: The result of collective().
            comm_name: Name of the communicator.
            next_call: Counts calls by name.
        """
        if any(self._places):
            library.call("cgx_plan", byref(native), byref(structs.Plan()))
        number = next_call(self.name)
        if self.seed is not None or self.seeds is not None or not self._draws:
            return
        native.seed = nth_seed(self.seed_stream(comm_name), number)
        if any(self._places) and not all(self._places):
            first = nth_seed(seed_stream(0, self.name), number), native.seed
            seeds = [
                nth_seed(first[0] if places else first[1], i, _SEGMENTS)
                for i, places in enumerate(self._places)
            ]
            native.seeds = (c_int64 * len(seeds))(*seeds)

    def prepare(
        self,
        comm: int,
        comm_name: str,
        counter: Counter,
        source: Array,
        shape: tuple[int, ...],
        block: int,
        out: Array | None,
        residual: Array | None = None,
        splits: Splits | None = None,
    ) -> tuple[structs.Collective, *tuple[Array, ...]]:
        """Return the call, its result, and the other arrays that it uses.

        Args:
            comm: Id of the communicator.
            comm_name: Its name.
            counter: Its counts of calls.
            source: The input.
            shape: Shape of the result.
            block: Elements per rank.
            out: Array for the result; None: a new one.
            residual: Array for error feedback, if any.
            splits: Sizes of the blocks of an all_to_all; then `block` is 0.
        """
        result = as_output(out, shape, source.dtype)
        pointers = address(source), address(result)
        in_place = tables.VERBS[self.verb]["shards"] and pointers[0] == pointers[1]
        if not in_place and np.may_share_memory(result, source):
            raise InvalidArgument(
                f"out overlaps the input of {self.verb}: "
                "only allreduce may write to its input, and to all of it"
            )
        if out is None and self.segments is not None:
            result.fill(0)
        collective = self.collective(comm, dtype_code(source.dtype), *pointers, block)
        arrays = [result, source]
        if residual is not None:
            collective.residuals = self._residuals(residual, source, result)
            arrays.append(residual)
        if splits is not None:
            splits.set(collective)
        self.draw_seed(collective, comm_name, counter.next)
        return collective, *arrays

    def _residuals(self, residual: Array, source: Array, result: Array) -> Any:
        """Return the addresses of the segments' residuals."""
        if self._loses_nothing:
            raise InvalidArgument(
                f"{self.verb} with a residual and bits=32 or 'lossless': an exact call has no "
                "quantization error: leave the residual out, or compress"
            )
        as_output(residual, source.shape, source.dtype, "residual")
        if np.may_share_memory(residual, source) or np.may_share_memory(residual, result):
            raise InvalidArgument("residual overlaps the input or out: pass a separate array")
        start, width = address(residual), source.itemsize
        offsets = [0] if self.segments is None else [each.offset for each in self.segments]
        return (c_void_p * len(offsets))(*(start + width * at for at in offsets))


_copy = structs.Collective.from_buffer_copy


class Repeat:
    """A call that was checked once; arrays of the same form need only new addresses and a new seed.

    After a millisecond of other work, Python's code and data have left the processor's caches, and
    each line costs ten times as much as in a loop. Checking again took longer than the collective.
    """

    __slots__ = ("_address", "_count", "_pattern", "_stream", "config")

    def __init__(
        self,
        call: Call,
        pattern: structs.Collective,
        counter: Counter,
        comm_name: str,
    ) -> None:
        self.config = call.config  # keep it alive: Communicator finds the call by its id
        self._pattern, self._address = pattern, addressof(pattern)
        self._stream, self._count = call.seed_stream(comm_name), counter.of(call.name)

    def run(self, source: Array, result: Array) -> bool:
        """Run the call and return True; return False if these arrays must be checked first."""
        status = _numpy_ops.repeat(self._address, source, result, self._stream, self._count)
        if status == _numpy_ops.MUST_BE_CHECKED:
            return False
        if status:
            library.check(status)
        return True


def _pattern(
    comm: int,
    verb: Verb,
    op: Op,
    config: Config,
    name: str,
    timeout: float | None,
    dtype: int,
    block: int,
    segments: Sequence[Segment] | None,
) -> structs.Collective:
    """Return a call as a cgx_collective_t without its seed and addresses."""
    given = [Segment(0, block)] if segments is None else segments
    for i, segment in enumerate(given if block == 0 else ()):
        if segment.numel:  # for a block of 0 the core would use the end of the last segment
            raise InvalidArgument(
                f"segment {i} ends at element {segment.offset + segment.numel}, beyond the "
                "block of 0 elements"
            )
    travels = [(each.offset, each.numel, each.config or config) for each in given]
    return build(
        verb, op, config, travels, comm=comm, dtype=dtype, block_numel=block,
        name=library.encode(name), timeout_s=timeout or 0.0,
    )  # fmt: skip


def build(
    verb: Verb, op: str, config: Config, segments: Sequence[tuple[int, int, Config]], **fields: Any
) -> structs.Collective:
    """Return a call as a cgx_collective_t.

    Args:
        verb: The collective.
        op: The reduction.
        config: The Config of the call.
        segments: Offset, number of elements and Config of each segment.
        **fields: Other fields of the struct. By default, calls of one name match in program order.
    """
    native = (structs.Segment * len(segments))()
    configs = []
    for to, (offset, numel, own) in zip(native, segments, strict=True):
        to.offset, to.numel = offset, numel
        to.bits, to.bucket_size = own.bits, own.bucket_size
        if own is not config:
            configs.append(own.native)
            to.config = addressof(configs[-1])
    made = structs.Collective(
        verb=tables.VERBS[verb]["id"],
        op=tables.OPS[op],
        config=config.native,
        segments=native,
        num_segments=len(native),
        **{"occurrence": -1, **fields},
    )
    made.configs = configs  # the segments point to them
    return made


# Filling the struct takes longer than a small allreduce.
_known_pattern = functools.lru_cache(maxsize=1024)(_pattern)
