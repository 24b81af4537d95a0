"""What the operators of `torch.ops.cgx` promise, and what keeps their calls in traced graphs.

Kernels for tensors and for tracing, gradient and checks are C++ (`torch_ops/`).

    quantized_allreduce(x, bits=None, bucket_size=None, op="sum", group_name="", *,
                        compressor=None, rounding=None, config="", name="",
                        carrier="native") -> Tensor
    quantized_allreduce_(x, ...same...) -> None
    quantized_allreduce_coalesced(xs, ...same...) -> list[Tensor]
    quantized_allreduce_with_feedback(x, residual, ...same...) -> (Tensor, Tensor)
    quantized_allreduce_coalesced_with_feedback(xs, residuals, ...same...)
        -> (list[Tensor], list[Tensor])
    quantized_reduce_scatter(x, ...same...) -> Tensor
    quantized_reduce_scatter_with_feedback(x, residual, ...same...) -> (Tensor, Tensor)
    quantized_all_gather(x, ...same, without op...) -> Tensor

`x` is a float32, float16 or bfloat16 tensor of any shape, on the CPU or (if cgx_ops is built with
CUDA) on a GPU; the result has its shape and dtype, is contiguous, and holds the same bits on every
rank of the group, on a GPU those that the CPU would compute. `config` is the text of a
`cgx_ops.Config`, `str(Config(...))`; "" is the default one. `bits`, `bucket_size`, `compressor` and
`rounding` override its fields. A new compressor resets the fields that belonged to the old one.
`op` is sum or avg, and at 32 bits also min, max or product; `group_name` names a communicator of
cgx_ops or a process group of any backend; "" means all ranks: the default group if
torch.distributed is initialized, else the launcher's (docs/guides/launchers.md). `name` identifies a
collective that is started from several threads.

Random rounding ("stochastic", "shift") takes its seed from torch's default CPU generator, so
`torch.manual_seed` and activation checkpointing cover it; nearest rounding draws nothing. The
places that compressor="randk" sends are the same on all ranks, whose generators may differ: they
follow from `name` and a count of this process's calls of that name on that group. So programs must
call in the same order on all ranks, the count starts at 0 in each process, and what activation
checkpointing repeats has other places. In a graph, compiled or recorded, the seeds of CUDA tensors
come from the GPU's default generator, so that every replay has new noise.

On a GPU a call puts the collective on the current stream and returns, as any kernel. Where ranks'
GPUs are connected directly it can be recorded (torch.cuda.graph, mode="reduce-overhead").

The coalesced form sends a list of tensors of one dtype and device as one message; each has buckets
(and a minimal_size) of its own, and a result as if it were reduced alone by the algorithm that the
whole list takes.

The forms with feedback (of sum and avg) reduce x + residual, added in float32, and return beside
the result a new residual: what compression has lost of this rank's values, to be given to the next
call. Over all ranks, inputs and old residuals are the result (as a sum) and the new residuals, up
to float32 rounding and that of the dtype. A residual has its tensor's shape, dtype and device; the
first is torch.zeros_like(x). With bits=32, or a compressor with which feedback does not converge,
they are refused.

reduce_scatter returns this rank's block of the first dimension, which the number of ranks must
divide. all_gather concatenates along the first dimension. Each is the gradient of the other; the
gradient of an averaging reduce_scatter is divided by the number of ranks. Both have
carrier="native" alone, and residuals on the CPU alone.

`carrier="c10d"` moves the bytes by torch's own collectives, all_to_all_single and
all_gather_into_tensor of uint8, with the same bits in the result: `group_name` is then any group of
torch.distributed ("" the default one) that moves CPU tensors, such as gloo, under any launcher,
without MPI; `x` is on the CPU. Compiled graphs are specialised to sizes. Unlike native calls, ranks
that call with different arguments are not told: their results differ, or gloo ends the process.

The gradient of an allreduce (sum and avg) is the same collective on the incoming gradient, sent by
the same config, with separate noise derived from the forward's seed. min, max and product refuse a
tensor that requires grad. The in-place form reduces in x's memory where no gradient is recorded.

Raises:
    TypeError: another dtype, a sparse tensor, another device, a GPU in a build without CUDA.
    ValueError: a field of `config`, a keyword or group_name out of range, or fields that do not
        belong together; the text names the choices. Feedback with a compressor that it does not
        converge with.
    torch.distributed.DistBackendError: ranks that call with different arguments, a peer that died
        or is late. On a GPU that is known late: the result is NaN, and the next call raises. Under
        `torch.compile`, refusals while tracing arrive wrapped in torch's own exceptions.
"""

import torch

from cgx_ops.torch._compat import graphs


def register() -> None:
    """Complete the registration of the operators that the binding defined. Once per process."""
    cgx = torch.ops.cgx
    for operator in (
        cgx.quantized_allreduce.default,
        cgx.quantized_allreduce_.default,
        cgx.quantized_allreduce_coalesced.default,
        cgx.quantized_allreduce_with_feedback.default,
        cgx.quantized_allreduce_coalesced_with_feedback.default,
        cgx.quantized_reduce_scatter.default,
        cgx.quantized_reduce_scatter_with_feedback.default,
        cgx.quantized_all_gather.default,
        cgx.quantized_all_reduce.default,
        cgx.quantized_all_reduce_start.default,
        cgx.quantized_all_reduce_coalesced.default,
        cgx.quantized_all_reduce_coalesced_start.default,
        cgx.quantized_reduce_scatter_tensor.default,
        cgx.quantized_reduce_scatter_tensor_start.default,
        cgx.quantized_all_gather_into_tensor.default,
        cgx.quantized_all_gather_into_tensor_start.default,
    ):
        graphs.keep_in_graphs(operator)
