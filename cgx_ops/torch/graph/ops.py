"""The operators of `torch.ops.cgx`: their contract, and their registration with graphs.

Kernels, tracing, gradients and checks are C++ (`torch_ops/`).

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
    quantized_all_to_all(x, output_split_sizes=None, input_split_sizes=None,
                         ...same, without op..., grad_config="") -> Tensor

**Tensors.** `x` is a float32, float16 or bfloat16 tensor of any shape, on the CPU, or on a GPU if
cgx_ops was built with CUDA. The result has the same shape and dtype, is contiguous, and has the
same bits on every rank of the group. A GPU computes the same bits as the CPU.

**Settings.** `config` is the text of a `cgx_ops.Config`, `str(Config(...))`; "" is the default.
`bits`, `bucket_size`, `compressor` and `rounding` override its fields. A new compressor resets the
fields that only the previous one uses. `op` is sum or avg, and at 32 bits also min, max or product.
`group_name` names a communicator of cgx_ops or a process group of any backend. "" means all ranks:
the default group if torch.distributed is initialized, else those of the launcher
(docs/guides/launchers.md). `name` identifies a collective if several threads start collectives.

**Randomness.** Random rounding ("stochastic", "shift") draws its seed from torch's default CPU
generator, so `torch.manual_seed` and activation checkpointing control it. Nearest rounding draws
nothing. In a graph, compiled or recorded, the seeds of CUDA tensors come from the GPU's default
generator, so that every replay has new noise. The indices that compressor="randk" sends must be the
same on all ranks, whose generators may differ. They depend on `name` and on the number of this
process's calls of that name on that group. So programs must call in the same order on all ranks,
and repetitions by activation checkpointing have other indices.

**GPUs.** A call puts the collective on the current stream and returns, like any kernel. If the
ranks' GPUs are connected directly, it can be recorded (torch.cuda.graph, mode="reduce-overhead").
The exception is all_to_all, whose ranks compare the sizes of blocks on the host.

**Coalesced forms** send a list of tensors of one dtype and device as one message. Each tensor has
separate buckets (and a minimal_size), and the same result as if it were reduced alone by the
algorithm of the whole list.

**Forms with feedback** (sum and avg) reduce x + residual, added in float32, and also return a new
residual: the compression error of this rank's values, for the next call. Over all ranks, the inputs
plus the old residuals equal the result (as a sum) plus the new residuals, up to rounding in float32
and the dtype. A residual has its tensor's shape, dtype and device; start with torch.zeros_like(x).
bits=32, and compressors with which feedback does not converge, are rejected.

**reduce_scatter and all_gather.** reduce_scatter returns this rank's block of the first dimension,
which must be divisible by the number of ranks. all_gather concatenates along the first dimension.
Each is the gradient of the other; the gradient of an averaging reduce_scatter is divided by the
number of ranks. Both support only carrier="native".

**all_to_all** sends a block of rows to each rank and concatenates those from all ranks. Sizes count
rows, one for each rank; None: equal blocks. Each block begins new buckets; the own one is copied
exactly. The gradient is an all_to_all back to the senders, in `grad_config` (a text; "" is exact).
Only carrier="native". If a rank's sizes are invalid, the other ranks raise, too.

**Carrier.** `carrier="c10d"` sends by torch's own collectives, all_to_all_single and
all_gather_into_tensor of uint8, with the same bits in the result. `group_name` is then any group of
torch.distributed ("" is the default one), under any launcher, without MPI: with gloo for CPU
tensors, with NCCL for CUDA tensors. The compressors "randk", "entropy" and "lossless" need CPU
tensors. Compiled graphs are specialized to sizes. Unlike with native calls, different arguments on
different ranks are not detected: results differ, gloo ends the process, or NCCL waits until its
timeout.

**Gradients.** The gradient of an allreduce (sum and avg) is the same collective on the incoming
gradient, with the same config and separate noise derived from the forward's seed. min, max and
product reject a tensor that requires grad. The in-place form reduces in x's memory if no gradient
is recorded.

Raises:
    TypeError: another dtype, a sparse tensor, another device, or a GPU in a build without CUDA.
    ValueError: a field of `config`, a keyword or group_name is invalid, fields contradict each
        other, or feedback does not converge with the compressor. The text names the accepted
        values.
    torch.distributed.DistBackendError: ranks called with different arguments, or a peer died or is
        late. On a GPU the result is then NaN, and the next call raises. Under `torch.compile`,
        errors during tracing are wrapped in torch's own exceptions.
"""

import torch

from cgx_ops.torch._compat import graphs


def register() -> None:
    """Complete the registration of the operators. Call once per process."""
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
        cgx.quantized_all_to_all.default,
        cgx.quantized_all_to_all_single.default,
        cgx.quantized_all_to_all_single_start.default,
    ):
        graphs.keep_in_graphs(operator)
