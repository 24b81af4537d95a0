"""Quantized collectives for PyTorch: importing this registers `torch.ops.cgx.*`.

    import torch, cgx_ops.torch
    y = cgx_ops.torch.all_reduce(x, bits=4)

In eager and in `torch.compile`, forward and backward; `functional.py` has the functions, `ops.py`
the operators under them.
Importing starts no MPI; the first collective, or `cgx_ops.init()`, does. A call without
`group_name` reaches all ranks: those of the default process group, else the launcher's.

Phases: check that the binding fits the installed torch; load libcgx, then the binding; register the
operators' properties, the backend "cgx" and, under mpirun and srun, the rendezvous. docs/guides/torch.md
lists what the import changes.
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
from cgx_ops.torch.graph.functional import all_gather, all_reduce, reduce_scatter  # noqa: E402
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
