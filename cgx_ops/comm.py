"""Communicator: ranks that reduce numpy arrays together, over any transport of libcgx.

Order of parts: what a caller describes (Segment), what a started collective is (Request), the
Communicator, and how a call becomes a cgx_collective_t.
"""

import contextlib
import ctypes
import hashlib
import itertools
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_int32, c_void_p
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from cgx_ops import _native
from cgx_ops._arrays import Array, as_input, as_output, dtype_code
from cgx_ops.config import Config
from cgx_ops.errors import CgxError, InvalidArgument, NotFound

Op = Literal["sum", "avg", "min", "max", "product"]
Allgather = Callable[[bytes], Sequence[bytes]]


@dataclass(frozen=True)
class Segment:
    """A run of elements with its own compression: one tensor of a fused message.

    Attributes:
        offset: its first element, counted from the start of the array (or of a rank's block).
        numel: how many elements.
        bits: as Config.bits; None: the call's Config decides.
        bucket_size: as Config.bucket_size; None: the call's Config decides.
    """

    offset: int
    numel: int
    bits: int | None = None
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("offset", "numel"):
            value = operator.index(getattr(self, name))
            if not 0 <= value < 2**63:
                raise InvalidArgument(f"Segment.{name} is {value}; it must be an integer >= 0")


