"""Quantized collectives as differentiable functions, for eager and compiled code.

A `Config` may be a global, an argument of the compiled function, or made inside it.
"""

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cgx_ops import Config, Rules
from cgx_ops._core.call import Op
from cgx_ops.config import Compressor, Rounding, check_config
from cgx_ops.torch._compat import graphs

# The ranks of a call; None: all ranks.
Group = dist.ProcessGroup | DeviceMesh | str | None


def register() -> None:
    """Let compiled functions use Config and Rules as constants. Call once per process."""
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
    """Reduce a tensor over all ranks with compressed messages.

    Every rank receives the same bits. The gradient of a sum or an average is the same collective,
    applied to the incoming gradient.

    Args:
        x: a float32, float16 or bfloat16 tensor of any shape, on the CPU or a GPU.
        op: "sum" or "avg". Exact values (32 bits, "lossless") also "min", "max" and "product",
            which have no gradient.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        bits: overrides `config.bits`: 1 to 8, or 32 (exact).
        bucket_size: overrides `config.bucket_size`: how many elements share one scale.
        compressor: overrides `config.compressor`, and resets the fields that only the previous
            compressor uses.
        rounding: overrides `config.rounding`. Random rounding draws its seed from torch's default
            CPU generator.
        group: the ranks: a process group of any backend, a one-dimensional DeviceMesh, or a group's
            name. None: all ranks.
        residual: error feedback: reduces `x + residual` and returns a new residual. Same shape and
            dtype as `x`; start with zeros.
        name: identifies the call across ranks. Needed only if several threads start collectives.
        carrier: "native" sends by cgx_ops' own transports. "c10d" sends by the collectives of
            the process group: gloo for CPU tensors, NCCL for CUDA tensors.

    Returns:
        A new tensor with the shape and dtype of `x`. With a residual, a tuple of this tensor and
        the new residual.

    Raises:
        ValueError: `op`, a field of the config or the group is invalid, or the residual has another
            shape.
        TypeError: the dtype, layout or device is not supported, or `config` or `group` has the
            wrong type.
        torch.distributed.DistBackendError: ranks called with different arguments, or a peer failed.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> x = torch.ones(1000)
        >>> cgx_ops.torch.all_reduce(x, "avg", bits=4).shape
        torch.Size([1000])

        With error feedback, pass each call's residual to the next one:

        >>> y, residual = cgx_ops.torch.all_reduce(x, "avg", bits=2, residual=torch.zeros(1000))
        >>> torch.allclose(y + residual, x, atol=1e-5)
        True
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
    """Reduce a tensor over all ranks with compressed messages; each rank receives one block.

    The first dimension of `x` is split into as many equal blocks as there are ranks. Rank i
    receives the reduced block i. The gradient is an all_gather of the incoming gradient with the
    same config; with op="avg" it is divided by the number of ranks.

    Args:
        x: a float32, float16 or bfloat16 tensor whose first dimension is divisible by the number of
            ranks.
        op: "sum" or "avg". Exact values (32 bits, "lossless") also "min", "max" and "product",
            which have no gradient.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        bits: overrides `config.bits`: 1 to 8, or 32 (exact).
        bucket_size: overrides `config.bucket_size`: how many elements share one scale.
        compressor: overrides `config.compressor`, and resets the fields that only the previous
            compressor uses.
        rounding: overrides `config.rounding`. Random rounding draws its seed from torch's default
            CPU generator.
        group: the ranks: a process group of any backend, a one-dimensional DeviceMesh, or a group's
            name. None: all ranks.
        residual: error feedback: reduces `x + residual` and returns a new residual.
            Same shape and dtype as `x`; start with zeros.
        name: identifies the call across ranks. Needed only if several threads start collectives.

    Returns:
        A tensor whose first dimension is `x.shape[0] / ranks`; the others are those of `x`. With a
        residual, a tuple of this tensor and the new residual, which has the shape of `x`.

    Raises:
        ValueError: `op`, a field of the config or the group is invalid, the residual has another
            shape, or the first dimension is not divisible by the number of ranks.
        TypeError: the dtype, layout or device is not supported, or `config` or `group` has the
            wrong type.
        torch.distributed.DistBackendError: ranks called with different arguments, or a peer failed.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> x = torch.ones(4, 1000)
        >>> cgx_ops.torch.reduce_scatter(x, "avg", bits=8).shape  # one rank: one block
        torch.Size([4, 1000])
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
    """Concatenate the tensors of all ranks along dimension 0 with compressed messages.

    Every rank receives the same bits, in rank order. The gradient is a reduce_scatter (a sum) of
    the incoming gradient with the same config.

    Args:
        x: a float32, float16 or bfloat16 tensor, of the same shape on all ranks, on the CPU or a
            GPU.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        bits: overrides `config.bits`: 1 to 8, or 32 (exact).
        bucket_size: overrides `config.bucket_size`: how many elements share one scale.
        compressor: overrides `config.compressor`, and resets the fields that only the previous
            compressor uses.
        rounding: overrides `config.rounding`. Random rounding draws its seed from torch's default
            CPU generator.
        group: the ranks: a process group of any backend, a one-dimensional DeviceMesh, or a group's
            name. None: all ranks.
        name: identifies the call across ranks. Needed only if several threads start collectives.

    Returns:
        A tensor whose first dimension is `ranks * x.shape[0]`; the others are those of `x`. For a
        scalar `x`, a tensor of `ranks` elements.

    Raises:
        ValueError: a field of the config or the group is invalid.
        TypeError: the dtype, layout or device is not supported, or `config` or `group` has the
            wrong type.
        torch.distributed.DistBackendError: ranks called with different arguments, or a peer failed.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.all_gather(torch.ones(4, 1000), bits=8).shape  # one rank
        torch.Size([4, 1000])
    """
    keywords = _keywords(config, bits, compressor, rounding, name, "native")
    return torch.ops.cgx.quantized_all_gather(x, bits, bucket_size, group_name(group), **keywords)


