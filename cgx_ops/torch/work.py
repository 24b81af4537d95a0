"""start(): any collective of the core on torch tensors, as an asynchronous Work.

The DDP hook and FSDP's collectives stand on it. Compiled models use the operators of `ops.py`.
"""

from collections.abc import Sequence
from ctypes import addressof

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Segment, _torch_ops
from cgx_ops.call import Call, Op, Verb
from cgx_ops.errors import InvalidArgument, Unsupported

# cgx_dtype_t
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def start(
    comm: Communicator,
    verb: Verb,
    input: torch.Tensor,  # noqa: A002  (torch's word)
    output: torch.Tensor,
    config: Config,
    *,
    op: Op = "sum",
    segments: Sequence[Segment] | None = None,
    seed: int | None = None,
    name: str = "",
    timeout: float | None = None,
) -> dist.Work:
    """Start a collective and return at once; leave the tensors alone until it ends.

    Args:
        comm: the ranks; all of them call with equal arguments (tensors, seed and timeout apart).
        verb: "allreduce", "reduce_scatter" or "all_gather".
        input: contiguous, on the CPU; float32, float16 or bfloat16.
        output: of the same dtype, contiguous. allreduce: as many elements as the input, perhaps the
            input itself. reduce_scatter: the input holds comm.size blocks of output.numel()
            elements. all_gather: the reverse.
        config: how values travel.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product". Not for all_gather.
        segments: runs of elements (of a block) with their own bits and bucket_size; None: one.
        seed: of this call's noise; None: derived from config.seed and the calls so far.
        name: matches this call with those of other ranks, whatever runs in between.
        timeout: seconds it may take; None: the communicator's.

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
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise Unsupported(
                f"{verb}: {role} is {tensor.layout} on {tensor.device}; it must be a dense tensor "
                "on the CPU"
            )
        if not tensor.is_contiguous() or tensor.is_neg():
            raise InvalidArgument(
                f"{verb}: {role} is not contiguous, or a negative view; give {role}.clone()"
            )
    block, whole = output.numel(), input.numel()
    if verb == "all_gather":
        block, whole = whole, block
    if whole != block * (1 if verb == "allreduce" else comm.size):
        raise InvalidArgument(
            f"{verb} over {comm.size} ranks: input has {input.numel()} elements, output "
            f"{output.numel()}"
        )
    call = Call(verb, op, config, name, segments, seed, timeout)
    to = output.data_ptr()  # first: it may move a lazy copy, the input too
    pointers = input.data_ptr(), to
    collective = call.collective(
        comm.id, comm.next_call(name), DTYPES[input.dtype], *pointers, block
    )
    return _torch_ops.start(addressof(collective), input, output)
