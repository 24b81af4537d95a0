"""SparseLoCo: DiLoCo with top-k messages (Sarfi et al., 2025)."""

from typing import Any

from torch import nn
from torch.optim import SGD

from cgx_ops import Config
from cgx_ops.torch.diloco.loop import DiLoCo


def sparse_loco(
    model: nn.Module, *, sync_every: int, density: float = 1 / 64, **more: Any
) -> DiLoCo:
    """Create a DiLoCo with the settings of SparseLoCo: top-k messages with error feedback.

    Each rank sends the largest values of each chunk of 4096, in 2 bits, and keeps 0.95 of the rest
    as residuals. The outer optimizer is SGD with lr=1 and without momentum, applied to the mean
    over the ranks that sent a value (Sarfi et al., 2025). The outer rate and the decay are those of
    Covenant-72B.

    Args:
        model: as for `DiLoCo`.
        sync_every: as for `DiLoCo`.
        density: share of the values that are sent.
        **more: other arguments of `DiLoCo`, except config and mean_over.

    Returns:
        The outer loop.

    Raises:
        InvalidArgument: as for `DiLoCo`.
        TypeError: a parameter is complex, sparse or float64.
        RuntimeError: a peer is late or lost.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.diloco import sparse_loco
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 64)  # without DistributedDataParallel
        >>> outer = sparse_loco(model, sync_every=30, density=1 / 64)
        >>> for _ in range(30):  # with an optimizer step before each
        ...     outer.step()
        >>> outer.applied
        1
        >>> dist.destroy_process_group()
    """
    config = Config(
        compressor="topk", density=density, bucket_size=4096, value_bits=2, error_feedback=True,
        residual_decay=0.95,
    )  # fmt: skip
    more.setdefault("outer_optimizer", lambda params: SGD(params, lr=1.0))
    return DiLoCo(model, sync_every=sync_every, config=config, mean_over="senders", **more)
