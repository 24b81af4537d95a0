"""How each layer of a model travels: in how many bits, by which compressor.

  1. the names of layers without torch's wrappers, and the segments that Rules make of layers
  2. CGX's functions, which change the Rules of this process: register_model, exclude_layer,
     set_quantization_bits, set_quantization_bucket_size

Rules need no list of layers. Registering one reports mistakes: a pattern that matches no layer, a
layer of another size.
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

# How wrappers hold the module that they wrap: torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def layer_name(name: str) -> str:
    """Return a name of named_parameters(), or of named_modules(), without what wrappers add to it.

    Left out is what torch leaves out of state_dict(): the names by which torch.compile,
    checkpoint_wrapper and FullyShardedDataParallel hold the modules that they wrap.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_layers(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return a model's parameters with the names that they have without wrappers.

    Beside those of layer_name() it leaves out the `module` of DistributedDataParallel.
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
    """A parameter as rules see it.

    Attributes:
        name: as model.named_parameters() has it, by layer_name(); "" if unknown.
        dimensions: of its shape.
        numel: number of elements.
    """

    name: str
    dimensions: int
    numel: int


def segments_of(
    rules: Rules, layers: Sequence[Layer], offsets: Sequence[int], config: Config
) -> list[Segment]:
    """Return the layers of a buffer, which begin at `offsets`, each with its own settings."""
    return [
        Segment(offset, layer.numel, rules.of(layer.name, layer.dimensions, config))
        for layer, offset in zip(layers, offsets, strict=True)
    ]


# ---- CGX's names ---------------------------------------------------------------------------------


@dataclass
class _Registered:
    """What CGX keeps per process: rules, and the layers of registered models."""

    rules: Rules
    sizes: dict[str, int]


_registered = _Registered(Rules(), {})


def process_rules() -> Rules:
    """Return the Rules that CGX's functions change: those of every hook that is given none."""
    return _registered.rules


def register_model(layers: nn.Module | Iterable[tuple[str, int]]) -> None:
    """Tell the layers of a model, so that wrong names and sizes are noticed.

    Call it before DistributedDataParallel's first forward. Unlike in CGX it restricts nothing: an
    allreduce that is no gradient bucket stays legal, and models may follow each other.

    Args:
        layers: (name, number of elements) of each, as from `[(name, p.numel()) for name, p in
            model.named_parameters()]`; or the model itself.

    Raises:
        InvalidArgument: a layer listed twice, registered before with another size, or whose size
            is no integer of 0 or more.
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
                f"register_model: layer '{name}' has {numel!r} elements; give p.numel()"
            )
        name = layer_name(name)
        if name in new:
            raise InvalidArgument(f"register_model: layer '{name}' is listed twice")
        known = _registered.sizes.get(name, size)
        if known != size:
            raise InvalidArgument(
                f"register_model: layer '{name}' was registered with {known} elements and now has "
                f"{size}; call cgx_ops.torch.forget_models() before another model"
            )
        new[name] = size
    _registered.sizes.update(new)
    _registered.rules.warn_of_unmatched(_registered.sizes)


def forget_models() -> None:
    """Forget registered layers, and every rule that was set for them."""
    _registered.sizes.clear()
    _registered.rules = Rules()


def exclude_layer(pattern: str) -> None:
    """Have layers travel exact: those with `pattern` in their name, or that a glob matches."""
    _add("exclude_layer", pattern, bits=EXACT_BITS)


def set_quantization_bits(pattern: str, bits: int) -> None:
    """Have layers travel in so many bits: those with `pattern` in their name, or of a glob.

    Args:
        pattern: a part of the name, or a glob.
        bits: 1 to 8, or 32 (exact).
    """
    _add("set_quantization_bits", pattern, bits=bits)


def set_quantization_bucket_size(pattern: str, bucket_size: int) -> None:
    """Have so many values of such layers share a minimum and step; see set_quantization_bits."""
    _add("set_quantization_bucket_size", pattern, bucket_size=bucket_size)


def _add(function: str, pattern: object, **settings: Any) -> None:
    """Insert a rule in front of the others: the last call decides."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgument(
            f"{function}: the pattern is {pattern!r}; give a part of a layer's name, or a glob"
        )
    if not layer_name(pattern):
        raise InvalidArgument(
            f"{function}: the pattern {pattern!r} names a wrapper of torch, which the names of "
            "layers leave out; give a part of the name that the layer has without it"
        )
    rule = rule_of_part(layer_name(pattern), **settings)
    _registered.rules = _registered.rules.with_first(rule)
    if _registered.sizes:
        Rules().with_first(rule).warn_of_unmatched(_registered.sizes)


def check_model(layers: Sequence[Layer], rules: Rules) -> None:
    """Compare a model that is about to train with what was registered, and with its rules.

    Raises:
        InvalidArgument: a layer of the model was registered with another size.
    """
    for layer in layers:
        numel = _registered.sizes.get(layer.name, layer.numel)
        if numel != layer.numel:
            raise InvalidArgument(
                f"layer '{layer.name}' was registered with {numel} elements, and has {layer.numel} "
                "in the model that DistributedDataParallel trains: register this model"
            )
    if _registered.sizes:
        missing = [layer.name for layer in layers if layer.name not in _registered.sizes]
        if missing:
            warn_once(
                f"{len(missing)} of {len(layers)} layers were not registered, '{missing[0]}' for "
                "one; rules by name hold for them too"
            )
    names = [layer.name for layer in layers]
    # Rules for all models of this process; they need not match in each.
    others = _registered.sizes if rules is _registered.rules else ()
    where = "DistributedDataParallel: "
    rules.warn_of_unmatched([*names, *others], where)
