"""Communicator: ranks that reduce numpy arrays together, over any transport of libcgx."""

import contextlib
import itertools
from collections.abc import Sequence
from ctypes import byref, c_int32
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from cgx_ops import _numpy_ops
from cgx_ops._core import bootstrap, library, request, structs, verdicts
from cgx_ops._core.arrays import Array, as_input
from cgx_ops._core.call import Call, Counter, Op, Repeat, Segment, check_timeout
from cgx_ops._core.consistency import Gather
from cgx_ops._core.request import Request
from cgx_ops.config import Config, Keywords, config_of
from cgx_ops.errors import Closed, InvalidArgument, require_integer
from cgx_ops.stats import Stats, read_stats

_local_names = itertools.count()
_MOST_REPEATS = 1024
# By communicator: several Communicator objects may have one id.
_calls: dict[int, Counter] = {}


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
        host: which host this rank is on; they are numbered in the order of their first ranks.
        hosts: number of hosts; fewer than ranks if some share one.
    """

    def __init__(self, id: int) -> None:  # noqa: A002  (the attribute's name)
        self.id = id
        self._repeats: dict[tuple[Any, ...], Repeat] = {}
        info = self._info()
        self.name, self.rank, self.size = library.text(info.name), info.rank, info.size
        self.host, self.hosts = info.host, info.hosts

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
        check_timeout(timeout)
        name = f"local-{next(_local_names)}" if name is None else name
        ids = (c_int32 * size)()
        library.call("cgx_comm_create_local", size, library.encode(name), timeout or 0.0, ids)
        return [cls(comm) for comm in ids]

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        allgather: Gather,
        name: str,
        *,
        transport: str | None = None,
        timeout: float | None = None,
        noise_rank: int | None = None,
    ) -> Self:
        """Return a communicator of processes that can already exchange small messages.

        Args:
            rank: of this process, from 0.
            size: number of ranks.
            allgather: gives one rank's bytes to all and returns those of all ranks, in rank order;
                called a few times, with equally many bytes on all ranks, during this call only.
            name: equal on all ranks, unique among this process's communicators.
            transport: "AUTO", "SHM", "MPI", "TCP" or "NCCL" (between GPUs; else as AUTO); None:
                COMMUNICATOR_TYPE, else AUTO.
            timeout: seconds that a collective may take; None: CGX_TIMEOUT, else 300.
            noise_rank: this rank's number where noise is drawn, >= 0; None: `rank`. Several groups
                of one job draw different noise, whatever their seeds, if each rank has its number
                in the whole job. Those that split() and group() make keep them.

        Raises:
            Whatever allgather raises, and CgxError.
        """
        return cls(bootstrap.create(rank, size, allgather, name, transport, timeout, noise_rank))

    @classmethod
    def find(cls, name: str) -> Self:
        """Return this process's communicator of that name.

        Raises:
            NotFound: there is none.
        """
        return cls(library.call_for_id("cgx_comm_find", library.encode(name)))

    def split(self, color: int | None, key: int = 0, *, name: str) -> Self | None:
        """Divide the ranks by color; ranks of equal color form a communicator.

        Collective over this communicator.

        Args:
            color: None or a negative number: this rank joins none, and gets None.
            key: orders the ranks of the new communicator; equal keys keep their order.
            name: of the new communicators, equal on all ranks of this one; it matches the call.
        """
        least, most = -(2**31), 2**31 - 1
        color = -1 if color is None else require_integer("color", color, least, most)
        key = require_integer("key", key, least, most)
        new = library.call_for_id("cgx_comm_split", self.id, color, key, library.encode(name))
        return None if new < 0 else type(self)(new)

    def group(self, ranks: Sequence[int], *, name: str) -> Self:
        """Return a communicator of the listed ranks, ranks[i] becoming rank i.

        Collective over the listed ranks only.
        """
        last = self.size - 1
        given = [require_integer(f"ranks[{i}]", rank, 0, last) for i, rank in enumerate(ranks)]
        listed = (c_int32 * len(given))(*given)
        return type(self)(
            library.call_for_id("cgx_comm_group", self.id, listed, len(given), library.encode(name))
        )

    # ---- What it is ------------------------------------------------------------------------------

    def _info(self) -> structs.CommInfo:
        info = structs.CommInfo()
        library.call("cgx_comm_info", self.id, byref(info))
        return info

    @property
    def transport(self) -> str:
        """How bytes move: "self", "thread", "shm", "mpi", "tcp", "hybrid" or "hybrid_tcp"."""
        return library.text(self._info().transport)

    @property
    def wire(self) -> str:
        """How its ranks' GPUs are connected: "direct", "mpi", "staged" or "nccl"; "" before."""
        return library.text(self._info().wire)

    @property
    def closed(self) -> bool:
        """Whether a failure or close() ended it."""
        try:
            return bool(self._info().closed)
        except Closed:
            return True

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank handed to its peers since creation, headers included."""
        return self._info().bytes_sent

    @property
    def collectives(self) -> int:
        """Collectives that ended well since creation."""
        return self._info().collectives

    def stats(self) -> Stats:
        """Return what this rank has done here since creation: counts, bytes, time per phase.

        Raises:
            Closed: close() was called; one that a failure ended still tells.
        """
        return read_stats(self.id)

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
        seed: int | Sequence[int] | None = None,
        timeout: float | None = None,
        residual: Array | None = None,
        **keywords: Unpack[Keywords],
    ) -> Array:
        """Reduce the ranks' arrays elementwise; every rank gets the same bits.

        Args:
            array: any shape.
            op: "sum" or "avg"; with 32 bits also "min", "max" and "product".
            config: how values travel; None: Config().
            out: receives the result; may be the input itself.
            name: matches this call with those of other ranks, whatever runs in between.
            segments: runs of elements with their own bits and bucket_size; None: one, of all. What
                lies in no segment is not reduced: `out` keeps it, a new result has zeros there.
            seed: of this call's noise, from which those of segments and of a reduce_scatter's
                blocks follow; or a list with one for each segment. None: derived from the
                communicator's name and the calls of this name so far.
            timeout: seconds this call may take; None: the communicator's.
            residual: error feedback, of sums and averages: C-contiguous, of the input's shape and
                dtype, read and written in place. It is added (in float32) to the input, and
                becomes what compression has lost of that on this rank, to be given to the next
                call: over all ranks, inputs and old residuals are the result (as a sum) and new
                residuals, up to rounding to float32 and the dtype. Begin with zeros. Undefined
                after an error. Refused where config says that the call is exact.
            **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

        Returns:
            `out`, or a new array of the input's shape and dtype.
        """
        if keywords or type(config) is not Config:
            config = config_of(config, **keywords)
        if (
            type(array) is np.ndarray
            and type(out) is np.ndarray
            and segments is seed is residual is None
        ):
            form = op, id(config), name, timeout, array.dtype, array.shape, out.dtype, out.shape
            repeat = self._repeats.get(form)
            if repeat is not None and repeat.run(array, out):
                return out
        source = as_input(array)
        call = Call("allreduce", op, config, name, segments, seed, timeout)
        return self._run(call, source, source.shape, source.size, out, residual)

    def allreduce_async(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = None,
        residual: Array | None = None,
        **keywords: Unpack[Keywords],
    ) -> Request:
        """Start what allreduce() does and return at once. Leave the arrays alone until wait()."""
        source, config = as_input(array), config_of(config, **keywords)
        call = Call("allreduce", op, config, name, segments, seed, timeout)
        prepared = call.prepare(*self._place(), source, source.shape, source.size, out, residual)
        return request.start(*prepared)

    def reduce_scatter(
        self,
        array: npt.ArrayLike,
        op: Op = "sum",
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = None,
        residual: Array | None = None,
        **keywords: Unpack[Keywords],
    ) -> Array:
        """Reduce the ranks' arrays; rank i gets the i-th of `size` equal blocks of the first axis.

        Arguments are those of allreduce(), but `out` may not overlap the input, and segments lie in
        a block: each describes its place in every block. A residual is of the input's shape.

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
        config = config_of(config, **keywords)
        call = Call("reduce_scatter", op, config, name, segments, seed, timeout)
        return self._run(call, source, shape, source.size // self.size, out, residual)

    def all_gather(
        self,
        array: npt.ArrayLike,
        config: Config | None = None,
        *,
        out: Array | None = None,
        name: str = "",
        segments: Sequence[Segment] | None = None,
        seed: int | Sequence[int] | None = None,
        timeout: float | None = None,
        **keywords: Unpack[Keywords],
    ) -> Array:
        """Concatenate the ranks' arrays along the first axis, in rank order, on every rank.

        Arguments are those of allreduce(), but `out` may not overlap the input.

        Returns:
            An array of shape (size * array.shape[0], *array.shape[1:]); (size,) for a scalar.
        """
        source = as_input(array)
        shape = (self.size * (source.shape[0] if source.ndim else 1), *source.shape[1:])
        config = config_of(config, **keywords)
        call = Call("all_gather", "sum", config, name, segments, seed, timeout)
        return self._run(call, source, shape, source.size, out)

    def _run(
        self,
        call: Call,
        source: Array,
        shape: tuple[int, ...],
        block: int,
        out: Array | None,
        residual: Array | None = None,
    ) -> Array:
        prepared = call.prepare(*self._place(), source, shape, block, out, residual)
        if call.repeatable and call.verb == "allreduce" and residual is None:
            if len(self._repeats) >= _MOST_REPEATS:
                self._repeats.clear()
            collective, result, *_ = prepared
            arrays = source.dtype, source.shape, result.dtype, result.shape
            form = call.op, id(call.config), call.name, call.timeout, *arrays
            pattern = collective.pattern
            self._repeats[form] = Repeat(call, pattern, self._counter(), self.name)
        return request.run(*prepared)

    def next_call(self, name: str) -> int:
        """Count a call of this name: how many this process made before. Seeds derive from it."""
        return self._counter().next(name)

    def _counter(self) -> Counter:
        counter = _calls.get(self.id)
        if counter is None:  # two threads may be here: both get the one that is kept
            counter = _calls.setdefault(self.id, Counter())
        return counter

    def _place(self) -> tuple[int, str, Counter]:
        """Return what Call.prepare() asks of a communicator."""
        return self.id, self.name, self._counter()

    # ---- The end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Let peers read what was sent to them (bounded in time), then free it. Not collective."""
        with contextlib.suppress(Closed):  # before
            library.call("cgx_comm_close", self.id)
        _numpy_ops.collect_dropped()  # they hold what the communicator has
        _calls.pop(self.id, None)
        verdicts.forget(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
