"""Config: every knob of a quantized collective, checked when it is made.

What a knob accepts, its default and its words are the core's (csrc/config.cc): this file asks.
"""

import ast
import functools
import numbers
import operator
import os
import re
from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, TypedDict

from cgx_ops import _native, variables
from cgx_ops.errors import InvalidArgument, Unsupported

Compressor = Literal[
    "uniform", "levels", "sign", "onebit", "ternary", "qsgd", "half", "topk", "threshold",
    "randk",
]  # fmt: skip
Rounding = Literal["stochastic", "nearest", "shift"]
Algorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical", "by_hosts"]
CommunicatorType = Literal["AUTO", "SHM", "MPI", "TCP", "NCCL"]

EXACT_BITS = 32
AUTO = "auto"  # of bits: cgx_ops.bits_for() decides (cgx_ops/break_even.py)
_COMPRESSORS: dict[str, dict[str, Any]] = {row["name"]: row for row in _native.COMPRESSORS}
_COMMUNICATOR_TYPES = ("AUTO", "SHM", "MPI", "TCP", "NCCL")
_ACCEPTED: dict[str, str] = {field["name"]: field["accepted"] for field in _native.CONFIG_FIELDS}
_DEFAULTS = {field["name"]: ast.literal_eval(field["default"]) for field in _native.CONFIG_FIELDS}

_values = operator.attrgetter(*_ACCEPTED)
_TEXT = " ".join(f"{name}={{!r}}" for name in _ACCEPTED)


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
def _parsed(text: str) -> _native.Config:
    return _native.Config.parse(text)


def _accepts(name: str, value: Any) -> bool:
    """Tell whether the core accepts this value of a field, whatever the others are."""
    try:
        _native.Config.parse(f"{name}={value!r}")
    except InvalidArgument as error:
        return error.field != name
    return True


# What a compressor has of its own, and another one may not.
OF_COMPRESSOR = ("bits", "rounding", "density", "value_bits", "rotation", "clip", "gather_bits")


