"""start(): any collective of the core on torch tensors, as an asynchronous Work.

start_apart() is an allreduce of tensors that lie anywhere, in one message. future_of() is for hooks
of DistributedDataParallel. refuse() says that a collective will not be started, or_refuse() if what
comes before it fails.

The DDP hook and FSDP's collectives stand on it. Compiled models use the operators of `ops.py`.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, byref, c_int32, c_void_p, pointer
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Segment, _torch_ops
from cgx_ops._core import at_exit, library, structs, tables
from cgx_ops._core.call import Call, Op, Verb
from cgx_ops.errors import KINDS, Closed, InvalidArgument, PeerFailed, Unsupported

# cgx_dtype_t
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_Arguments = ParamSpec("_Arguments")

# One for each segment, or None where it has none.
Residuals = Sequence[torch.Tensor | None]

_LAST_CALLBACKS_S = 5


def register() -> None:
    """Have callbacks of futures end before the interpreter does: none may be in Python then.

    Once per process.
    """
    at_exit.then(functools.partial(_drain, os.getpid()))


def _drain(process: int) -> None:
    if process == os.getpid():  # a forked child has none of the threads
        _torch_ops.drain(_LAST_CALLBACKS_S)


@functools.cache
def devices() -> tuple[str, ...]:
    """Return the types of device whose tensors the core takes: "cpu", and if built so "cuda"."""
    return ("cpu", "cuda") if library.describe()["cuda"]["built"] else ("cpu",)


def start(
    comm: Communicator,
    verb: Verb,
    input: torch.Tensor,  # noqa: A002  (torch's word)
    output: torch.Tensor,
    config: Config,
    *,
    op: Op = "sum",
    segments: Sequence[Segment] | None = None,
    seed: int | Sequence[int] | None = None,
    noise_rank: int | None = None,
    name: str = "",
    occurrence: int | None = None,
    timeout: float | None = None,
    asynchronous: bool = True,
    residuals: Residuals | None = None,
) -> dist.Work:
    """Start a collective and return at once; leave the tensors alone until it ends.

    CUDA tensors: it follows what is on the current stream now, on a stream of its own. wait() and
    the future's callbacks have the then-current stream wait, not the host. What fails later fills
    the output with NaN, and wait() or the next collective on `comm` raises it.

    Args:
        comm: the ranks; all of them call with equal arguments (tensors, seed and timeout apart).
        verb: "allreduce", "reduce_scatter" or "all_gather".
        input: contiguous, on the CPU or a CUDA device; float32, float16 or bfloat16.
        output: of the same dtype and device, contiguous. allreduce: as many elements as the input,
            perhaps the input itself. reduce_scatter: the input holds comm.size blocks of
            output.numel() elements. all_gather: the reverse.
        config: how values travel.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product". Not for all_gather.
        segments: runs of elements (of a block) with their own bits and bucket_size; None: one.
        seed: of this call's noise, or a list with one for each segment; None: derived from the
            communicator's name and the calls so far.
        noise_rank: this rank's number where noise is drawn; None: that of `comm`, its rank in the
            default group. Groups that give equal numbers, seeds and values get equal results.
        name: matches this call with those of other ranks, whatever runs in between.
        occurrence: this is the n-th call of its name, on all ranks alike: for threads that start
            calls of one name in any order. None: each rank's next one.
        timeout: seconds it may take; None: the communicator's.
        asynchronous: False puts the collective of CUDA tensors on the current stream, where nobody
            need wait for it. CPU tensors: no difference.
        residuals: error feedback, of sums and averages: contiguous, of the input's dtype and
            device, read and written in place until the end; a list with one for each segment, or
            None. allreduce: of as many elements. reduce_scatter: what of a tensor like the input is
            from the segment on: a residual lies there as its values do in the input.

    Returns:
        Its Work: wait() raises what it failed with; get_future() holds a list of the output, and
        its callbacks may block.

    Raises:
        Unsupported (a TypeError): dtype, device or layout. InvalidArgument (a ValueError): sizes
        or settings that do not fit. torch.distributed.DistBackendError: the communicator is closed.
    """
    for role, tensor in (("input", input), ("output", output)):
        if tensor.dtype not in DTYPES or tensor.dtype != input.dtype:
            raise Unsupported(
                f"{verb}: {role} is {tensor.dtype}; both must be float32, both float16 or both "
                "bfloat16"
            )
        if tensor.device.type not in devices() or tensor.layout != torch.strided:
            raise Unsupported(
                f"{verb}: {role} is {tensor.layout} on {tensor.device}; it must be a dense tensor "
                f"on {'the CPU or a GPU' if 'cuda' in devices() else 'the CPU'}"
            )
        if tensor.device != input.device:
            raise InvalidArgument(f"{verb}: input is on {input.device}, output on {output.device}")
        if not tensor.is_contiguous() or tensor.is_neg():
            raise InvalidArgument(
                f"{verb}: {role} is not contiguous, or a negative view; give {role}.clone()"
            )
    row = tables.VERBS[verb]
    block, rest = divmod(input.numel(), comm.size if row["blocks_in"] else 1)
    if rest or output.numel() != block * (comm.size if row["blocks_out"] else 1):
        raise InvalidArgument(
            f"{verb} over {comm.size} ranks: input has {input.numel()} elements, output "
            f"{output.numel()}"
        )
    call = Call(verb, op, config, name, segments, seed, timeout)
    to = output.data_ptr()  # first: it may move a lazy copy, the input too
    pointers = input.data_ptr(), to
    collective = call.collective(comm.id, DTYPES[input.dtype], *pointers, block)
    if noise_rank is not None:
        collective.noise_rank = pointer(c_int32(noise_rank))
    if occurrence is not None:
        collective.occurrence = occurrence
    held = set_residuals(collective, call, input, residuals)
    next_call = comm.next_call if occurrence is None else lambda _: occurrence
    call.draw_seed(collective, comm.name, next_call)
    return _torch_ops.start(addressof(collective), input, output, held, asynchronous)


def refuse(comm: Communicator, name: str, occurrence: int, reason: str) -> None:
    """Tell the other ranks, at once, that this one will not start a call; theirs raises why."""
    call = structs.Collective(comm=comm.id, name=library.encode(name), occurrence=occurrence)
    with contextlib.suppress(Closed):  # then they have been told
        library.call("cgx_refuse", byref(call), KINDS.index(PeerFailed), library.encode(reason))


@contextlib.contextmanager
def or_refuse(comm: Communicator, name: str, occurrence: int = -1) -> Iterator[None]:
    """Refuse a call if the block, which must come before it, fails: other ranks then do not wait.

    Args:
        comm: the ranks.
        name: of the call.
        occurrence: which call of this name, counted from 0; -1: this rank's next one.
    """
    try:
        yield
    except Exception as error:
        refuse(comm, name, occurrence, reason_of(error))
        raise


def reason_of(error: BaseException) -> str:
    """Return the text in which other ranks report an error of this one."""
    return f"{type(error).__name__}: {error}"


def start_apart(
    comm: Communicator,
    tensors: Sequence[torch.Tensor],
    config: Config,
    *,
    op: Op,
    segments: Sequence[Segment],
    seed: Sequence[int],
    name: str,
    residuals: Residuals | None = None,
) -> dist.Work:
    """Start an allreduce, in place, of tensors that lie apart: one message, and nothing is copied.

    Args and errors: see start().

    Args:
        comm: the ranks.
        tensors: contiguous, at least one; of one dtype that start() takes and on one device.
        config: how values travel.
        op: "sum" or "avg".
        segments: one for each tensor, of all its values; offsets do not count.
        seed: one for each.
        name: of the call.
        residuals: one, or None, for each.
    """
    first, total = tensors[0], sum(tensor.numel() for tensor in tensors)
    call = Call("allreduce", op, config, name, segments, seed, None)
    collective = call.collective(comm.id, DTYPES[first.dtype], 0, 0, total)
    addresses = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    collective.inputs = collective.outputs = addresses
    held = [*tensors, *set_residuals(collective, call, first, residuals)]
    call.draw_seed(collective, comm.name, comm.next_call)
    return _torch_ops.start(addressof(collective), first, first, held, True)


def future_of(
    begin: Callable[_Arguments, dist.Work], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> torch.futures.Future[Any]:
    """Return the future of what begin(*args, **kwargs) starts; where it cannot, of why.

    Other ranks have such an error in their futures, too. DistributedDataParallel goes on after what
    a future holds, and never again after what a hook raises.
    """
    try:
        return begin(*args, **kwargs).get_future()
    except dist.DistBackendError as error:
        return failed(error)


def failed(error: Exception) -> torch.futures.Future[Any]:
    """Return a future that holds an error."""
    began: torch.futures.Future[Any] = torch.futures.Future()
    began.set_result(None)

    def fail(_: torch.futures.Future[Any]) -> None:  # set_exception() is for a gradient, to torch
        raise error

    return began.then(fail)


def set_residuals(
    collective: structs.Collective, call: Call, like: torch.Tensor, residuals: Residuals | None
) -> list[torch.Tensor]:
    """Have a collective on an input `like` this use residuals; return the tensors that it uses.

    Raises InvalidArgument: they do not fit.
    """
    if residuals is None:
        return []
    segments = [Segment(0, like.numel())] if call.segments is None else call.segments
    if len(residuals) != len(segments):
        raise InvalidArgument(
            f"residuals is a list of {len(residuals)} for {len(segments)} segments; give one each"
        )
    for residual, segment in zip(residuals, segments, strict=True):
        has_blocks = tables.VERBS[call.verb]["blocks_in"]
        numel = like.numel() - segment.offset if has_blocks else segment.numel
        if residual is not None and (
            (residual.dtype, residual.device, residual.numel()) != (like.dtype, like.device, numel)
            or not residual.is_contiguous()
        ):
            raise InvalidArgument(
                f"a residual has {residual.numel()} elements of {residual.dtype} on "
                f"{residual.device}; it must be contiguous, of {numel} elements of {like.dtype} on "
                f"{like.device}, as the values are"
            )
    addresses = [None if each is None else each.data_ptr() for each in residuals]
    collective.residuals = (c_void_p * len(addresses))(*addresses)
    return [each for each in residuals if each is not None]
