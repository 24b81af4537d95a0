"""Quantized collectives, DDP and FSDP2 hooks, and the backend "cgx" for PyTorch.

Importing this module registers the operators `torch.ops.cgx.*` and the `torch.distributed` backend
"cgx". It starts no MPI; the first collective or `cgx_ops.init` does. A call without `group`
includes all ranks: those of the default process group if there is one, else those of the launcher.
"""

from cgx_ops._core import versions

versions.require_framework("torch")

from cgx_ops.torch.averaging import reports  # noqa: E402
from cgx_ops.torch.averaging.layers import (  # noqa: E402
    exclude_layer,
    forget_models,
    register_model,
    set_quantization_bits,
    set_quantization_bucket_size,
)
from cgx_ops.torch.backend import errors, groups, launch, process_group  # noqa: E402
from cgx_ops.torch.backend.process_group import BackendOptions, compressed, uncompressed  # noqa: E402
from cgx_ops.torch.ddp import automatic  # noqa: E402
from cgx_ops.torch.ddp.automatic import hook_state  # noqa: E402
from cgx_ops.torch.graph import functional, inductor, ops, work  # noqa: E402
from cgx_ops.torch.graph.functional import (  # noqa: E402
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from cgx_ops.torch.graph.gradients import compress_grads  # noqa: E402
from cgx_ops.torch.graph.rewrite import compress_collectives  # noqa: E402

errors.register()
ops.register()
functional.register()
inductor.register()
launch.register()
groups.register()
reports.register()
process_group.register(prepare=automatic.notice_models)
automatic.register()
work.register()

__all__ = [
    "BackendOptions",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "compress_collectives",
    "compress_grads",
    "compressed",
    "exclude_layer",
    "forget_models",
    "hook_state",
    "reduce_scatter",
    "register_model",
    "set_quantization_bits",
    "set_quantization_bucket_size",
    "uncompressed",
]
