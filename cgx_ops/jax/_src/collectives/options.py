"""How the leaves of a call are sent, checked where the call is traced.

1. options: the call's Config and rules, its key and name
2. rounding: explicit, or derived from the key
3. refusals: compressors that a collective cannot send, error feedback that does not converge
"""

import contextlib
import functools
from collections.abc import Hashable, Iterable, Iterator
from ctypes import byref
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax

from cgx_ops._core import library
from cgx_ops._core.call import Verb
from cgx_ops._core.tables import COMPRESSORS, EXACT_BITS
from cgx_ops.config import Config, Keywords, config_of
from cgx_ops.errors import InvalidArgument
from cgx_ops.jax._src.collectives.keys import check_key
from cgx_ops.jax._src.runtime import compat
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules, require_rules

Carrier = Literal["native", "xla"]

#: The default of collectives: all leaves, vectors too, have the call's Config.
COMPRESS_ALL = Rules(exact_vectors=False)


# ---- 1. options ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How the leaves of a call are sent, checked.

    Attributes:
        caller: The public function, for errors.
        config: The user's; rules and the key complete it for each leaf.
        key: A PRNG key or None.
        name: The user's, or "".
        rules: Settings of leaves by their paths.
        fuse: Whether leaves of a dtype share messages; or a plan.
        carrier: Which transport sends messages: cgx's own, or XLA's collectives.
        verb: The collective.
        uses_xla: Whether the caller also adds XLA's own collectives, which names do not
            distinguish.
    """

    caller: str
    config: Config
    key: jax.Array | None
    name: str
    rules: Rules
    fuse: bool | Plan
    carrier: Carrier
    verb: Verb
    uses_xla: bool = field(default=False, kw_only=True)

    def of(self, path: Any, leaf: Any) -> Config:
        """Return the Config of a leaf, by its path in the tree and its shape."""
        with _named(self.caller):
            config = self.rules.of(name_of_leaf(path), len(jax.numpy.shape(leaf)), self.config)
            return _rounded(config, self.key is not None)

    def of_tree(self, tree: Any) -> Any:
        """Return the Config of each leaf of a tree, as a tree like it."""
        return jax.tree_util.tree_map_with_path(self.of, tree)

    def keeps(self, path: Any, leaf: Any) -> bool:
        """Return whether a leaf has a residual; raise ValueError if it would not converge."""
        config = self.of(path, leaf)
        if config.keeps_residuals:
            check_feedback(f"{self.caller}: {name_of_leaf(path) or 'x'}", config)
        return config.keeps_residuals

    def refuse_idle_feedback(self, tree: Any) -> None:
        """Refuse error_feedback=True where all leaves of a tree are exact."""
        if self.config.error_feedback and _all_exact(self, tree):
            raise ValueError(
                f"{self.caller}: error_feedback=True, but all leaves are sent exact, without a "
                "quantization error: leave error_feedback out, or use fewer bits"
            )

    def refuse_idle_residual(self, residual: Any) -> None:
        """Refuse a residual if the call's arguments make all leaves exact."""
        if self.config.is_exact and not self.rules and jax.tree.leaves(residual):
            raise ValueError(
                f"{self.caller}: a residual with bits=32 or 'lossless': exact calls have no "
                "quantization error: leave the residual out, or use fewer bits"
            )

    def at_step(self, step: jax.Array) -> "Options":
        """Return these options with the noise of one step."""
        return self if self.key is None else self.with_key(jax.random.fold_in(self.key, step))

    def with_key(self, key: jax.Array | None) -> "Options":
        """Return these options with another key."""
        return replace(self, key=key)

    def of_message(self, message: str) -> "Options":
        """Return these options for one of several messages, whose names differ."""
        return replace(self, name=f"{self.name}/{message}" if self.name else "")

    def warn_of_unmatched(self, tree: Any) -> None:
        """Warn, once, about each rule that matches no leaf of the user's tree."""
        if self.rules:
            names = [name_of_leaf(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            self.rules.warn_of_unmatched(names, f"{self.caller}: ")


def name_of_leaf(path: Any) -> str:
    """Return the name of a leaf in rules and plans: its path, such as "layers.0.bias"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def checked_options(
    caller: str,
    config: Config | None,
    keywords: Keywords,
    *,
    key: jax.Array | None = None,
    name: str = "",
    rules: Rules = COMPRESS_ALL,
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    verb: Verb = "allreduce",
) -> Options:
    """Check a call's arguments; all except the key must be static."""
    unknown = keywords.keys() - Keywords.__annotations__.keys()
    if unknown:
        raise TypeError(f"{caller}() got an unexpected keyword argument {min(unknown)!r}")
    for argument, value in {**keywords, "name": name, "carrier": carrier, "fuse": fuse}.items():
        if isinstance(value, compat.Tracer):
            raise TypeError(
                f"{caller}: {argument} must be a static Python value, not {value!r}: it is part of "
                "the compiled program. Pass it by closure, functools.partial or static_argnames"
            )
    with _named(caller):
        config = config_of(config, **keywords)
    if carrier not in ("native", "xla"):
        raise ValueError(f"{caller}: carrier is {carrier!r}; it must be 'native' or 'xla'")
    if carrier == "xla" and config.algorithm in ("ring", "hierarchical"):
        raise ValueError(
            f"{caller}: algorithm={config.algorithm!r} is not available with carrier='xla': use "
            "'auto', 'one_shot' or 'sra', or carrier='native'"
        )
    if not isinstance(fuse, bool | Plan):
        raise TypeError(f"{caller}: fuse is {fuse!r}; it must be a bool or a cgx_ops.planner.Plan")
    if not isinstance(name, str):
        raise TypeError(f"{caller}: name is {name!r}; it must be a str")
    check_key(caller, key)
    require_rules(rules, f"{caller}: ")
    options = Options(caller, config, key, name, rules, fuse, carrier, verb)
    if not rules:  # with rules, leaves are checked with their paths
        options.of((), jax.ShapeDtypeStruct((1, 1), "float32"))
    return options


@contextlib.contextmanager
def _named(caller: str) -> Iterator[None]:
    """Prefix errors of a Config or of rules with the caller."""
    try:
        yield
    except InvalidArgument as error:
        named = InvalidArgument(f"{caller}: {error}")
        named.field = error.field
        raise named from None


# ---- 2. rounding ---------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _rounded(config: Config, has_key: bool) -> Config:
    """Return a config with explicit rounding: its own, or the one that the key implies."""
    if config.rounding is None:
        served = COMPRESSORS[config.compressor]["roundings"]
        wanted = "stochastic" if has_key else "nearest"
        config = replace(config, rounding=wanted if wanted in served else served[0])
    if config.is_random and not has_key:
        if is_randk(config):
            what = "compressor='randk' draws which values are sent"
            remedy = "key=jax.random.key(step), equal on all devices"
        else:
            what = f"compressor={config.compressor!r} with rounding={config.rounding!r} is random"
            remedy = "key=jax.random.key(step)"
            if "nearest" in COMPRESSORS[config.compressor]["roundings"]:
                remedy += ", or rounding='nearest'"
        raise InvalidArgument(f"{what}, and there is no key: give {remedy}")
    return config


def is_randk(config: Config) -> bool:
    """Return whether the key selects which values are sent."""
    return config.compressor == "randk" and config.bits != EXACT_BITS


def check_index_key(
    caller: str, key: jax.Array | None, configs: Iterable[Config], axes: tuple[Hashable, ...]
) -> None:
    """Require the same key on all devices if it selects indices, as far as types show it."""
    if key is None or not any(map(is_randk, configs)):
        return
    differs = compat.varying_axes(key) & frozenset(axes)
    if differs:
        raise ValueError(
            f"{caller}: compressor='randk' needs the same key on all devices, and the key varies "
            f"over {sorted(differs, key=str)}: devices would send values of different indices. "
            "Pass the key with in_specs=P()"
        )


# ---- 3. refusals ---------------------------------------------------------------------------------


def is_vote(config: Config) -> bool:
    """Return whether a sum is a majority vote."""
    return config.compressor == "sign" and config.bits != EXACT_BITS


def refuse_on_gpus(function: str, configs: Iterable[Config]) -> None:
    """Refuse compressors without GPU kernels when a program is lowered for GPUs."""
    for config in configs:
        why = COMPRESSORS[config.compressor]["device"]
        if why and config.bits != EXACT_BITS:
            raise NotImplementedError(
                f"{function} with compressor={config.compressor!r} on GPUs: {why}. Use 'levels' or "
                "another compressor that GPUs support, or reduce on CPU devices"
            )


def check_feedback(caller: str, config: Config) -> None:
    """Require that error feedback converges, unless the leaf is exact.

    Raises:
        InvalidArgument (a ValueError): It does not; the text has the reason.
    """
    if config.is_exact:
        return
    try:
        library.call("cgx_config_check_feedback", byref(config.native))
    except ValueError as error:
        raise type(error)(f"{caller}: {error}") from None


def _all_exact(options: Options, tree: Any) -> bool:
    configs = jax.tree.leaves(options.of_tree(tree))
    return bool(configs) and all(config.is_exact for config in configs)
