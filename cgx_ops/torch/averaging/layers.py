"""Settings by layer: names of layers, and CGX's functions that change them for this process.

The functions (register_model, exclude_layer, set_quantization_bits, set_quantization_bucket_size)
change the Rules of this process. Rules need no list of layers. Registering a model only adds
checks: a pattern that matches no layer, or a layer of another size, is reported.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ops import Config, Rules, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops._core.user_warnings import warn_once
from cgx_ops.errors import InvalidArgument
from cgx_ops.rules import rule_of_part

# Attribute names of wrapped modules: torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def layer_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that torch's wrappers add.

    Removes the attribute names of torch.compile, checkpoint_wrapper and FullyShardedDataParallel,
    as state_dict() does.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_layers(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a model's parameters by the names that they have without wrappers.

    Besides the parts that layer_name() removes, this removes the `module` of
    DistributedDataParallel.
    """
    replicated = [
        layer_name(f"{name}.module.".removeprefix("."))
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel)
    ]
    named = []
    for full_name, parameter in model.named_parameters():
        name = layer_name(full_name)
        for prefix in reversed(replicated):  # the inner ones first
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        named.append((name, parameter))
    return named


@dataclass(frozen=True)
class Layer:
    """The properties of a parameter that rules depend on.

    Attributes:
        name: as in model.named_parameters(), through layer_name(); "" if unknown.
        dimensions: number of dimensions.
        numel: number of elements.
    """

    name: str
    dimensions: int
    numel: int


def segments_of(
    rules: Rules, layers: Sequence[Layer], offsets: Sequence[int], config: Config
) -> list[Segment]:
    """Return the segments of layers that start at `offsets` in a buffer, with their settings."""
    return [
        Segment(offset, layer.numel, rules.of(layer.name, layer.dimensions, config))
        for layer, offset in zip(layers, offsets, strict=True)
    ]


# ---- CGX's functions -----------------------------------------------------------------------------


@dataclass
class _Registered:
    """The process-wide state: rules, and the sizes of registered layers by name."""

    rules: Rules
    sizes: dict[str, int]


_registered = _Registered(Rules(), {})


def process_rules() -> Rules:
    """Return the rules of this process, which every hook without its own rules uses."""
    return _registered.rules


def register_model(layers: nn.Module | Iterable[tuple[str, int]]) -> None:
    """Register the layers of a model, so that wrong layer names and sizes are reported.

    Optional. Call it before the first forward of DistributedDataParallel. Registration restricts
    nothing: other allreduces and other models remain possible.

    Args:
        layers: the model; or (name, number of elements) of each layer, as in `[(name, p.numel())
            for name, p in model.named_parameters()]`.

    Raises:
        InvalidArgument: a layer is listed twice, was registered before with another size, or its
            size is not an integer of 0 or more.

    Example:
        >>> import torch
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.register_model(torch.nn.Linear(8, 2))
        >>> cgx_ops.torch.set_quantization_bits("weight", 8)
        >>> cgx_ops.torch.forget_models()
    """
    if isinstance(layers, nn.Module):
        layers = [(name, p.numel()) for name, p in named_layers(layers)]
    new: dict[str, int] = {}
    for name, numel in layers:
        try:
            size = operator.index(numel)
        except TypeError:
            size = -1
        if size < 0:
            raise InvalidArgument(
                f"register_model: layer '{name}' has {numel!r} elements; pass p.numel()"
            )
        name = layer_name(name)
        if name in new:
            raise InvalidArgument(f"register_model: layer '{name}' is listed twice")
        known = _registered.sizes.get(name, size)
        if known != size:
            raise InvalidArgument(
                f"register_model: layer '{name}' was registered with {known} elements and now has "
                f"{size}; call cgx_ops.torch.forget_models() before registering another model"
            )
        new[name] = size
    _registered.sizes.update(new)
    _registered.rules.warn_of_unmatched(_registered.sizes)


