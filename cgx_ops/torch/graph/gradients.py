"""compress_grads(): an identity that reduces the gradients of parameters in backward."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from cgx_ops import Config, Rules
from cgx_ops._core.call import Op
from cgx_ops.config import Compressor, Rounding, config_of
from cgx_ops.rules import require_rules
from cgx_ops.torch.graph.functional import Group, group_name

_Params = TypeVar("_Params", bound=torch.Tensor | list[torch.Tensor] | dict[str, torch.Tensor])

# A message: its Config as text, and the indices of its tensors.
_Message = tuple[str, tuple[int, ...]]


def compress_grads(
    params: _Params,
    *,
    op: Op = "avg",
    config: Config | None = None,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    group: Group = None,
    name: str = "",
    carrier: str = "native",
) -> _Params:
    """Return parameters unchanged and reduce their gradients over the ranks in backward.

    Call it on the weights before the model uses them, in eager or compiled code. Gradients with the
    same dtype and config share a message. A parameter that got no gradient contributes zeros.
    Tensors that do not require grad are returned unchanged.

    Args:
        params: a tensor, a list of tensors, or a dict of tensors by name; float32, float16 or
            bfloat16.
        op: "avg" or "sum".
        config: compressor, bits and the other settings. None: `Config()`, which is 4 bits.
        bits: overrides `config.bits`: 1 to 8, or 32 (exact).
        bucket_size: overrides `config.bucket_size`: how many elements share one scale.
        compressor: overrides `config.compressor`, and resets the fields that only the previous
            compressor uses.
        rounding: overrides `config.rounding`. Random rounding draws its seed from torch's default
            CPU generator.
        rules: settings by parameter name: a dict's key, "0", "1", ... in a list, "" for a single
            tensor. The default sends biases and other one-dimensional tensors exact.
        group: the ranks: a process group of any backend, a one-dimensional DeviceMesh, or a group's
            name. None: all ranks.
        name: identifies the call across ranks. Needed only if several threads start collectives.
        carrier: "native" sends by cgx_ops' own transports. "c10d" sends by the collectives of
            the process group: gloo for CPU tensors, NCCL for CUDA tensors.

    Returns:
        Tensors with the values of `params`, in the same kind of container.

    Raises:
        ValueError: `op` is not "avg" or "sum", or a field of the config or of a rule is out of
            range.
        TypeError: `params` is no tensor, list or dict of tensors, or a tensor that requires grad
            has an unsupported dtype.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> weight = torch.ones(10, 10, requires_grad=True)
        >>> used = cgx_ops.torch.compress_grads(weight, bits=4)
        >>> used.sum().backward()  # weight.grad is now the average over the ranks
        >>> weight.grad.shape
        torch.Size([10, 10])
    """
    if op not in ("sum", "avg"):
        raise ValueError(f"op is {op!r}; it must be 'sum' or 'avg'")
    require_rules(rules, "compress_grads: ")
    names, tensors = _named(params)
    base = config_of(
        config, bits=bits, bucket_size=bucket_size, compressor=compressor, rounding=rounding
    )
    rules.warn_of_unmatched(names, "compress_grads: ")
    trained = [i for i, x in enumerate(tensors) if x.requires_grad]
    if trained and torch.is_grad_enabled():
        messages = _messages([(names[i], tensors[i]) for i in trained], base, rules)
        options = (op, group_name(group), name, carrier)
        results = _Reduced.apply(messages, options, *(tensors[i] for i in trained))
        for i, result in zip(trained, results, strict=True):
            tensors[i] = result
    result: Any = tensors
    if isinstance(params, torch.Tensor):
        (result,) = tensors
    elif isinstance(params, Mapping):
        result = dict(zip(names, tensors, strict=True))
    return result


def _named(params: Any) -> tuple[list[str], list[torch.Tensor]]:
    if isinstance(params, torch.Tensor):
        return [""], [params]
    if isinstance(params, Mapping):
        names, tensors = list(params.keys()), list(params.values())
    elif isinstance(params, list):
        names, tensors = [str(i) for i in range(len(params))], list(params)
    else:
        raise TypeError(f"params is {params!r}; pass a tensor, or a list or a dict of tensors")
    for each, tensor in zip(names, tensors, strict=True):
        if not isinstance(each, str):
            raise TypeError(f"params: the key {each!r} is not a str; rules match by name")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"params: '{each}' is {tensor!r}; it must be a tensor")
    return names, tensors


def _messages(
    named: list[tuple[str, torch.Tensor]], config: Config, rules: Rules
) -> tuple[_Message, ...]:
    """Group tensors into messages by dtype and config, in the order of their first tensors."""
    found: dict[tuple[torch.dtype, str], list[int]] = {}
    for i, (name, x) in enumerate(named):
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"params: '{name}' is {x.dtype}; it must be float32, float16 or bfloat16. Leave it "
                "out and reduce its gradient with torch.distributed"
            )
        key = x.dtype, str(rules.of(name, x.dim(), config))
        found.setdefault(key, []).append(i)
    return tuple((text, tuple(indices)) for (_, text), indices in found.items())


class _Reduced(torch.autograd.Function):
    """The identity; backward reduces the gradients, one collective for each message."""

    @staticmethod
    def forward(
        ctx: Any,
        messages: tuple[_Message, ...],
        options: tuple[str, str, str, str],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.messages, ctx.options = messages, options
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, group, name, carrier = ctx.options
        results = list(gradients)
        for text, indices in ctx.messages:
            reduced = torch.ops.cgx.quantized_allreduce_coalesced(
                [gradients[i] for i in indices],
                op=op,
                group_name=group,
                config=text,
                name=name,
                carrier=carrier,
            )
            for i, each in zip(indices, reduced, strict=True):
                results[i] = each
        return (None, None, *results)