def all_to_all(
    x: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *,
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    grad_config: Config | None = None,
    group: Group = None,
    name: str = "",
) -> torch.Tensor:
    """Send a block of rows to each rank with compressed messages; concatenate those from all ranks.

    Blocks are contiguous along dimension 0, in rank order, as in
    torch.distributed.all_to_all_single. Each block begins new buckets. A rank's block for itself is
    copied exactly. The gradient is an all_to_all of the incoming gradient, back to the senders.

    Args:
        x: a float32, float16 or bfloat16 tensor with at least one dimension.
        output_split_sizes: rows of the block from each rank. None: equal blocks, of as many rows in
            all as `x`.
        input_split_sizes: rows of the block for each rank; they add up to the rows of `x`. None:
            equal blocks.
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
            `algorithm`, `gather_bits` and `intra_bits` have no effect.
        bits: overrides `config.bits`: 1 to 8, or 32 (exact).
        bucket_size: overrides `config.bucket_size`: how many elements share one scale.
        compressor: overrides `config.compressor`, and resets the fields that only the previous
            compressor uses.
        rounding: overrides `config.rounding`. Random rounding draws its seed from torch's default
            CPU generator.
        grad_config: settings of the gradient's all_to_all, and of further derivatives. None: exact.
        group: the ranks: a process group of any backend, a one-dimensional DeviceMesh, or a group's
            name. None: all ranks.
        name: identifies the call across ranks. Needed only if several threads start collectives.

    Returns:
        A tensor with the rows of all received blocks; its other dimensions are those of `x`.

    Raises:
        ValueError: sizes are negative, too few or too many, or do not add up, equal blocks are not
            possible, or a field of a config or the group is invalid.
        TypeError: the dtype or layout is not supported, or `config`, `grad_config` or `group` has
            the wrong type.
        torch.distributed.DistBackendError: a rank sends a block of another size than its receiver
            expects, ranks called with other different arguments, or a peer failed.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> tokens = torch.ones(16, 64)
        >>> cgx_ops.torch.all_to_all(tokens, [16], [16], bits=8).shape  # one rank
        torch.Size([16, 64])
    """
    check_config(grad_config, "grad_config")
    keywords = _keywords(config, bits, compressor, rounding, name, "native")
    sizes = output_split_sizes, input_split_sizes
    return torch.ops.cgx.quantized_all_to_all(
        x,
        *(None if each is None else list(each) for each in sizes),
        bits,
        bucket_size,
        group_name(group),
        **keywords,
        grad_config="" if grad_config is None else str(grad_config),
    )


def group_name(group: Group) -> str:
    """Return the name by which operators find a group.

    Raises:
        TypeError: `group` has another type.
        ValueError: `group` is a DeviceMesh of several dimensions.
    """
    if group is None or isinstance(group, str):
        return group or ""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; pass one of them: mesh['name']"
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
    if isinstance(bits, bool):  # torch would convert it to 0 or 1
        raise ValueError(f"bits is {bits}; it must be an integer from 1 to 8, or 32 (exact)")
    return {
        "compressor": compressor,
        "rounding": rounding,
        "config": "" if config is None else str(config),
        "name": name,
        "carrier": carrier,
    }
