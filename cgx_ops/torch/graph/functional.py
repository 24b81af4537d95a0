"""Quantized collectives as functions with gradients, in eager and in compiled code.

    y = cgx_ops.torch.all_reduce(x, "avg", config=Config(bits=4))

A Config may be a global, an argument of the compiled function, or made inside it.
"""

from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cgx_ops import Config, Rules
from cgx_ops._core.call import Op
from cgx_ops.config import Compressor, Rounding, check_config
from cgx_ops.torch._compat import graphs

# The ranks of a call; None: all.
Group = dist.ProcessGroup | DeviceMesh | str | None


def register() -> None:
    """Let compiled functions use Config and Rules. Once per process."""
    for each in (Config, Rules):
        each.__fx_repr__ = _written  # type: ignore[attr-defined]
    graphs.compile_as_constants(Config, Rules)


def _written(value: Any) -> tuple[str, dict[str, type]]:
    return repr(value), {type(value).__name__: type(value)}


@overload
def all_reduce(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: None = None,
    name: str = "",
    carrier: str = "native",
) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: torch.Tensor,
    name: str = "",
    carrier: str = "native",
) -> tuple[torch.Tensor, torch.Tensor]: ...
def all_reduce(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: torch.Tensor | None = None,
    name: str = "",
    carrier: str = "native",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reduce the ranks' tensors elementwise; every rank gets the same bits.

    The gradient of a sum or an average is the same collective on the incoming gradient.

    Args:
        x: float32, float16 or bfloat16, any shape, on the CPU or a GPU.
        op: "sum" or "avg"; with 32 bits also "min", "max" and "product", without a gradient.
        config: how values are sent; None: Config().
        bits: overrides this field of `config`; likewise `bucket_size`, `compressor` and `rounding`.
        bucket_size: elements that share one scale.
        compressor: a new one resets the fields that belonged to the old one.
        rounding: "stochastic" and "shift" take their seed from torch's default CPU generator.
        group: a process group of any backend, a DeviceMesh of one dimension, or a name; None: all
            ranks.
        residual: error feedback: x + residual is reduced. Of x's shape and dtype; begin with zeros.
        name: matches this call with those of other ranks, if several threads start collectives.
        carrier: "native", or "c10d": torch's own collectives move the bytes of CPU tensors.

    Returns:
        A new tensor of x's shape and dtype. With a residual: that, and the new residual.

    Raises:
        ValueError: an op, a field or a group out of range, a residual of another shape.
        TypeError: another dtype, layout or device; `config` or `group` of another type.
        torch.distributed.DistBackendError: ranks that disagree, or a peer that failed.

    Example:
        >>> x = torch.ones(100)
        >>> cgx_ops.torch.all_reduce(x, "avg", config=Config(bits=4)).shape
        torch.Size([100])
    """
    options: Any = (bits, bucket_size, op, group_name(group))
    keywords = _keywords(config, bits, compressor, rounding, name, carrier)
    if residual is None:
        return torch.ops.cgx.quantized_allreduce(x, *options, **keywords)
    return torch.ops.cgx.quantized_allreduce_with_feedback(x, residual, *options, **keywords)


@overload
def reduce_scatter(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: None = None,
    name: str = "",
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: torch.Tensor,
    name: str = "",
) -> tuple[torch.Tensor, torch.Tensor]: ...
def reduce_scatter(
    x: torch.Tensor,
    op: Op = "sum",
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    residual: torch.Tensor | None = None,
    name: str = "",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Reduce the ranks' tensors; rank i gets the i-th of `size` equal blocks of dimension 0.

    The gradient is an all_gather of the incoming gradient, which is sent as `config` says.

    Args:
        x: as of all_reduce(). The number of ranks divides its first dimension.
        op: as of all_reduce(). The gradient of an average is divided by the number of ranks.
        config: as of all_reduce(); so are the keywords that override it, `group` and `name`.
        bits: as of all_reduce().
        bucket_size: as of all_reduce().
        compressor: as of all_reduce().
        rounding: as of all_reduce().
        group: as of all_reduce().
        residual: error feedback, of CPU tensors: x + residual is reduced. Of x's shape and dtype.
        name: as of all_reduce().

    Returns:
        A tensor of shape (x.shape[0] / size, *x.shape[1:]). With a residual: that, and the new
        residual, of x's shape.

    Raises:
        ValueError: as all_reduce(); a first dimension that the ranks do not divide.
        NotImplementedError: a residual of a CUDA tensor.
        TypeError, torch.distributed.DistBackendError: as all_reduce().

    Example:
        >>> x = torch.ones(2 * world_size, 100)
        >>> cgx_ops.torch.reduce_scatter(x, "avg", bits=8).shape
        torch.Size([2, 100])
    """
    options: Any = (bits, bucket_size, op, group_name(group))
    keywords = _keywords(config, bits, compressor, rounding, name, "native")
    if residual is None:
        return torch.ops.cgx.quantized_reduce_scatter(x, *options, **keywords)
    return torch.ops.cgx.quantized_reduce_scatter_with_feedback(x, residual, *options, **keywords)


def all_gather(
    x: torch.Tensor,
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    group: Group = None,
    name: str = "",
) -> torch.Tensor:
    """Concatenate the ranks' tensors along dimension 0, in rank order, on every rank.

    The gradient is a reduce_scatter (a sum) of the incoming gradient, sent as `config` says.

    Args:
        x: as of all_reduce(), of the same shape on all ranks.
        config: as of all_reduce(); so are the keywords that override it, `group` and `name`.
        bits: as of all_reduce().
        bucket_size: as of all_reduce().
        compressor: as of all_reduce().
        rounding: as of all_reduce().
        group: as of all_reduce().
        name: as of all_reduce().

    Returns:
        A tensor of shape (size * x.shape[0], *x.shape[1:]); (size,) for a scalar.

    Raises:
        ValueError, TypeError, torch.distributed.DistBackendError: as all_reduce().

    Example:
        >>> cgx_ops.torch.all_gather(torch.ones(2, 100), bits=8).shape[0] == 2 * world_size
        True
    """
    keywords = _keywords(config, bits, compressor, rounding, name, "native")
    return torch.ops.cgx.quantized_all_gather(x, bits, bucket_size, group_name(group), **keywords)


def group_name(group: Group) -> str:
    """Return the name by which operators find a group.

    Raises:
        TypeError: `group` is something else.
        ValueError: a DeviceMesh of several dimensions.
    """
    if group is None or isinstance(group, str):
        return group or ""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; give one of them: mesh['name']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is {group!r}; it must be a ProcessGroup, a DeviceMesh, a group's name, or None"
        )
    return group.group_name


def _keywords(
    config: Config | None,
    bits: int | None,
    compressor: str | None,
    rounding: str | None,
    name: str,
    carrier: str,
) -> dict[str, Any]:
    check_config(config)
    if isinstance(bits, bool):  # torch takes it for 0 or 1
        raise ValueError(f"bits is {bits}; it must be an integer from 1 to 8, or 32 (exact)")
    return {
        "compressor": compressor,
        "rounding": rounding,
        "config": "" if config is None else str(config),
        "name": name,
        "carrier": carrier,
    }
