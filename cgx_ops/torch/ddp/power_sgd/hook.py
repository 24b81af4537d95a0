"""PowerSGD for DistributedDataParallel: gradients are sent as the product of two thin matrices.

Vogels, Karimireddy, Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization, NeurIPS 2019. Names follow torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
"""

import torch

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.power_sgd.exchange import Exchange
from cgx_ops.torch.averaging.power_sgd.plan import Bucket
from cgx_ops.torch.ddp.bucket import inspect_bucket, refuse, require_names, require_state
from cgx_ops.torch.ddp.power_sgd.state import PowerSGDState


def power_sgd_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks with PowerSGD.

    Register it with `DistributedDataParallel.register_comm_hook`. A gradient counts as a matrix
    with one row for each index of its outermost dimension: (out, in * height * width) for a
    convolution. Each bucket sends two messages: all P with the tensors that are not factored, then
    all Q. For an n x m matrix and rank r, this is r (n + m) values instead of n m. Later failures,
    such as a rank with other arguments or a lost peer, are stored in the future. `backward` then
    raises a RuntimeError with the text of the first error. On a GPU such a failure sets the
    gradients to NaN, and the next bucket's future holds the error.

    After a failure the residuals of the bucket's matrices have their old values, up to rounding.
    Gradients that are not finite make the average of their layer not finite on all ranks, and leave
    no residual.

    Args:
        state: a `PowerSGDState`.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.
            Messages and arithmetic are float32.

    Returns:
        A future of the same tensor, averaged in place. The hook does not wait for it.

    Raises:
        TypeError: the dtype, layout or device of gradients is not supported; the text names the
            layers.
        InvalidArgument: cgx_ops cannot connect the process group, or the group is not the model's.
            Also if names of layers are unknown, or the state belongs to another model, rank or
            number of ranks.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.PowerSGDState(matrix_approximation_rank=1, start_powerSGD_iter=2)
        >>> model.register_comm_hook(state, ddp.power_sgd_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([64, 64])
        >>> dist.destroy_process_group()
    """
    return _hook("power_sgd_hook", state, bucket, batched=False)


def batched_power_sgd_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks with PowerSGD, as one square matrix.

    The whole bucket, including biases, is padded with zeros to a square matrix of ceil(sqrt(numel))
    rows. Config, rules and min_compression_rate are ignored. Compared with `power_sgd_hook` it
    needs fewer and larger matrix products, and usually approximates worse. Q belongs to a bucket:
    when DistributedDataParallel rebuilds its buckets, Q starts again, while residuals continue.
    Failures are handled as in `power_sgd_hook`.

    Args:
        state: a `PowerSGDState`.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.
            Messages and arithmetic are float32.

    Returns:
        A future of the same tensor, averaged in place. The hook does not wait for it.

    Raises:
        TypeError: the dtype, layout or device of gradients is not supported; the text names the
            layers.
        InvalidArgument: cgx_ops cannot connect the process group, or the group is not the model's.
            Also if names of layers are unknown, or the state belongs to another model, rank or
            number of ranks.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.PowerSGDState(matrix_approximation_rank=1, start_powerSGD_iter=2)
        >>> model.register_comm_hook(state, ddp.batched_power_sgd_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.bias.grad.shape
        torch.Size([64])
        >>> dist.destroy_process_group()
    """
    return _hook("batched_power_sgd_hook", state, bucket, batched=True)


@full_precision()
def _hook(
    hook: str, state: PowerSGDState, bucket: GradBucket, *, batched: bool
) -> torch.futures.Future[torch.Tensor]:
    require_state(hook, state, PowerSGDState)
    info = inspect_bucket(hook, state, bucket)
    name = f"power_sgd/{bucket.index()}"
    buffer = bucket.buffer()
    info.raise_refusal(state.or_refuse(buffer.device, name))
    refuse(hook, info)
    if info.config is None or info.step < state.start_powerSGD_iter:
        whole = [Segment(0, buffer.numel(), Config(bits=EXACT_BITS))]
        return state.average(buffer, state.config, segments=whole, seed=[0], name=name)
    require_names(hook, info)
    found = Bucket(
        bucket.index(), name, "ddp", buffer, info.layers, info.gradients, info.offsets, info.config,
        info.step, info.finds_unused, bucket.is_last(),
    )  # fmt: skip
    return state.prepared(
        buffer.device, name, lambda: Exchange(hook, state, found, batched=batched).start()
    )