@dataclass(frozen=True)
class Config:
    """How values travel. Frozen, comparable and hashable; change one with dataclasses.replace().

    Raises InvalidArgument (a ValueError) that names the field, its value and what it accepts.

    Attributes:
        bits: of a quantized value: "uniform" has 1-8, "levels" 1-4, "qsgd" 2-8, other compressors
            a width of their own; 32 sends everything exact, whatever the compressor. "auto": exact,
            8, 4 or 2 by what pays for a message's size among its ranks, which is measured when it
            is first asked: see cgx_ops.bits_for(). Of allreduces of numpy arrays, the backend
            "cgx" and the DDP hook.
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
        compressor: what values become: docs/wire_format.md, section 8, and docs/numerics.md have
            each one's bytes and error.
        density: of "topk", "threshold" and "randk": the share of values that travel, more than 0
            and at most 1; None: 0.01.
        value_bits: of the values that "topk" and "threshold" send: 1-8, 16, 32; None: 32 (exact).
        rotation: so many values of a bucket, a power of two, are rotated by a Hadamard matrix
            before they are encoded, which makes those of heavy tails easier; None: none.
        clip: "ternary" clips values at 2.5 times their bucket's root mean square.
        seed: of the noise of stochastic and shift rounding; each call derives its own from this,
            the communicator's name and a count of the calls.
        communicator_type: the transport of process groups that the backend "cgx" makes: "SHM",
            "MPI", "TCP", or "AUTO", the best that connects the ranks. "NCCL" carries messages
            between GPUs, and is "AUTO" between processes. Calls on a communicator that is there
            ignore it; for numpy set COMMUNICATOR_TYPE, or give Communicator.create(transport=).
        error_feedback: whether training steps keep the quantization error of a gradient as its
            residual and add it in the next step. None: where the encoding is biased, that is,
            its expectation is not the value: "uniform" with nearest rounding, "levels", "onebit",
            "topk", "threshold" and "randk".
        residual_decay: with error feedback, the part of the residual that is added, more than 0
            and at most 1. Less than 1 drops the rest; MergeComp's memory has 0.9.
    """

    bits: int | Literal["auto"] = _DEFAULTS["bits"]
    bucket_size: int = _DEFAULTS["bucket_size"]
    rounding: Rounding | None = _DEFAULTS["rounding"]
    algorithm: Algorithm = _DEFAULTS["algorithm"]
    gather_bits: int | None = _DEFAULTS["gather_bits"]
    intra_bits: int | None = _DEFAULTS["intra_bits"]
    skip_incomplete_buckets: bool = _DEFAULTS["skip_incomplete_buckets"]
    minimal_size: int = _DEFAULTS["minimal_size"]
    compressor: Compressor = _DEFAULTS["compressor"]
    density: float | None = _DEFAULTS["density"]
    value_bits: int | None = _DEFAULTS["value_bits"]
    rotation: int | None = _DEFAULTS["rotation"]
    clip: bool = _DEFAULTS["clip"]
    seed: int = 0
    communicator_type: CommunicatorType = "AUTO"
    error_feedback: bool | None = _DEFAULTS["error_feedback"]
    residual_decay: float = _DEFAULTS["residual_decay"]

    def __post_init__(self) -> None:
        values = (*_values(self), self.seed)
        for name, value in zip((*_ACCEPTED, "seed"), values, strict=True):
            if type(value) not in (int, float, str, bool, NoneType):
                object.__setattr__(self, name, _plain(value))
        if self.bits == AUTO:
            if _COMPRESSORS.get(self.compressor, {}).get("bits") == [0, 0]:
                raise InvalidArgument(
                    f"compressor {self.compressor!r} has no bits to choose from: bits='auto' and "
                    "bits_for() are for compressors that have"
                )
            replace(self, bits=_DEFAULTS["bits"])  # which checks the other fields
            return
        try:
            _parsed(self.text)
        except InvalidArgument as error:
            if (name := error.field) is None:  # they do not belong together
                raise
            self._refuse(name, _ACCEPTED[name] + (f", or '{AUTO}'" if name == "bits" else ""))
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            self._refuse("seed", "an integer of 64 bits, signed")
        if self.communicator_type not in _COMMUNICATOR_TYPES:
            self._refuse("communicator_type", f"one of {', '.join(map(repr, _COMMUNICATOR_TYPES))}")

    def _refuse(self, name: str, accepted: str) -> None:
        error = InvalidArgument(f"Config.{name} is {getattr(self, name)!r}; it must be {accepted}")
        error.field = name
        raise error from None

    def with_own(self, **own: Any) -> "Config":
        """Return this Config with fields of a part's own, such as a layer's.

        A compressor of its own leaves behind what was said for the other one, but that bits stay
        exact: what it has itself is its default, unless it is among `own`.
        """
        if own.get("compressor", self.compressor) != self.compressor:
            left = {name: _DEFAULTS[name] for name in OF_COMPRESSOR}
            if self.bits == EXACT_BITS:
                del left["bits"]
            own = {**left, "intra_bits": None, **own}
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
        biased = _COMPRESSORS[self.compressor]["biased"] and self._rounds == "nearest"
        return biased and self.bits != EXACT_BITS

    @property
    def _rounds(self) -> str:
        """The rounding that is used: the compressor's own where none is given."""
        return self.rounding or _COMPRESSORS[self.compressor]["roundings"][0]

    @property
    def knobs(self) -> dict[str, Any]:
        """How values travel, by name: the fields that the core knows."""
        return dict(zip(_ACCEPTED, self._decided(), strict=True))

    @property
    def text(self) -> str:
        """The knobs as the core reads them: "bits=4 bucket_size=512 ..."."""
        return _TEXT.format(*self._decided())

    def __str__(self) -> str:
        """Return all fields as text: "bits=4 bucket_size=512 ...". Config.parse() reads it."""
        return self.text

    @classmethod
    def parse(cls, text: str) -> "Config":
        """Return the Config of a text such as "bits=4 rounding='nearest'".

        Args:
            text: fields as `name=value`, separated by one space, values as Python writes them.
                A field that is left out has its default.

        Raises:
            InvalidArgument: names the field, its text and what it accepts.

        Example:
            >>> Config.parse("bits=2 compressor='levels'") == Config(bits=2, compressor="levels")
            True
        """
        _parsed(text)
        given = (each.split("=", 1) for each in text.split(" ") if each)
        return cls(**{name: ast.literal_eval(value) for name, value in given})

    @property
    def decided_bits(self) -> int:
        """Bits as a number: "auto" is refused."""
        return self._decided()[0]

    def _decided(self) -> tuple[Any, ...]:
        if self.bits == AUTO:
            raise Unsupported(
                "bits='auto' is for allreduces of numpy arrays, the backend cgx and the hook of "
                "DistributedDataParallel. Elsewhere choose before the call: "
                "bits=cgx_ops.bits_for(cgx_ops.init(), numel)"
            )
        return _values(self)

    @property
    def native(self) -> _native.Config:
        """The knobs as a cgx_config_t, to be copied."""
        return _parsed(self.text)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Config":
        """Return the Config that the CGX_* variables describe; without one, the default.

        Bits are 32 (off) by default here, as they always were in CGX, unless there is a compressor.

        Args:
            environ: read instead of os.environ.

        Raises:
            InvalidArgument: names the variable, its text and what it accepts.
        """
        if environ is None:
            environ = os.environ
            variables.warn_of_unknown()
        values: dict[str, Any] = {}
        for variable, name in _VARIABLES.items():
            text = environ.get(variable, "").strip()
            if text:
                values[name] = _parse(variable, name, text)
        if "compressor" not in values:
            values.setdefault("bits", EXACT_BITS)
        if values.pop("intra_compress", False):
            values["intra_bits"] = _bits_within_hosts(**values)
        for variable, words in _HOST_SWITCHES.items():
            text = environ.get(variable, "").strip()
            same = _SAME_AS.get(variable, "")
            if text and text.upper() != values.get(same):
                _check_switch(variable, words, text)
        try:
            return cls(**values)
        except InvalidArgument as error:
            names = [variable for variable in _VARIABLES if environ.get(variable, "").strip()]
            raise InvalidArgument(f"{', '.join(names)}: {error}") from None


