"""Config: every knob of a quantized collective, checked when it is made.

What a knob accepts, its default and its words are the core's (csrc/config.cc): this file asks.
"""

import ast
import functools
import numbers
import operator
import os
from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, TypedDict

from cgx_ops._core import environment, library, structs
from cgx_ops._core.tables import ACCEPTED, COMPRESSORS, DEFAULTS, EXACT_BITS, OF_COMPRESSOR
from cgx_ops.errors import InvalidArgument

Compressor = Literal[
    "uniform", "levels", "sign", "onebit", "ternary", "qsgd", "half", "topk", "threshold",
    "randk",
]  # fmt: skip
Rounding = Literal["stochastic", "nearest", "shift"]
Algorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical", "by_hosts"]

_values = operator.attrgetter(*ACCEPTED)
_TEXT = " ".join(f"{name}={{!r}}" for name in ACCEPTED)


def _plain(value: Any) -> Any:
    """Return a number or a str of any library as Python's own, all else as it is."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


@functools.lru_cache(maxsize=1024)  # to look a text up takes a tenth of the time
def _parsed(text: str) -> structs.Config:
    return library.parse_config(text)


@functools.lru_cache(maxsize=4096)  # to write a text takes as long as to quantize a small layer
def _native_of(config: "Config") -> structs.Config:
    return _parsed(str(config))


@dataclass(frozen=True)
class Config:
    """How values travel. Frozen, comparable and hashable; change one with dataclasses.replace().

    Raises InvalidArgument (a ValueError) that names the field, its value and what it accepts.

    Attributes:
        bits: of a quantized value: "uniform" has 1-8, "levels" 1-4, "qsgd" 2-8, other compressors
            a fixed width; 32 sends everything exact, whatever the compressor.
            cgx_ops.bits_for() measures which bits are fastest.
        bucket_size: elements that share one minimum and step, scale, or choice of the largest.
        rounding: "stochastic" is unbiased; "nearest" has half the worst error; "shift" is unbiased
            with the error of nearest: each bucket's grid is moved by one random fraction of a step
            before values go to the nearest point (dithering; QSDP, Markov et al., ICML 2023). None:
            the compressor's own, which for "uniform" is "stochastic".
        algorithm: "auto" picks by size and hosts; "one_shot", "sra" (scatter-reduce-allgather),
            "ring", "hierarchical" (ranks of a host, then hosts; "sra" where that is one level);
            "by_hosts": what "auto" picks for large messages, whatever the size of this one.
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: hierarchical: bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a last bucket that is not full exact.
        minimal_size: tensors of fewer than max(16, minimal_size) elements travel exact.
        compressor: what values become: docs/reference/wire_format.md, section 8, and docs/explanation/numerics.md have
            each one's bytes and error.
        density: of "topk", "threshold" and "randk": the share of values that travel, more than 0
            and at most 1; None: 0.01.
        value_bits: of the values that "topk" and "threshold" send: 1-8, 16, 32; None: 32 (exact).
        rotation: so many values of a bucket, a power of two, are rotated by a Hadamard matrix
            before they are encoded, which makes those of heavy tails easier; None: none.
        clip: "ternary" clips values at 2.5 times their bucket's root mean square.
        error_feedback: whether training steps keep the quantization error of a gradient as its
            residual and add it in the next step. None: where the encoding is biased, that is,
            its expectation is not the value: "uniform" with nearest rounding, "levels", "onebit",
            "topk", "threshold" and "randk".
        residual_decay: with error feedback, the part of the residual that is added, more than 0
            and at most 1. Less than 1 drops the rest; MergeComp's memory has 0.9.
    """

    bits: int = DEFAULTS["bits"]
    bucket_size: int = DEFAULTS["bucket_size"]
    rounding: Rounding | None = DEFAULTS["rounding"]
    algorithm: Algorithm = DEFAULTS["algorithm"]
    gather_bits: int | None = DEFAULTS["gather_bits"]
    intra_bits: int | None = DEFAULTS["intra_bits"]
    skip_incomplete_buckets: bool = DEFAULTS["skip_incomplete_buckets"]
    minimal_size: int = DEFAULTS["minimal_size"]
    compressor: Compressor = DEFAULTS["compressor"]
    density: float | None = DEFAULTS["density"]
    value_bits: int | None = DEFAULTS["value_bits"]
    rotation: int | None = DEFAULTS["rotation"]
    clip: bool = DEFAULTS["clip"]
    error_feedback: bool | None = DEFAULTS["error_feedback"]
    residual_decay: float = DEFAULTS["residual_decay"]

    def __post_init__(self) -> None:
        for name, value in zip(ACCEPTED, _values(self), strict=True):
            if type(value) not in (int, float, str, bool, NoneType):
                object.__setattr__(self, name, _plain(value))
        try:
            _parsed(str(self))
        except InvalidArgument as error:
            if (name := error.field) is None:  # fields that do not belong together
                raise
            refusal = InvalidArgument(
                f"Config.{name} is {getattr(self, name)!r}; it must be {ACCEPTED[name]}"
            )
            refusal.field = name
            raise refusal from None

    def with_own(self, **own: Any) -> "Config":
        """Return this Config with fields of a part's own, such as a layer's.

        A compressor of its own leaves behind what was said for the other one, but that bits stay
        exact: what it has itself is its default, unless it is among `own`.
        """
        if own.get("compressor", self.compressor) != self.compressor:
            left = {name: DEFAULTS[name] for name in OF_COMPRESSOR}
            if self.bits == EXACT_BITS:
                del left["bits"]
            own = {**left, **own}
        if own.get("bits") == EXACT_BITS:
            own["error_feedback"] = None  # nothing is lost
        return replace(self, **own) if own else self

    @property
    def draws(self) -> bool:
        """Whether a seed counts: for noise, or for the places of "randk"."""
        if self.bits == EXACT_BITS:
            return False
        return self._rounds != "nearest" or self.compressor == "randk"

    @property
    def keeps_residuals(self) -> bool:
        """Whether gradients that are reduced step by step have error feedback.

        By default they do where the expectation of the encoding is not the value.
        """
        if self.error_feedback is not None:
            return self.error_feedback
        biased = COMPRESSORS[self.compressor]["biased"] and self._rounds == "nearest"
        return biased and self.bits != EXACT_BITS

    @property
    def _rounds(self) -> str:
        """The rounding that is used: the compressor's own where none is given."""
        return self.rounding or COMPRESSORS[self.compressor]["roundings"][0]

    @property
    def knobs(self) -> dict[str, Any]:
        """The fields by name."""
        return dict(zip(ACCEPTED, _values(self), strict=True))

    def __str__(self) -> str:
        """Return all fields as text: "bits=4 bucket_size=512 ...". Config.parse() reads it."""
        return _TEXT.format(*_values(self))

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Return the Config of a text such as "bits=4 rounding='nearest'".

        Args:
            text: fields as `name=value`, separated by one space, values as Python writes them.
                A field that is left out has its default.

        Raises:
            InvalidArgument: names the field, its text and the accepted values.

        Example:
            >>> Config.parse("bits=2 compressor='levels'") == Config(bits=2, compressor="levels")
            True
        """
        _parsed(text)
        given = (each.split("=", 1) for each in text.split(" ") if each)
        return cls(**{name: ast.literal_eval(value) for name, value in given})

    @property
    def native(self) -> structs.Config:
        """The fields as a cgx_config_t, to be copied."""
        return _native_of(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Config":
        """Return the Config that the CGX_* variables describe: that of the backend "cgx".

        As in CGX, bits are 32 (exact) unless a variable sets them or a compressor.

        Args:
            environ: read instead of os.environ.

        Raises:
            InvalidArgument: names the variable, its text and what it accepts.
        """
        return cls(**environment.fields(os.environ if environ is None else environ))


def require_feedback(config: Config) -> None:
    """Raise InvalidArgument if a config has error feedback, and that would not converge."""
    if not config.keeps_residuals:
        return
    try:
        library.call("cgx_config_check_feedback", byref(config.native))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; or Config(error_feedback=False)") from None


def check_config(config: Config | None) -> None:
    """Refuse what is no Config, where one may be left out."""
    if config is not None and not isinstance(config, Config):
        remedy = "; calls with several tensors take rules=" if hasattr(config, "rules") else ""
        raise InvalidArgument(f"config is {config!r}; it must be a cgx_ops.Config, or None{remedy}")


class Keywords(TypedDict, total=False):
    """The fields of Config that every call takes as keywords, too."""

    bits: int | None
    bucket_size: int | None
    compressor: Compressor | None
    rounding: Rounding | None


_DEFAULT = Config()


def config_of(
    config: Config | None,
    *,
    bits: int | None = None,
    bucket_size: int | None = None,
    compressor: Compressor | None = None,
    rounding: Rounding | None = None,
) -> Config:
    """Return the Config of a call: `config`, or Config(), with the keywords that are not None.

    Raises:
        InvalidArgument: `config` is no Config, or a field is out of its range.
    """
    check_config(config)
    config = config or _DEFAULT
    if bits is bucket_size is compressor is rounding is None:
        return config
    try:
        return _overridden(config, bits, bucket_size, compressor, rounding)
    except TypeError:  # a value that cannot be hashed: the core refuses it
        return _overridden.__wrapped__(config, bits, bucket_size, compressor, rounding)


@functools.lru_cache(maxsize=1024, typed=True)  # repeated calls are known by their Config's id
def _overridden(config: Config, *values: Any) -> Config:
    names = Keywords.__annotations__
    given = {name: v for name, v in zip(names, values, strict=True) if v is not None}
    return config.with_own(**given)
