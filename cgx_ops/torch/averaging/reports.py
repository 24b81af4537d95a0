"""Log lines at the start of training: a summary, and the settings of each tensor.

The summary is logged by `cgx_ops`, each tensor's settings by `cgx_ops.torch.backend` at level
DEBUG.
"""

import ast
import logging
from collections.abc import Sequence

import torch.distributed as dist

from cgx_ops import Config, Segment, _torch_ops
from cgx_ops._core import log
from cgx_ops._core.tables import EXACT_BITS, SMALLEST_COMPRESSED
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend.groups import communicator_of

CARRIER = "torch's collectives"  # logged instead of a transport

_log = logging.getLogger("cgx_ops.torch.backend")


def register() -> None:
    """Log the first call of an operator and of an exact reduce_scatter. Call once per process."""
    _torch_ops.report_start_by(_report_first)


def _report_first(what: str, text: str, rank: int, size: int, transport: str) -> None:
    if (dist.get_rank() if dist.is_initialized() else rank) == 0:
        pairs = (pair.split("=") for pair in text.split())
        config = Config(**{name: ast.literal_eval(value) for name, value in pairs})
        log.started(what, what, config, size, transport, None)


def report_layers(
    key: object,
    what: str,
    group: dist.ProcessGroup | None,
    config: Config,
    names: Sequence[str],
    segments: Sequence[Segment],
    carrier: str = "native",
) -> None:
    """Log how each layer is sent, and on rank 0 that training starts. Once for each key.

    Args:
        key: identifies the model's state.
        what: "DDP" or "FSDP2".
        group: the ranks.
        config: of all layers.
        names: of the layers.
        segments: each layer's elements and settings.
        carrier: "native" or "c10d".
    """
    reasons = [_reason(segment.config or config, segment) for segment in segments]
    if _log.isEnabledFor(logging.DEBUG):
        for name, segment, reason in zip(names, segments, reasons, strict=True):
            how = reason or log.described(segment.config or config)
            _log.debug("%s, '%s', %d elements: %s", what, name, segment.numel, how)
    tensors = log.Tensors(len(reasons), sum(map(bool, reasons)))
    report_start(key, what, group, config, carrier, tensors)


def report_start(
    key: object,
    what: str,
    group: dist.ProcessGroup | None,
    config: Config,
    carrier: str,
    tensors: log.Tensors | None,
) -> None:
    """Log on rank 0 that training starts, once for each key."""
    found = parallel.group_or_default(group)
    if (dist.get_rank() if dist.is_initialized() else found.rank()) > 0:
        return
    transport = CARRIER if carrier == "c10d" else communicator_of(found).transport
    log.started(key, what, config, found.size(), transport, tensors)


def _reason(config: Config, segment: Segment) -> str:
    """Return why a layer is sent exact; "" if it is compressed."""
    if config.bits == EXACT_BITS:
        return "exact, its bits are 32"
    smallest = max(SMALLEST_COMPRESSED, config.minimal_size)
    return f"exact, fewer than {smallest} elements" if config.is_short(segment.numel) else ""
