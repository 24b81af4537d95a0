"""How the leaves of a call travel: its knobs and rules, checked where the call is traced.

1. knobs become the call's Config, and each rule one of its own
2. rounding follows from the key: to nearest without one, at random with one, as far as the
   compressor can
3. what cannot be: a compressor that this collective cannot send, residuals that would not converge
"""

from collections.abc import Hashable, Iterable, Mapping
from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any

import jax

from cgx_ops import _native
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.jax import _compat
from cgx_ops.jax._keys import check_key
from cgx_ops.jax.primitive import Carrier, Verb
from cgx_ops.planner import Plan
from cgx_ops.rules import EXACT_BITS, Rules, require_rules

_COMPRESSORS: dict[str, dict[str, Any]] = {row["name"]: row for row in _native.COMPRESSORS}
# How values are rounded is said by the key.
_OURS = tuple(row["name"] for row in _native.CONFIG_FIELDS if row["name"] != "rounding")
_WHOLE = ("auto", "one_shot", "by_hosts")  # algorithms that serve what cannot be cut


# ---- 1. knobs and rules --------------------------------------------------------------------------


@dataclass(frozen=True)
class Knobs:
    """How the leaves of a call travel, checked.

    Attributes:
        caller: for errors.
        config: what the core knows.
        key: a PRNG key or None.
        name: the user's, or "".
        rules: settings of leaves by their paths; None: there are none, not for vectors either.
        fuse: whether all leaves of a dtype are one message; or a plan of who shares one.
        carrier: who moves the bytes.
    """

    caller: str
    config: Config
    key: jax.Array | None
    name: str
    rules: Rules | None
    fuse: bool | Plan
    carrier: Carrier

    @property
    def configs(self) -> list[Config]:
        """Return the call's config, and what each rule makes of it."""
        return _configs(self.caller, self.config, self.rules, self.key)

    def config_of(self, path: Any, leaf: Any) -> Config:
        """Return how a leaf is sent, by its path in the tree and its shape."""
        if self.rules is None:
            return self.config
        dimensions = len(jax.numpy.shape(leaf))
        found = self.rules.of(name_of_leaf(path), dimensions, self.config)
        return _rounded(self.caller, found, self.key)

    def warn_of_unmatched(self, tree: Any) -> None:
        """Warn, once, of each rule that is for no leaf of a tree, the whole one of the user."""
        if self.rules:
            names = [name_of_leaf(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            self.rules.warn_of_unmatched(names, f"{self.caller}: ")


def name_of_leaf(path: Any) -> str:
    """Return the name of a leaf in rules and plans: its path, as in "layers.0.bias"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def checked_knobs(
    caller: str,
    *,
    key: jax.Array | None,
    name: str,
    verb: Verb = "allreduce",
    carrier: Carrier = "native",
    rules: Rules | None = None,
    fuse: bool | Plan = True,
    **knobs: Any,
) -> Knobs:
    """Check all that must be static, and the key. `knobs` are those that the core knows."""
    if "residual" in knobs:
        raise TypeError(
            f"{caller} takes no residual: psum_q and pmean_q do; average_gradients keeps its own"
        )
    if foreign := sorted(knobs.keys() - _OURS):
        raise TypeError(f"{caller} has no knob {', '.join(foreign)}; it has {', '.join(_OURS)}")
    _require_static(caller, {**knobs, "name": name, "carrier": carrier, "fuse": fuse})
    if carrier not in ("native", "xla"):
        raise ValueError(f"{caller}: carrier is {carrier!r}; it must be 'native' or 'xla'")
    if carrier == "xla" and (algorithm := knobs.get("algorithm")) in ("ring", "hierarchical"):
        raise ValueError(
            f"{caller}: in algorithm={algorithm!r} ranks pass messages on, one after the other, "
            "which carrier='xla' cannot: use 'auto', 'one_shot' or 'sra'"
        )
    if not isinstance(fuse, bool | Plan):
        raise TypeError(f"{caller}: fuse is {fuse!r}; it must be a bool or a cgx_ops.planner.Plan")
    if not isinstance(name, str):
        raise TypeError(f"{caller}: name is {name!r}; it must be a str")
    check_key(caller, key)
    if knobs.get("bits") == "auto":
        raise ValueError(
            f"{caller}: bits are part of the compiled program, so 'auto' must be decided before: "
            "bits=cgx_ops.bits_for(cgx_ops.init(), numel), with the values of a message"
        )
    config = _rounded(caller, Config(**knobs), key)
    checked = Knobs(caller, config, key, name, _checked_rules(caller, rules), fuse, carrier)
    for config in checked.configs:
        _require_way(caller, config, verb)
    return checked


def _require_static(caller: str, knobs: Mapping[str, Any]) -> None:
    for knob, value in knobs.items():
        if isinstance(value, _compat.Tracer):
            raise TypeError(
                f"{caller}: {knob} must be a static Python value, not {value!r}: it is part of the "
                "compiled program. Pass it by closure, functools.partial or static_argnames"
            )


def _checked_rules(caller: str, rules: Rules | None) -> Rules | None:
    if rules is None:
        return None
    for rule in require_rules(rules, f"{caller}: ").rules:
        if "rounding" in dict(rule.settings):
            raise ValueError(
                f"{caller}: the rule '{rule.label}' sets rounding; the key says how values are "
                "rounded: leave it out"
            )
    return rules


def _configs(
    caller: str, config: Config, rules: Rules | None, key: jax.Array | None
) -> list[Config]:
    if rules is None:
        return [config]
    try:
        return [_rounded(caller, each, key) for each in rules.configs(config)]
    except InvalidArgument as error:
        raise InvalidArgument(f"{caller}: {error}") from None


# ---- 2. rounding ---------------------------------------------------------------------------------


def _rounded(caller: str, config: Config, key: jax.Array | None) -> Config:
    """Return the config with the rounding that follows from the key."""
    served = _COMPRESSORS[config.compressor]["roundings"]
    wanted = "nearest" if key is None else "stochastic"
    config = replace(config, rounding=wanted if wanted in served else served[0])
    if key is None and config.draws:
        what = "places that all devices draw alike" if is_randk(config) else "random rounding only"
        same = ", the same on all of them" if is_randk(config) else ""
        raise ValueError(
            f"{caller}: compressor={config.compressor!r} has {what}, and there is no key: give "
            f"key=jax.random.key(step){same}"
        )
    return config


def is_randk(config: Config) -> bool:
    """Tell whether the key says which values travel."""
    return config.compressor == "randk" and config.bits != EXACT_BITS


def check_places(knobs: Knobs, axes: tuple[Hashable, ...]) -> None:
    """Require one key of all devices of the axes where they draw places, as far as types tell."""
    if knobs.key is None or not any(map(is_randk, knobs.configs)):
        return
    differs = _compat.varying_axes(knobs.key) & frozenset(axes)
    if differs:
        raise ValueError(
            f"{knobs.caller}: compressor='randk' needs an equal key on all devices, and the key "
            f"varies over {sorted(differs, key=str)}: they would send values of different places. "
            "Pass the key with in_specs=P()"
        )


# ---- 3. what cannot be ---------------------------------------------------------------------------


def is_vote(config: Config) -> bool:
    """Tell whether a sum is a majority vote."""
    return config.compressor == "sign" and config.bits != EXACT_BITS


def refuse_on_gpus(function: str, configs: Iterable[Config]) -> None:
    """Refuse, as a program is lowered for GPUs, what the core would refuse when it runs."""
    for config in configs:
        why = _COMPRESSORS[config.compressor]["device"]
        if why and config.bits != EXACT_BITS:
            raise NotImplementedError(
                f"{function} with compressor={config.compressor!r} on GPUs: {why}. Use "
                "'levels' or another one that GPUs have, or reduce on CPU devices"
            )


def can_be_cut(config: Config) -> bool:
    """Tell whether shards of a leaf can travel apart; else one_shot sends it, and its message."""
    return config.bits == EXACT_BITS or _COMPRESSORS[config.compressor]["sliced"]


def _require_way(caller: str, config: Config, verb: Verb) -> None:
    if can_be_cut(config):
        return
    if verb != "allreduce" or config.algorithm not in _WHOLE:
        raise ValueError(
            f"{caller}: what compressor={config.compressor!r} sends cannot be cut into shards, as "
            f"{caller if verb != 'allreduce' else f'algorithm={config.algorithm!r}'} does: use "
            "psum_q, pmean_q or allreduce_q with algorithm 'auto' or 'one_shot', or 'topk'"
        )


def keeps_by_default(config: Config) -> bool:
    """Tell whether a leaf's gradients have error feedback where nobody says: see docs/jax.md."""
    return config.compressor == "uniform" or _COMPRESSORS[config.compressor]["biased"]


def refuse_idle_residual(caller: str, residual: Any, bits: Any, rules: Rules | None) -> None:
    """Refuse a residual of a call that is exact by the caller's own words.

    Not of our own transformations: which of their leaves lose something they know themselves.
    """
    exact = type(bits) is int and bits == EXACT_BITS and not rules
    if exact and jax.tree.leaves(residual):
        raise ValueError(
            f"{caller} with a residual and bits=32: an exact call loses nothing that feedback "
            "could add: leave the residual out, or compress"
        )


def refuse_idle_feedback(caller: str, configs: Iterable[Config]) -> None:
    """Refuse error_feedback=True of a transformation all of whose leaves are exact."""
    if all(config.bits == EXACT_BITS for config in configs):
        raise ValueError(
            f"{caller} with error_feedback=True and bits=32: an exact call loses nothing that "
            "feedback could add: leave error_feedback out, or compress"
        )


def check_feedback(caller: str, config: Config) -> None:
    """Require that error feedback converges, if anything is lost.

    Raises:
        InvalidArgument (a ValueError): says why it does not.
    """
    if config.bits == EXACT_BITS:
        return
    try:
        _native.call("cgx_config_check_feedback", byref(config.native))
    except ValueError as error:
        raise type(error)(f"{caller}: {error}") from None