def check_config(config: Config | None) -> None:
    """Refuse what is no Config, where one may be left out."""
    if config is not None and not isinstance(config, Config):
        remedy = "; give Rules as rules=" if hasattr(config, "rules") else ""
        raise InvalidArgument(f"config is {config!r}; it must be a cgx_ops.Config, or None{remedy}")


def config_of(config: Config | None, **given: Any) -> Config:
    """Return the Config of a call: `config`, or Config(), with the keywords that are not None.

    Raises:
        InvalidArgument: `config` is no Config, or a field is out of its range.
    """
    check_config(config)
    own = {name: value for name, value in given.items() if value is not None}
    return (config or Config()).with_own(**own)


def auto_in_env() -> bool:
    """Tell whether Config.from_env() would have bits="auto", without making it."""
    return os.environ.get("CGX_COMPRESSION_QUANTIZATION_BITS", "").strip().lower() == AUTO


class Knobs(TypedDict, total=False):
    """Fields of Config by name, as keyword arguments of what takes them all."""

    bits: int | Literal["auto"]
    bucket_size: int
    rounding: Rounding | None
    algorithm: Algorithm
    gather_bits: int | None
    intra_bits: int | None
    skip_incomplete_buckets: bool
    minimal_size: int
    compressor: Compressor
    density: float | None
    value_bits: int | None
    rotation: int | None
    clip: bool
    seed: int


