"""Config: the settings of a quantized collective, checked when it is made.

The accepted values and the defaults come from the core (csrc/config.cc).
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
from cgx_ops._core.tables import (
    ACCEPTED,
    COMPRESSORS,
    DEFAULTS,
    EXACT_BITS,
    OF_COMPRESSOR,
    SMALLEST_COMPRESSED,
)
from cgx_ops.errors import InvalidArgument

Compressor = Literal[
    "uniform", "levels", "sign", "onebit", "ternary", "qsgd", "half", "topk", "randk",
    "entropy", "lossless", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4",
]  # fmt: skip
Rounding = Literal["stochastic", "nearest", "shift"]
Algorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical", "by_hosts"]

_values = operator.attrgetter(*ACCEPTED)
_TEXT = " ".join(f"{name}={{!r}}" for name in ACCEPTED)


def _plain(value: Any) -> Any:
    """Return numbers and strings of other libraries as Python's own types, all else unchanged."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


@functools.lru_cache(maxsize=1024)  # a lookup takes a tenth of the time
def _parsed(text: str) -> structs.Config:
    return library.parse_config(text)


@functools.lru_cache(maxsize=4096)  # str() takes as long as quantizing a small layer
def _native_of(config: "Config") -> structs.Config:
    return _parsed(str(config))


