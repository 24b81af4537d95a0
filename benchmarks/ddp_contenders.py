"""Contenders that average gradients in DistributedDataParallel: cgx and torch's hooks over gloo.

ddp_step.py times them.

Some of torch's hooks need help on gloo:

- bf16_compress_hook is refused by its name where there is no CUDA, so it gets another name.
- The quantization hooks expect futures as NCCL fills them. quantization_pertensor_hook gets an
  all_gather that does so (cgx_ops.bench.peers). quantization_perchannel_hook still fails and is
  left out.
- PowerSGD and the quantization hooks start collectives in callbacks. With several buckets the order
  differs between ranks, and gloo aborts. So they get one bucket.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.bench.peers import quantization_hooks

POWERSGD_RANK = 4
_ONE_BUCKET = 1 << 20  # MB

Wrap = Callable[[nn.Module], nn.Module]  # a model, as one that averages its gradients


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, under a name that DDP accepts."""
    return default_hooks.bf16_compress_hook(group, bucket)


def start() -> dict[str, Wrap]:
    """Start torch.distributed on cgx and gloo; return the contenders, the exact one first.

    Each wraps any number of models.
    """
    options = cgx_ops.torch.BackendOptions(Config(bits=4))
    dist.init_process_group("cgx", pg_options=options)  # type: ignore[arg-type]
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)

    def over_gloo(
        hook: Callable[..., object] | None = None,
        state_of: Callable[[], object] = lambda: gloo,
        bucket_mb: int | None = None,
    ) -> Wrap:
        def wrap(model: nn.Module) -> nn.Module:
            wrapped = DistributedDataParallel(model, process_group=gloo, bucket_cap_mb=bucket_mb)
            if hook is not None:
                wrapped.register_comm_hook(state_of(), hook)
            return wrapped

        return wrap

    def powersgd() -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(
            gloo, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2
        )

    pertensor = quantization_hooks().quantization_pertensor_hook
    return {
        "gloo": over_gloo(),
        "gloo, fp16 hook": over_gloo(default_hooks.fp16_compress_hook),
        "gloo, bf16 hook": over_gloo(bf16_hook),
        "gloo, PowerSGD rank 4": over_gloo(powerSGD_hook.powerSGD_hook, powersgd, _ONE_BUCKET),
        "gloo, pertensor hook": over_gloo(pertensor, bucket_mb=_ONE_BUCKET),
        "cgx 4 bits": DistributedDataParallel,  # over the default group, as its options say
    }