class Request:
    """A started collective. It keeps the arrays alive until the collective ends.

    Call wait(). A request that is dropped instead still completes: libcgx reads and writes the
    arrays meanwhile, so they are kept until then.
    """

    def __init__(self, handle: c_void_p, result: Array, buffers: tuple[Array, ...]) -> None:
        self._handle: c_void_p | None = handle
        self._result, self._buffers = result, buffers
        self._error: CgxError | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether wait() would return (or raise) at once."""
        with self._lock:
            if self._handle is None:
                return True
            finished = c_int32()
            _native.call("cgx_test", self._handle, byref(finished))
            return bool(finished.value)

    def wait(self) -> Array:
        """Block until the collective ends and return its result; its deadline bounds this.

        Raises:
            CgxError: what went wrong, again on each call. The result is then undefined.
        """
        with self._lock:
            if self._handle is not None:
                handle, self._handle = self._handle, None
                try:
                    _native.call("cgx_wait", handle)
                except CgxError as error:
                    self._error = error
                self._buffers = ()
        if self._error is not None:
            raise self._error
        return self._result

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            _abandoned.append((self._handle, self._result, self._buffers))


# Requests nobody waited for, until they end: collected by the next start.
_abandoned: list[tuple[c_void_p | None, Array, tuple[Array, ...]]] = []


def _collect_abandoned() -> None:
    for _ in range(len(_abandoned)):
        handle, result, buffers = _abandoned.pop()
        finished = c_int32()
        with contextlib.suppress(CgxError):
            _native.call("cgx_test", handle, byref(finished))
            if finished.value:
                _native.call("cgx_wait", handle)
        if not finished.value:
            _abandoned.insert(0, (handle, result, buffers))


# Calls so far, per communicator and name. Threads that start named collectives in any order, and
# several Communicator objects of one id, so draw the same noise in every run.
_calls: defaultdict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)
_local_names = itertools.count()


def call_seed(seed: int, name: str, occurrence: int) -> int:
    """Return the seed of one call's noise: the n-th of this name, from 0, under Config.seed."""
    digest = hashlib.blake2b(f"{seed}/{occurrence}/{name}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


class Communicator:
    """Ranks that can reduce together, as a small integer id in libcgx's registry.

    Made by cgx_ops.init(), local(), create(), split(), group() and find(). Collectives must be
    called on every rank with equal arguments (seed, out and timeout apart). Calls without a name
    match in program order; threads that start collectives on one communicator must name them.

    Every collective takes arrays of dtype float32, float16 or bfloat16 and of any shape; those
    that are not contiguous are copied. `out` must be C-contiguous, of the result's shape and dtype.
    It raises Unsupported (a TypeError) for other dtypes, InvalidArgument (a ValueError) for values
    out of range, MismatchError if ranks disagree, DeadlineExceeded (a TimeoutError) and PeerFailed
    (a ConnectionError) if a peer is late or dead, which closes the communicator, and then Closed.

    Attributes:
        id: what bindings and libcgx know it by; equal to no other communicator's of this process.
        name: equal on all ranks, but for those of local().
        rank: of this process (or thread), from 0.
        size: number of ranks.
    """

    def __init__(self, id: int) -> None:  # noqa: A002  (the attribute's name)
        self.id = id
        info = self._info()
        self.name, self.rank, self.size = _native.text(info.name), info.rank, info.size

    # ---- How communicators are made --------------------------------------------------------------

    @classmethod
    def local(
        cls, size: int, name: str | None = None, *, timeout: float | None = None
    ) -> list[Self]:
        """Return `size` ranks inside this process, for as many threads.

        Args:
            size: number of ranks.
            name: rank i is named "<name>/<i>". By default a new name.
            timeout: seconds that a collective may take; None: CGX_TIMEOUT, else 300.
        """
        if not 1 <= size < 2**31:
            raise InvalidArgument(f"size is {size}; it must be an integer >= 1")
        name = f"local-{next(_local_names)}" if name is None else name
        ids = (c_int32 * size)()
        _native.call("cgx_comm_create_local", size, _encode(name), timeout or 0.0, ids)
        return [cls(comm) for comm in ids]

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        allgather: Allgather,
        name: str,
        *,
        transport: str | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Return a communicator of processes that can already exchange small messages.

        Args:
            rank: of this process, from 0.
            size: number of ranks.
            allgather: gives one rank's bytes to all and returns those of all ranks, in rank order;
                called a few times, with equally many bytes on all ranks, during this call only.
            name: equal on all ranks, unique among this process's communicators.
            transport: "AUTO", "SHM" or "MPI"; None: COMMUNICATOR_TYPE, else AUTO.
            timeout: seconds that a collective may take; None: CGX_TIMEOUT, else 300.

        Raises:
            Whatever allgather raises, and CgxError.
        """
        failures: list[BaseException] = []

        def gather(_context: object, mine: int, count: int, everything: int) -> int:
            try:
                blobs = allgather(ctypes.string_at(mine, count) if count else b"")
                if len(blobs) != size or any(len(blob) != count for blob in blobs):
                    raise InvalidArgument(
                        f"allgather must return {size} blobs of {count} bytes; it returned those "
                        f"of {[len(blob) for blob in blobs]} bytes"
                    )
                ctypes.memmove(everything, b"".join(blobs), size * count)
            except BaseException as error:  # it must not unwind through C; raised again below
                failures.append(error)
                return 1
            return 0

        bootstrap = _native.Bootstrap(
            rank=rank,
            size=size,
            allgather=_native.ALLGATHER(gather),
            name=_encode(name),
            transport=None if transport is None else _encode(transport),
            timeout_s=timeout or 0.0,
        )
        try:
            return cls(_native.call_for_id("cgx_comm_create", byref(bootstrap)))
        except CgxError:
            if failures:
                raise failures[0] from None
            raise

    @classmethod
    def find(cls, name: str) -> Self:
        """Return this process's communicator of that name.

        Raises:
            NotFound: there is none.
        """
        return cls(_native.call_for_id("cgx_comm_find", _encode(name)))

    def split(self, color: int | None, key: int = 0, *, name: str) -> Self | None:
        """Divide the ranks by color; ranks of equal color form a communicator.

        Collective over this communicator.

        Args:
            color: None or a negative number: this rank joins none, and gets None.
            key: orders the ranks of the new communicator; equal keys keep their order.
            name: of the new communicators, equal on all ranks of this one; it matches the call.
        """
        color = -1 if color is None else color
        new = _native.call_for_id("cgx_comm_split", self.id, color, key, _encode(name))
        return None if new < 0 else type(self)(new)

    def group(self, ranks: Sequence[int], *, name: str) -> Self:
        """Return a communicator of the listed ranks, ranks[i] becoming rank i.

        Collective over the listed ranks only.
        """
        listed = (c_int32 * len(ranks))(*ranks)
        return type(self)(
            _native.call_for_id("cgx_comm_group", self.id, listed, len(ranks), _encode(name))
        )

    # ---- What it is ------------------------------------------------------------------------------

    def _info(self) -> _native.CommInfo:
        info = _native.CommInfo()
        _native.call("cgx_comm_info", self.id, byref(info))
        return info

    @property
    def transport(self) -> str:
        """How bytes move: "self", "thread", "shm" or "mpi"."""
        return _native.text(self._info().transport)

    @property
    def closed(self) -> bool:
        """Whether a failure or close() ended it."""
        try:
            return bool(self._info().closed)
        except NotFound:
            return True

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank handed to its peers since creation, headers included."""
        return self._info().bytes_sent

    @property
    def collectives(self) -> int:
        """Collectives that ended well since creation."""
        return self._info().collectives

    def __repr__(self) -> str:
        return f"Communicator(id={self.id}, name={self.name!r}, rank={self.rank}, size={self.size})"

    # ---- Collectives -----------------------------------------------------------------------------

    def allreduce(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Reduce the ranks' arrays elementwise; every rank gets the same bits.

        Args:
            array: any shape.
            op: "sum" or "avg"; with 32 bits also "min", "max" and "product".
            config: None: Config.from_env(), which is exact unless CGX_* variables say otherwise.
            out: receives the result; may be the input itself.
            name: matches this call with those of other ranks, whatever runs in between.
            segments: runs of elements with their own bits and bucket_size; None: one, of all. What
                lies in no segment is not reduced: `out` keeps it, a new result has zeros there.
            seed: of this call's noise; None: derived from config.seed and the calls so far.
            timeout: seconds this call may take; None: the communicator's.

        Returns:
            `out`, or a new array of the input's shape and dtype.
        """
        source = as_input(array)
        call = _Call("allreduce", op, config, name, segments, seed, timeout)
        return self._run(call, source, source.shape, source.size, out)

    def allreduce_async(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Request:
        """Start what allreduce() does and return at once. Leave the arrays alone until wait()."""
        source = as_input(array)
        call = _Call("allreduce", op, config, name, segments, seed, timeout)
        collective, result = self._prepare(call, source, source.shape, source.size, out)
        _collect_abandoned()
        handle = c_void_p()
        _native.call("cgx_start", byref(collective), None, None, byref(handle))
        return Request(handle, result, (source,))

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Reduce the ranks' arrays; rank i gets the i-th of `size` equal blocks of the first axis.

        Arguments are those of allreduce(), but `out` may not overlap the input, and segments lie in
        a block: each describes its place in every block.

        Returns:
            An array of shape (array.shape[0] / size, *array.shape[1:]).
        """
        source = as_input(array)
        if source.ndim == 0 or source.shape[0] % self.size:
            raise InvalidArgument(
                f"reduce_scatter over {self.size} ranks needs a first axis that they divide; the "
                f"array's shape is {source.shape}: pad it"
            )
        shape = (source.shape[0] // self.size, *source.shape[1:])
        call = _Call("reduce_scatter", op, config, name, segments, seed, timeout)
        return self._run(call, source, shape, source.size // self.size, out)

    def all_gather(
        self,
        array: npt.ArrayLike,
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Concatenate the ranks' arrays along the first axis, in rank order, on every rank.

        Arguments are those of allreduce(), but `out` may not overlap the input.

        Returns:
            An array of shape (size * array.shape[0], *array.shape[1:]); (size,) for a scalar.
        """
        source = as_input(array)
        shape = (self.size * (source.shape[0] if source.ndim else 1), *source.shape[1:])
        call = _Call("all_gather", "sum", config, name, segments, seed, timeout)
        return self._run(call, source, shape, source.size, out)

    def _run(
        self, call: "_Call", source: Array, shape: tuple[int, ...], block: int, out: Array | None
    ) -> Array:
        collective, result = self._prepare(call, source, shape, block, out)
        _native.call("cgx_run", byref(collective))
        return result

    def _prepare(
        self, call: "_Call", source: Array, shape: tuple[int, ...], block: int, out: Array | None
    ) -> tuple[_native.Collective, Array]:
        """Return `call` on a contiguous source, with `block` elements a rank, and its result."""
        result = as_output(out, shape, source.dtype)
        in_place = call.verb == "allreduce" and result.ctypes.data == source.ctypes.data
        if not in_place and np.may_share_memory(result, source):
            raise InvalidArgument(
                f"out overlaps the input of {call.verb}: "
                "only allreduce may write to its input, and to all of it"
            )
        if out is None and call.segments is not None:
            result.fill(0)
        segments = call.native_segments(block)
        count = next(_calls[self.id, call.name])
        config = call.config
        collective = _native.Collective(
            comm=self.id,
            verb=_native.VERBS[call.verb],
            dtype=dtype_code(source.dtype),
            op=_native.OPS[call.op],
            algorithm=_native.ALGORITHMS[config.algorithm],
            rounding=_native.ROUNDINGS[config.rounding],
            gather_bits=config.gather_bits or 0,
            skip_incomplete_buckets=config.skip_incomplete_buckets,
            minimal_size=config.minimal_size,
            seed=call_seed(config.seed, call.name, count) if call.seed is None else call.seed,
            input=source.ctypes.data,
            output=result.ctypes.data,
            block_numel=block,
            segments=segments,
            num_segments=len(segments),
            name=_encode(call.name),
            occurrence=-1,
            timeout_s=call.timeout or 0.0,
        )
        return collective, result

    # ---- The end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Let peers read what was sent to them (bounded in time), then free it. Not collective."""
        with contextlib.suppress(NotFound):  # closed before
            _native.call("cgx_comm_close", self.id)
        for key in [key for key in list(_calls) if key[0] == self.id]:
            _calls.pop(key, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Call:
    """The arguments of one collective, checked."""

    def __init__(
        self,
        verb: str,
        op: str,
        config: Config | None,
        name: str,
        segments: Sequence[Segment] | None,
        seed: int | None,
        timeout: float | None,
    ) -> None:
        if op not in _native.OPS:
            raise InvalidArgument(f"op is {op!r}; it must be one of {', '.join(_native.OPS)}")
        if timeout is not None and not timeout > 0:
            raise InvalidArgument(f"timeout is {timeout!r}; it must be seconds > 0, or None")
        self.verb, self.op, self.name, self.segments = verb, op, name, segments
        self.config = Config.from_env() if config is None else config
        self.timeout = timeout
        self.seed = None if seed is None else replace(self.config, seed=seed).seed

    def native_segments(self, block: int) -> ctypes.Array[_native.Segment]:
        """Return the segments as an array of cgx_segment_t."""
        given = [Segment(0, block)] if self.segments is None else self.segments
        result = (_native.Segment * len(given))()
        for native, segment in zip(result, given, strict=True):
            own = self.config
            if segment.bits is not None:
                own = replace(own, bits=segment.bits)
            if segment.bucket_size is not None:
                own = replace(own, bucket_size=segment.bucket_size)
            native.offset, native.numel = segment.offset, segment.numel
            native.bits, native.bucket_size = own.bits, own.bucket_size
        return result


def _encode(text: str) -> bytes:
    """Return text as bytes for C, which would end it at a NUL."""
    if "\0" in text:
        raise InvalidArgument(f"{text!r} holds a NUL character; a name must not")
    return text.encode()