@dataclass(frozen=True)
class Config:
    """The settings of a quantized collective: how values are compressed and sent.

    A Config is frozen, comparable and hashable. Use dataclasses.replace() to change one. The
    arguments are its attributes.

    Args:
        bits: Bits per value: 1-8 for "uniform", 1-4 for "levels", 2-8 for "qsgd"; other compressors
            have a fixed width. 32 sends values exact with any compressor. cgx_ops.bits_for()
            measures which bits are fastest.
        bucket_size: Elements that share one scale: a minimum and a step, a norm, or a top-k
            selection. The "mx" compressors ignore it.
        rounding: "stochastic" is unbiased; "nearest" has half the worst error; "shift" is unbiased
            with the error of "nearest": each bucket's grid is moved by a random fraction of a step
            (dithering; QSDP, Markov et al., ICML 2023). None: the default of the compressor, which
            is "stochastic" for "uniform".
        algorithm: "auto" (by size and hosts), "one_shot", "sra" (scatter-reduce, then allgather),
            "ring", "hierarchical" (within each host, then between hosts), or "by_hosts": the choice
            of "auto" for large messages, for messages of any size. In reduce_scatter and
            all_gather, "one_shot" and "ring" are "sra", where ranks send blocks directly.
        gather_bits: Bits of the reduced values on their way back. None: `bits`.
        intra_bits: Bits of values that are summed within their host, with "hierarchical". None:
            exact. An all_gather does not use it.
        skip_incomplete_buckets: Whether an incomplete last bucket is sent exact.
        minimal_size: Tensors with fewer than max(16, minimal_size) elements are sent exact.
        compressor: The compression method: "uniform", "levels", "sign", "onebit", "ternary",
            "qsgd", "half", "topk", "randk", "entropy", "lossless", "mxfp8", "mxfp8_e5m2", "mxfp4"
            or "nvfp4". The page "Compressors" of the reference has the bytes and the error of each.
        density: The share of values that "topk" and "randk" send: more than 0, at most 1. None:
            0.01.
        value_bits: Bits of the values that "topk" sends: 1-8, 16 or 32. None: 32 (exact).
        rotation: Block size, a power of two, of a Hadamard rotation before the encoding. It reduces
            the error of values with heavy tails. None: no rotation.
        rate: Mean bits per value of "entropy", headers included: from 0.25 to 8. None: 2.0.
        clip: Whether "ternary" clips values at 2.5 times the root mean square of their bucket.
        error_feedback: Whether training steps add the quantization error of a gradient to the next
            step's gradient. None: yes if the encoding is biased ("uniform" with nearest rounding,
            "levels", "onebit", "topk", "randk", "entropy", the block formats).
        residual_decay: With error feedback, the factor of the residual: more than 0, at most 1.
            Less than 1 discards a part of it; MergeComp uses 0.9.

    Raises:
        InvalidArgument: A value is not accepted, or fields exclude each other. The message has the
            field, its value and the accepted values.

    Example:
        >>> from dataclasses import replace
        >>> from cgx_ops import Config
        >>> config = Config(bits=4, rounding="nearest")
        >>> config.keeps_residuals
        True
        >>> replace(config, bits=8).bits
        8
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
    rate: float | None = DEFAULTS["rate"]
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
            if (name := error.field) is None:  # fields exclude each other
                raise
            refusal = InvalidArgument(
                f"Config.{name} is {getattr(self, name)!r}; it must be {ACCEPTED[name]}"
            )
            refusal.field = name
            raise refusal from None

    def with_own(self, **own: Any) -> "Config":
        """Return a copy with some fields replaced, such as those of one layer.

        If the compressor changes, the fields that belong to a compressor get their defaults, unless
        they are among `own`. 32 bits stay.

        Args:
            **own: Fields of Config and their new values.

        Raises:
            InvalidArgument: The new fields are not accepted.
        """
        if own.get("compressor", self.compressor) != self.compressor:
            left = {name: DEFAULTS[name] for name in OF_COMPRESSOR}
            if self.bits == EXACT_BITS:
                del left["bits"]
            own = {**left, **own}
        lossless = [name for name, row in COMPRESSORS.items() if row["exact"]]
        if own.get("bits") == EXACT_BITS or own.get("compressor") in lossless:
            own["error_feedback"] = None  # exact values have no error
        return replace(self, **own) if own else self

    @property
    def is_exact(self) -> bool:
        """Whether values are sent without an error: in 32 bits, or by "lossless"."""
        return self.bits == EXACT_BITS or COMPRESSORS[self.compressor]["exact"]

    def is_short(self, numel: int) -> bool:
        """Return whether a segment is too short to be compressed. Votes are at any size.

        Args:
            numel: The elements of the segment.
        """
        smallest = max(SMALLEST_COMPRESSED, self.minimal_size)
        return numel < smallest and self.compressor != "sign"

    @property
    def is_random(self) -> bool:
        """Whether a seed affects the result: rounding noise, or the indices of "randk"."""
        if self.bits == EXACT_BITS:
            return False
        return self._rounds != "nearest" or self.compressor == "randk"

    @property
    def keeps_residuals(self) -> bool:
        """Whether training steps use error feedback with this Config.

        By default they do if the encoding is biased, that is, if its expectation is not the value.
        """
        if self.error_feedback is not None:
            return self.error_feedback
        biased = COMPRESSORS[self.compressor]["biased"] and self._rounds == "nearest"
        return biased and self.bits != EXACT_BITS

    @property
    def _rounds(self) -> str:
        """The rounding in use: the compressor's default if `rounding` is None."""
        return self.rounding or COMPRESSORS[self.compressor]["roundings"][0]

    @property
    def fields(self) -> dict[str, Any]:
        """All fields and their values."""
        return dict(zip(ACCEPTED, _values(self), strict=True))

    def __str__(self) -> str:
        """Return all fields as text, "bits=4 bucket_size=512 ...", for Config.parse()."""
        return _TEXT.format(*_values(self))

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Return the Config that a text describes, such as "bits=4 rounding='nearest'".

        Args:
            text: Fields as `name=value`, separated by single spaces, with values in Python's
                notation. Other fields have their defaults.

        Raises:
            InvalidArgument: The text is not valid. The message has the field, its text and the
                accepted values.

        Example:
            >>> from cgx_ops import Config
            >>> Config.parse("bits=2 compressor='levels'") == Config(bits=2, compressor="levels")
            True
        """
        _parsed(text)
        given = (each.split("=", 1) for each in text.split(" ") if each)
        return cls(**{name: ast.literal_eval(value) for name, value in given})

    @property
    def native(self) -> structs.Config:
        """The fields as a cgx_config_t. Copy it; do not change it."""
        return _native_of(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Config":
        """Return the Config that the CGX_* variables describe, as the backend "cgx" uses it.

        As in CGX, bits are 32 (exact) unless a variable sets the bits or the compressor.

        Args:
            environ: The variables; None: os.environ.

        Raises:
            InvalidArgument: A variable is not valid. The message has its name, its text and the
                accepted values.

        Example:
            >>> from cgx_ops import Config
            >>> Config.from_env({"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}).bits
            4
        """
        return cls(**environment.fields(os.environ if environ is None else environ))


def require_feedback(config: Config) -> None:
    """Raise InvalidArgument if a config uses error feedback that would not converge."""
    if not config.keeps_residuals:
        return
    try:
        library.call("cgx_config_check_feedback", byref(config.native))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; or Config(error_feedback=False)") from None


def check_config(config: Config | None, what: str = "config") -> None:
    """Raise InvalidArgument, naming the argument, unless it is a Config or None."""
    if config is not None and not isinstance(config, Config):
        remedy = "; calls with several tensors take rules=" if hasattr(config, "rules") else ""
        raise InvalidArgument(f"{what} is {config!r}; it must be a cgx_ops.Config, or None{remedy}")


class Keywords(TypedDict, total=False):
    """The fields of Config that all calls accept as keyword arguments."""

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
    """Return the Config of a call: `config` or Config(), with the keywords that are not None.

    Raises:
        InvalidArgument: `config` is not a Config, or a field is out of its range.
    """
    check_config(config)
    config = config or _DEFAULT
    if bits is bucket_size is compressor is rounding is None:
        return config
    try:
        return _overridden(config, bits, bucket_size, compressor, rounding)
    except TypeError:  # a value cannot be hashed: the core reports it
        return _overridden.__wrapped__(config, bits, bucket_size, compressor, rounding)


@functools.lru_cache(maxsize=1024, typed=True)  # Repeat (call.py) looks calls up by the Config's id
def _overridden(config: Config, *values: Any) -> Config:
    names = Keywords.__annotations__
    given = {name: v for name, v in zip(names, values, strict=True) if v is not None}
    return config.with_own(**given)
