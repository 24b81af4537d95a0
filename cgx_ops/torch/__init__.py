"""Quantized allreduce for PyTorch: importing this registers `torch.ops.cgx.*`.

    import torch, cgx_ops.torch
    y = torch.ops.cgx.quantized_allreduce(x, bits=4)

In eager and in `torch.compile`, forward and backward; `ops.py` has the operators' description.
Importing starts no MPI; the first collective, or `cgx_ops.init()`, does.

Phases: check that the binding fits the installed torch; load libcgx, then the binding; add to the
operators what is said in Python.
"""

from cgx_ops import _native
from cgx_ops.torch import _compat

_native.require_binding("torch", _compat.TORCH_VERSION)

from cgx_ops.torch import inductor, ops  # noqa: E402

ops.register()
inductor.register()

__all__: list[str] = []
