"""Start collectives of the core on torch tensors, as an asynchronous Work.

start() is for any collective, start_apart() for an allreduce of separate tensors in one message.
future_of() is for DDP hooks. Compiled models use the operators of ops.py instead.
"""

import functools
import os
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int32, c_void_p, pointer
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Segment, _torch_ops
from cgx_ops._core import at_exit, library, structs, tables
from cgx_ops._core.call import Call, Op, Verb
from cgx_ops.errors import InvalidArgument, Unsupported

# cgx_dtype_t
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_Arguments = ParamSpec("_Arguments")

# A tensor for each segment, or None for a segment without a residual.
Residuals = Sequence[torch.Tensor | None]

_LAST_CALLBACKS_S = 5

_SIZES = {
    "allreduce": "both must have the same number",
    "reduce_scatter": "the input must have one block of the output's size for each rank",
    "all_gather": "the output must have one block of the input's size for each rank",
    "all_to_all": "both must have one block of the same size for each rank",
}


def register() -> None:
    """Make callbacks of futures finish before the interpreter exits. Call once per process.

    No callback may run Python code during interpreter shutdown.
    """
    at_exit.then(functools.partial(_drain, os.getpid()))


def _drain(process: int) -> None:
    if process == os.getpid():  # a forked child does not have the threads
        _torch_ops.drain(_LAST_CALLBACKS_S)


@functools.cache
def devices() -> tuple[str, ...]:
    """Return the device types that the core supports: "cpu", and "cuda" if built with CUDA."""
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
    """Start a collective and return immediately; do not use the tensors until it ends.

    CUDA tensors: the collective follows the work on the current stream, on another stream. wait()
    and the future's callbacks make the then-current stream wait, not the host. A later failure
    fills the output with NaN, and wait() or the next collective on `comm` raises it.

    Args:
        comm: the ranks. All of them call with equal arguments, except tensors, seed and timeout.
        verb: "allreduce", "reduce_scatter" or "all_gather".
        input: contiguous, on the CPU or a CUDA device; float32, float16 or bfloat16.
        output: contiguous, of the same dtype and device. allreduce: as many elements as the input;
            it may be the input. reduce_scatter: the input has comm.size blocks of output.numel()
            elements. all_gather: the reverse.
        config: settings of the messages.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product". Not for all_gather.
        segments: runs of elements (of a block) with separate bits and bucket_size; None: one.
        seed: of this call's noise, or a list with one for each segment; None: derived from the
            communicator's name and the number of calls so far.
        noise_rank: this rank's number for noise; None: that of `comm`, its rank in the default
            group. Groups with equal numbers, seeds and values get equal results.
        name: identifies this call across ranks.
        occurrence: the index of this call among those of its name, the same on all ranks, for
            threads that start calls of one name in any order. None: each rank's next one.
        timeout: limit in seconds; None: the communicator's.
        asynchronous: False puts the collective of CUDA tensors on the current stream, so that no
            wait is needed there. No effect on CPU tensors.
        residuals: error feedback of sums and averages: a list with a tensor or None for each
            segment; contiguous, of the input's dtype and device, read and written in place until
            the end. allreduce: as many elements as the segment. reduce_scatter: the part of a
            tensor like the input that starts at the segment, because residuals lie there like the
            values in the input.

    Returns:
        The Work: wait() raises the error of a failed collective; get_future() holds a list with the
        output, and its callbacks may block.

    Raises:
        Unsupported: the dtype, device or layout is not supported (a TypeError).
        InvalidArgument: sizes or settings do not fit (a ValueError).
        torch.distributed.DistBackendError: the communicator is closed.
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
            raise InvalidArgument(
                f"{verb}: input is on {input.device}, output on {output.device}; both must be on "
                "the same device"
            )
        if not tensor.is_contiguous() or tensor.is_neg():
            raise InvalidArgument(
                f"{verb}: {role} is not contiguous, or a negative view; pass {role}.clone()"
            )
    row = tables.VERBS[verb]
    block, rest = divmod(input.numel(), comm.size if row["blocks_in"] else 1)
    if rest or output.numel() != block * (comm.size if row["blocks_out"] else 1):
        raise InvalidArgument(
            f"{verb} over {comm.size} ranks: input has {input.numel()} elements, output "
            f"{output.numel()}; {_SIZES[verb]}"
        )
    call = Call(verb, op, config, name, segments, seed, timeout)
    to = output.data_ptr()  # first, because it may move lazy copies, including the input
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
    """Start an allreduce of separate tensors, in place, as one message and without copies.

    Args and errors: see start().

    Args:
        comm: the ranks.
        tensors: at least one; contiguous, of one dtype that start() supports and on one device.
        config: settings of the message.
        op: "sum" or "avg".
        segments: one for each tensor, with all its values; offsets are ignored.
        seed: one for each tensor.
        name: name of the call.
        residuals: one, or None, for each tensor.
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
    """Return the future of the Work that begin(*args, **kwargs) starts, or a failed future.

    Other ranks' futures hold such an error, too. DistributedDataParallel can continue after an
    error in a future, but not after an exception in a hook.
    """
    try:
        return begin(*args, **kwargs).get_future()
    except dist.DistBackendError as error:
        return failed(error)


def failed(error: Exception) -> torch.futures.Future[Any]:
    """Return a future that holds an error."""
    began: torch.futures.Future[Any] = torch.futures.Future()
    began.set_result(None)

    # Raised in a callback, because torch treats set_exception()'s value as a gradient.
    def fail(_: torch.futures.Future[Any]) -> None:
        raise error

    return began.then(fail)


def set_residuals(
    collective: structs.Collective, call: Call, like: torch.Tensor, residuals: Residuals | None
) -> list[torch.Tensor]:
    """Set the residuals of a collective on an input; return the tensors that it uses.

    `like` is the input, or another tensor of its size, dtype and device.

    Raises:
        InvalidArgument: they do not fit.
    """
    if residuals is None:
        return []
    segments = [Segment(0, like.numel())] if call.segments is None else call.segments
    if len(residuals) != len(segments):
        raise InvalidArgument(
            f"residuals has {len(residuals)} entries for {len(segments)} segments; pass one each"
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
                f"{residual.device}; like the values, it must have {numel} elements of "
                f"{like.dtype} on {like.device}, and be contiguous"
            )
    addresses = [None if each is None else each.data_ptr() for each in residuals]
    collective.residuals = (c_void_p * len(addresses))(*addresses)
    return [each for each in residuals if each is not None]
