"""Communicator: a group of ranks that run collectives on numpy arrays."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int32
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from cgx_ops import _numpy_ops
from cgx_ops._core import bootstrap, library, request, structs, verdicts
from cgx_ops._core.arrays import Array, as_input
from cgx_ops._core.call import Call, Counter, Op, Repeat, Segment, check_timeout
from cgx_ops._core.consistency import Gather
from cgx_ops._core.refusal import or_refuse
from cgx_ops._core.request import Request
from cgx_ops._core.splits import splits_of
from cgx_ops.config import Config, Keywords, config_of
from cgx_ops.errors import Closed, InvalidArgument, require_integer
from cgx_ops.stats import Stats, read_stats

_local_names = itertools.count()
_MOST_REPEATS = 1024
# By communicator: several Communicator objects may have one id.
_calls: dict[int, Counter] = {}


def forget_calls(communicator: int) -> None:
    """Free what this process stores for a communicator with this id, which has ended."""
    _calls.pop(communicator, None)
    verdicts.forget(communicator)


class Communicator:
    """A group of ranks that run collectives together.

    init(), local(), create(), split(), group() and find() return communicators. All ranks must call
    each collective with equal arguments, except arrays, sizes of blocks, `seed` and `timeout`.
    Calls without a name match in program order, so threads that share a communicator must name
    their calls.

    Collectives accept float32, float16 and bfloat16 arrays of any shape; arrays that are not
    contiguous are copied. `out` must be C-contiguous, with the shape and dtype of the result.

    Args:
        id: The number of an existing communicator in libcgx.

    Attributes:
        id: The number of this communicator in libcgx, unique within the process.
        name: The name, equal on all ranks (except for those of local()).
        rank: The rank of this process or thread, from 0.
        size: The number of ranks.
        host: The index of this rank's host. Hosts are numbered in the order of their first ranks.
        hosts: The number of hosts. It is smaller than `size` if ranks share a host.

    Raises:
        InvalidArgument: A value is out of range (a ValueError).
        Unsupported: The dtype, operation or layout is not supported (a TypeError).
        MismatchError: The arguments of the ranks differ.
        DeadlineExceeded: A rank is late (a TimeoutError). The communicator is closed.
        PeerFailed: A rank has failed (a ConnectionError). The communicator is closed.
        Closed: The communicator was closed before the call.

    Example:
        Two ranks as threads of one process:

        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import numpy as np
        >>> from cgx_ops import Communicator
        >>> def total(comm: Communicator) -> float:
        ...     ones = np.ones(1000, np.float32)
        ...     return float(comm.allreduce(ones, bits=4)[0])
        >>> ranks = Communicator.local(2)
        >>> with ThreadPoolExecutor() as threads:
        ...     print(list(threads.map(total, ranks)))
        [2.0, 2.0]
        >>> for comm in ranks:
        ...     comm.close()
    """

    def __init__(self, id: int) -> None:  # noqa: A002  (the attribute's name)
        self.id = id
        self._repeats: dict[tuple[Any, ...], Repeat] = {}
        info = self._info()
        self.name, self.rank, self.size = library.text(info.name), info.rank, info.size
        self.host, self.hosts = info.host, info.hosts

    # ---- Creation --------------------------------------------------------------------------------

    @classmethod
    def local(
        cls, size: int, name: str | None = None, *, timeout: float | None = None
    ) -> list[Self]:
        """Return `size` ranks inside this process, one for each of as many threads.

        Args:
            size: Number of ranks.
            name: Rank i is named "<name>/<i>". None: a new name.
            timeout: Seconds that a collective may take. None: CGX_TIMEOUT, else 300.

        Raises:
            InvalidArgument: `size` is not an integer >= 1, the name is in use, or `timeout` is not
                positive.
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
        elastic: bool = False,
        connect_timeout: float | None = None,
    ) -> Self:
        """Return a communicator of processes that can already exchange small messages.

        All ranks must call it. Use it to connect ranks that no launcher described to init(), or the
        survivors of a lost process: abort() the old communicator and create another one.

        Args:
            rank: Rank of this process, from 0.
            size: Number of ranks.
            allgather: Function that sends one rank's bytes to all ranks and returns the bytes of
                all, in rank order. It is called a few times during this call, each time with
                equally many bytes on all ranks.
            name: Name of the communicator: equal on all ranks, unique in this process.
            transport: "AUTO", "SHM", "MPI", "TCP" or "NCCL" (between GPUs, otherwise like AUTO).
                None: COMMUNICATOR_TYPE, else AUTO.
            timeout: Seconds that a collective may take. None: CGX_TIMEOUT, else 300.
            noise_rank: The number, >= 0, from which this rank's rounding noise derives. None:
                `rank`. Pass each rank's number in the whole job if the job has several groups: then
                their noise differs. split() and group() keep it.
            elastic: Use only transports that can connect the survivors of a lost process: shared
                memory and TCP, not MPI. Equal on all ranks. split() and group() keep it.
            connect_timeout: Seconds that connecting the ranks may take. None: `timeout`.

        Raises:
            CgxError: The ranks cannot be connected. Exceptions of `allgather` pass through.
        """
        return cls(
            bootstrap.create(
                rank,
                size,
                allgather,
                name,
                transport,
                timeout,
                noise_rank,
                elastic,
                connect_timeout,
            )
        )

    @classmethod
    def find(cls, name: str) -> Self:
        """Return the communicator of this process with this name.

        Args:
            name: The name, such as "world".

        Raises:
            NotFound: No communicator has this name.
        """
        return cls(library.call_for_id("cgx_comm_find", library.encode(name)))

    def split(self, color: int | None, key: int = 0, *, name: str) -> Self | None:
        """Divide the ranks by color: ranks with the same color form a new communicator.

        All ranks of this communicator must call it.

        Args:
            color: The group of this rank. None or a negative number: this rank joins no group.
            key: Orders the ranks of the new communicator. Ranks with equal keys keep their order.
            name: Name of the new communicators, equal on all ranks of this one.

        Returns:
            The communicator of this rank's group; None if it joins none.

        Raises:
            InvalidArgument: `color` or `key` is not a 32-bit integer.
            CgxError: See Communicator.
        """
        least, most = -(2**31), 2**31 - 1
        color = -1 if color is None else require_integer("color", color, least, most)
        key = require_integer("key", key, least, most)
        new = library.call_for_id("cgx_comm_split", self.id, color, key, library.encode(name))
        return None if new < 0 else type(self)(new)

    def group(self, ranks: Sequence[int], *, name: str) -> Self:
        """Return a communicator of the listed ranks; ranks[i] becomes rank i.

        Only the listed ranks must call it.

        Args:
            ranks: Ranks of this communicator.
            name: Name of the new communicator, equal on all listed ranks.

        Raises:
            InvalidArgument: A rank does not exist, is listed twice, or is not this one.
            CgxError: See Communicator.
        """
        last = self.size - 1
        given = [require_integer(f"ranks[{i}]", rank, 0, last) for i, rank in enumerate(ranks)]
        listed = (c_int32 * len(given))(*given)
        return type(self)(
            library.call_for_id("cgx_comm_group", self.id, listed, len(given), library.encode(name))
        )

    # ---- Properties ------------------------------------------------------------------------------

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
        """How the ranks' GPUs are connected: "direct", "mpi", "staged" or "nccl".

        It is "" before the first collective on GPU memory.
        """
        return library.text(self._info().wire)

    @property
    def closed(self) -> bool:
        """Whether close() or a failure has closed it."""
        try:
            return bool(self._info().closed)
        except Closed:
            return True

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to its peers since creation, including headers."""
        return self._info().bytes_sent

    @property
    def collectives(self) -> int:
        """Number of collectives that ended without an error since creation."""
        return self._info().collectives

    def stats(self) -> Stats:
        """Return the statistics of this rank since creation: counts, bytes, and time per phase.

        Raises:
            Closed: close() was called. After a failure the statistics are still available.
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
        """Reduce the ranks' arrays elementwise; all ranks get the same bits.

        Args:
            array: The input, of any shape.
            op: "sum" or "avg"; exact values (32 bits, "lossless") also "min", "max" and "product".
            config: The compression; None: `Config()`.
            out: Array for the result; it may be the input itself.
            name: Matches this call with the same call of other ranks.
            segments: Runs of elements, each with its own compression, such as the tensors of a
                fused message. None: one segment with all elements. Elements outside all segments
                are not reduced: `out` keeps its values there, a new array has zeros.
            seed: Seed of this call's rounding noise, or a list with one seed per segment. None:
                derived from the communicator's name and the number of calls of this name.
            timeout: Seconds that this call may take; None: the communicator's.
            residual: Array for error feedback, of sums and averages: C-contiguous, of the input's
                shape and dtype. The call adds it (in float32) to the input, and sets it to the
                quantization error of this rank, for the next call. Start with zeros. Over all
                ranks, inputs plus old residuals equal the sum plus new residuals, up to rounding to
                the dtype. Its values are undefined after an error.
            **keywords: `bits`, `bucket_size`, `compressor` and `rounding`, which replace those
                fields of `config`.

        Returns:
            `out`, or a new array of the input's shape and dtype.

        Raises:
            InvalidArgument: A value is out of range, arrays overlap, or the call is exact and has a
                residual.
            CgxError: See Communicator.
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
        """Start allreduce() and return immediately. Do not touch the arrays until wait() returns.

        Args:
            array: See allreduce().
            op: See allreduce().
            config: See allreduce().
            out: See allreduce().
            name: See allreduce().
            segments: See allreduce().
            seed: See allreduce().
            timeout: See allreduce().
            residual: See allreduce().
            **keywords: See allreduce().

        Returns:
            A Request; its wait() returns the result.

        Raises:
            CgxError: See allreduce(). Request.wait() raises the errors of the collective itself.
        """
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

        Args:
            array: The input. `size` must divide its first axis.
            op: See allreduce().
            config: See allreduce().
            out: Array for the result; it must not overlap the input.
            name: See allreduce().
            segments: Segments of a block; they apply to every block.
            seed: See allreduce().
            timeout: See allreduce().
            residual: Array for error feedback, of the input's shape; see allreduce().
            **keywords: See allreduce().

        Returns:
            `out`, or a new array of shape `(array.shape[0] / size, *array.shape[1:])`.

        Raises:
            InvalidArgument: `size` does not divide the first axis; see also allreduce().
            CgxError: See Communicator.
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
        """Concatenate the ranks' arrays along the first axis, in rank order, on all ranks.

        Args:
            array: The input, of any shape.
            config: See allreduce().
            out: Array for the result; it must not overlap the input.
            name: See allreduce().
            segments: See allreduce().
            seed: See allreduce().
            timeout: See allreduce().
            **keywords: See allreduce().

        Returns:
            `out`, or a new array of shape `(size * array.shape[0], *array.shape[1:])`; `(size,)`
            for a scalar.

        Raises:
            InvalidArgument: See allreduce().
            CgxError: See Communicator.
        """
        source = as_input(array)
        shape = (self.size * (source.shape[0] if source.ndim else 1), *source.shape[1:])
        config = config_of(config, **keywords)
        call = Call("all_gather", "sum", config, name, segments, seed, timeout)
        return self._run(call, source, shape, source.size, out)

    def all_to_all(
        self,
        array: npt.ArrayLike,
        config: Config | None = None,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        out: Array | None = None,
        name: str = "",
        seed: int | None = None,
        timeout: float | None = None,
        **keywords: Unpack[Keywords],
    ) -> Array:
        """Send each rank a block of the array's rows, and concatenate the blocks from all ranks.

        Blocks are contiguous along the first axis, in rank order, as in
        torch.distributed.all_to_all_single. A rank's block for itself is copied exactly. Each block
        begins new buckets.

        Args:
            array: The input, with at least one axis.
            config: See allreduce(). `algorithm`, `gather_bits` and `intra_bits` have no effect.
            output_split_sizes: Rows of the block from each rank. None: equal blocks, of as many
                rows in all as `out` or, without it, the input. `size` must divide these rows.
            input_split_sizes: Rows of the block for each rank; they add up to the array's rows.
                None: equal blocks.
            out: Array for the result; it must not overlap the input.
            name: See allreduce().
            seed: See allreduce().
            timeout: See allreduce().
            **keywords: See allreduce().

        Returns:
            `out`, or a new array with the rows of all blocks.

        Raises:
            InvalidArgument: Sizes of blocks are negative, too few or too many, do not add up, or
                are not integers. The other ranks raise PeerFailed then, and the communicator stays
                open. See also allreduce().
            MismatchError: A rank sends a block of another size than its receiver expects.
            CgxError: See Communicator.
        """
        source, config = as_input(array), config_of(config, **keywords)
        call = Call("all_to_all", "sum", config, name, None, seed, timeout)
        with self._or_refuse(name):
            splits = splits_of(source, out, self.size, input_split_sizes, output_split_sizes)
            shape = (sum(splits.rows_out), *source.shape[1:])
            prepared = call.prepare(*self._place(), source, shape, 0, out, splits=splits)
        return request.run(*prepared)

    @contextlib.contextmanager
    def _or_refuse(self, name: str) -> Iterator[None]:
        """Refuse a call that fails before its start, and count it, as the other ranks do."""
        with or_refuse(self, name):
            try:
                yield
            except Exception:
                self.next_call(name)
                raise

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
        """Return how many calls of this name came before, and count one more.

        Seeds of rounding noise derive from this count.

        Args:
            name: The name of the call.
        """
        return self._counter().next(name)

    def _counter(self) -> Counter:
        counter = _calls.get(self.id)
        if counter is None:  # if two threads race, both get the same one
            counter = _calls.setdefault(self.id, Counter())
        return counter

    def _place(self) -> tuple[int, str, Counter]:
        """Return the communicator's arguments for Call.prepare()."""
        return self.id, self.name, self._counter()

    # ---- Close -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the communicator, after peers have read their messages or a short time has passed.

        Each rank closes its own; this is not a collective.
        """
        self._end("cgx_comm_close")

    def abort(self, reason: str) -> None:
        """Free the communicator, and end its collectives on all ranks with an error.

        Before survivors of a lost process make another communicator: peers that still wait in a
        collective of this one learn it immediately. Ranks that this rank has sent results to have a
        moment to receive them: the call takes at most about 1.5 seconds. On GPUs it first waits for
        this rank's collectives, which end at the latest at their deadlines.

        Args:
            reason: The text of the peers' errors.

        Example:
            >>> import cgx_ops
            >>> communicator = cgx_ops.Communicator.create(0, 1, lambda mine: [mine], "before")
            >>> communicator.abort("rank 2 is lost")
            >>> communicator.closed
            True
        """
        self._end("cgx_comm_abort", library.encode(reason))

    def _end(self, function: str, *arguments: object) -> None:
        with contextlib.suppress(Closed):  # it may be closed already
            library.call(function, self.id, *arguments)
        _numpy_ops.collect_dropped()  # dropped requests hold the communicator's memory
        forget_calls(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