def forget_models() -> None:
    """Remove all registered layers and all rules that were set for them.

    Example:
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.exclude_layer("head")
        >>> cgx_ops.torch.forget_models()  # no layer is excluded any more
    """
    _registered.sizes.clear()
    _registered.rules = Rules()


def exclude_layer(pattern: str) -> None:
    """Send the gradients of matching layers exact.

    The last call that matches a layer decides. The settings apply to every DDP hook state that
    was created without rules.

    Args:
        pattern: part of a layer's name, or a glob such as `*.bias`.

    Raises:
        InvalidArgument: the pattern is empty, is not a str, or names only a wrapper of torch.

    Example:
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.exclude_layer("lm_head")
        >>> cgx_ops.torch.exclude_layer("*.bias")
        >>> cgx_ops.torch.forget_models()
    """
    _add("exclude_layer", pattern, bits=EXACT_BITS)


def set_quantization_bits(pattern: str, bits: int) -> None:
    """Set the bits of matching layers.

    The last call that matches a layer decides. The settings apply to every DDP hook state that
    was created without rules.

    Args:
        pattern: part of a layer's name, or a glob such as `*.bias`.
        bits: 1 to 8, or 32 (exact).

    Raises:
        InvalidArgument: the bits are out of range; or the pattern is empty, is not a str, or names
            only a wrapper of torch.

    Example:
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.set_quantization_bits("embedding", 8)
        >>> cgx_ops.torch.forget_models()
    """
    _add("set_quantization_bits", pattern, bits=bits)


def set_quantization_bucket_size(pattern: str, bucket_size: int) -> None:
    """Set how many values of matching layers share one minimum and step.

    The last call that matches a layer decides. The settings apply to every DDP hook state that
    was created without rules.

    Args:
        pattern: part of a layer's name, or a glob such as `*.bias`.
        bucket_size: number of values.

    Raises:
        InvalidArgument: the bucket size is out of range; or the pattern is empty, is not a str, or
            names only a wrapper of torch.

    Example:
        >>> import cgx_ops.torch
        >>> cgx_ops.torch.set_quantization_bucket_size("attention", 128)
        >>> cgx_ops.torch.forget_models()
    """
    _add("set_quantization_bucket_size", pattern, bucket_size=bucket_size)


def _add(function: str, pattern: object, **settings: Any) -> None:
    """Insert a rule before the others, so that the last call takes precedence."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgument(
            f"{function}: the pattern is {pattern!r}; pass a part of a layer's name, or a glob"
        )
    if not layer_name(pattern):
        raise InvalidArgument(
            f"{function}: the pattern {pattern!r} names a wrapper of torch, which is not part of "
            "layer names; pass a part of the name that the layer has without the wrapper"
        )
    rule = rule_of_part(layer_name(pattern), **settings)
    _registered.rules = _registered.rules.with_first(rule)
    if _registered.sizes:
        Rules().with_first(rule).warn_of_unmatched(_registered.sizes)


def check_model(layers: Sequence[Layer], rules: Rules) -> None:
    """Compare a model that is about to train with the registered layers and with its rules.

    Raises:
        InvalidArgument: a layer was registered with another size.
    """
    for layer in layers:
        numel = _registered.sizes.get(layer.name, layer.numel)
        if numel != layer.numel:
            raise InvalidArgument(
                f"layer '{layer.name}' was registered with {numel} elements, but has {layer.numel} "
                "in the model that DistributedDataParallel trains: register this model instead"
            )
    if _registered.sizes:
        missing = [layer.name for layer in layers if layer.name not in _registered.sizes]
        if missing:
            warn_once(
                f"{len(missing)} of {len(layers)} layers were not registered, for example "
                f"'{missing[0]}'; rules by name apply to them, too"
            )
    names = [layer.name for layer in layers]
    # The process's rules are for all its models; a rule need not match a layer of each.
    others = _registered.sizes if rules is _registered.rules else ()
    where = "DistributedDataParallel: "
    rules.warn_of_unmatched([*names, *others], where)