# The names and meanings of CGX, and their like for what it does not have.
_VARIABLES = {
    "CGX_COMPRESSION_QUANTIZATION_BITS": "bits",
    "CGX_COMPRESSION_BUCKET_SIZE": "bucket_size",
    "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "skip_incomplete_buckets",
    "CGX_COMPRESSION_MINIMAL_SIZE": "minimal_size",
    "CGX_COMPRESSOR": "compressor",
    "CGX_COMPRESSION_ROUNDING": "rounding",
    "CGX_COMPRESSION_DENSITY": "density",
    "CGX_COMPRESSION_VALUE_BITS": "value_bits",
    "CGX_COMPRESSION_ROTATION": "rotation",
    "CGX_COMPRESSION_CLIP": "clip",
    "COMMUNICATOR_TYPE": "communicator_type",
    "CGX_INTRA_COMPRESS": "intra_compress",  # no field: whether intra_bits is bits
}
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _parse(variable: str, name: str, text: str) -> float | bool | str:
    """Return the variable's text as the value of Config's field `name`."""
    if name == "communicator_type":
        if text.upper() in _COMMUNICATOR_TYPES:
            return text.upper()
        accepted = "one of " + ", ".join(_COMMUNICATOR_TYPES)
    elif name == "bits" and text.lower() == AUTO:
        return AUTO
    elif name in ("compressor", "rounding"):
        if _accepts(name, text.lower()):
            return text.lower()
        accepted = _set_to(name)
    elif name in ("bits", "bucket_size", "minimal_size", "density", "value_bits", "rotation"):
        number = _number(text)
        if number is not None and _accepts(name, number):
            return number
        accepted = _set_to(name) + (f", or {AUTO}" if name == "bits" else "")
    else:
        if text.lower() in _FLAGS:
            return _FLAGS[text.lower()]
        accepted = "0 or 1"
    raise InvalidArgument(f"The environment variable {variable} is {text!r}; it must be {accepted}")


def _bits_within_hosts(
    bits: int | str = _DEFAULTS["bits"], compressor: str = _DEFAULTS["compressor"], **_: Any
) -> int | str:
    """Return what intra_bits is where CGX_INTRA_COMPRESS is 1: bits."""
    if bits == AUTO:
        why = "CGX_COMPRESSION_QUANTIZATION_BITS is 'auto': give that a number, or"
    elif bits != EXACT_BITS and _COMPRESSORS[compressor]["bits"] == [0, 0]:
        why = f"CGX_COMPRESSOR is {compressor!r}, which has no bits to choose:"
    else:
        return bits
    raise InvalidArgument(
        "The environment variable CGX_INTRA_COMPRESS asks for as many bits within hosts as between "
        f"them, but {why} leave CGX_INTRA_COMPRESS unset"
    )


def _set_to(name: str) -> str:
    """Return what a variable may be: where a field may be None, it is not set."""
    return _ACCEPTED[name].replace("None", "not set")


def _number(text: str) -> float | None:
    """Return an integer or a decimal; None if the text is neither."""
    if re.fullmatch("-?[0-9]+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", text.lower()) else None


_ASK_FOR_NCCL = "set COMMUNICATOR_TYPE=NCCL, by which NCCL carries all messages between GPUs"
_NO_RING = "in a ring values are quantized once per rank, here twice at most"
# What else CGX lets choose of its two levels. None: that is how `hierarchical` works; else why not.
_HOST_SWITCHES: dict[str, dict[str, str | None]] = {
    "CGX_INTRA_BROADCAST": {
        "0": None,
        "1": "all ranks of a host share in what it sends to others, which no single rank does",
    },
    "CGX_INNER_COMMUNICATOR_TYPE": {
        "SHM": None,
        "MPI": "set COMMUNICATOR_TYPE=MPI, which carries everything by MPI",
        "NCCL": _ASK_FOR_NCCL,
    },
    "CGX_CROSS_COMMUNICATOR_TYPE": {"MPI": None, "NCCL": _ASK_FOR_NCCL},
    "CGX_INNER_REDUCTION_TYPE": {"SRA": None, "RING": _NO_RING},
    "CGX_CROSS_REDUCTION_TYPE": {"SRA": None, "RING": _NO_RING},
}
# What a switch asks for happens too where this field is the same.
_SAME_AS = {
    "CGX_INNER_COMMUNICATOR_TYPE": "communicator_type",
    "CGX_CROSS_COMMUNICATOR_TYPE": "communicator_type",
}


def _check_switch(variable: str, words: Mapping[str, str | None], text: str) -> None:
    """Raise unless the variable asks for what happens anyway."""
    accepted = next(word for word, refusal in words.items() if refusal is None)
    refusal = words.get(text.upper(), "")
    if refusal is not None:
        raise InvalidArgument(
            f"The environment variable {variable} is {text!r}; it must be {accepted}, or not set"
            + (f": {refusal}" if refusal else "")
        )
