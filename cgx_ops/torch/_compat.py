"""The parts of torch that are not public: everything here may differ in the next release.

Tested with torch 2.13. What a release lacks costs speed only, never a right result; `inductor.py`
says how.
"""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config

# Marks wait_tensor as an operator with a side effect, which is what keeps unused collectives.
import torch.distributed._functional_collectives
from torch.fx.node import has_side_effect

TORCH_VERSION: str = torch.__version__


def keep_in_graphs(operator: Any) -> None:
    """Tell dead-code elimination that `operator` does something even if nobody reads its result."""
    has_side_effect(operator)


def key_compile_caches(files: Iterable[Path]) -> None:
    """Make torch.compile's caches on disk forget graphs that other versions of `files` made.

    The caches know an operator by its name only, not by what it decomposes into.
    """
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    config: Any = torch.compiler.config
    config.cache_key_tag = f"{config.cache_key_tag}cgx_ops:{digest.hexdigest()[:16]};"


def lower_as_collective(operator: Any, kernel: Any) -> None:
    """Make inductor treat a functional operator as it does its own collectives.

    That gives one order of all collectives on every rank, overlap with computation, and inputs
    whose memory is left alone until `wait_tensor`.

    Args:
        operator: the overload in the graph; its first argument is the tensor that is reduced.
        kernel: the overload with the same arguments that the compiled code calls.

    Raises:
        ImportError, AttributeError: this torch has no such lowering any more.
    """
    from torch._inductor import ir, lowering

    create: Callable[..., Any] = ir._CollectiveKernel.create_out_of_place

    def lower(x: Any, *arguments: Any) -> Any:
        return ir.TensorBox.create(create(kernel, x, *arguments))

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
