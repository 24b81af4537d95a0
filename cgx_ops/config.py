"""Config: every knob of a quantized collective, checked when it is made.

What a knob accepts, its default and its words are the core's (csrc/config.cc): this file asks.
"""

import ast
import functools
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

from cgx_ops import _native
from cgx_ops.errors import InvalidArgument

Rounding = Literal["stochastic", "nearest", "shift"]
Algorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical", "by_hosts"]
CommunicatorType = Literal["AUTO", "SHM", "MPI", "NCCL"]

_EXACT = 32
_COMMUNICATOR_TYPES = ("AUTO", "SHM", "MPI", "NCCL")
_ACCEPTED: dict[str, str] = {field["name"]: field["accepted"] for field in _native.CONFIG_FIELDS}
_DEFAULTS = {field["name"]: ast.literal_eval(field["default"]) for field in _native.CONFIG_FIELDS}


_values = operator.attrgetter(*_ACCEPTED)
_TEXT = " ".join(f"{name}={{!r}}" for name in _ACCEPTED)


def _plain(value: Any) -> Any:
    """Return an integer or a str of any library as Python's own, all else as it is."""
    if isinstance(value, str):
        return str(value)
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


@functools.lru_cache(maxsize=1024)  # to look a text up takes a tenth of the time
def _parsed(text: str) -> _native.Config:
    return _native.Config.parse(text)


def _accepts(name: str, value: Any) -> bool:
    """Tell whether the core accepts this value of a field."""
    try:
        _native.Config.parse(f"{name}={value!r}")
    except InvalidArgument:
        return False
    return True


@dataclass(frozen=True)
class Config:
    """How values travel. Frozen, comparable and hashable; change one with dataclasses.replace().

    Raises InvalidArgument (a ValueError) that names the field, its value and what it accepts.

    Attributes:
        bits: of a quantized value, 1-8; 32 sends everything exact.
        bucket_size: elements that share one minimum and step.
        rounding: "stochastic" is unbiased; "nearest" has half the worst error; "shift" is unbiased
            with the error of nearest: each bucket's grid is moved by one random fraction of a step
            before values go to the nearest point (dithering; QSDP, Markov et al., ICML 2023).
        algorithm: "auto" picks by size and hosts; "one_shot", "sra" (scatter-reduce-allgather),
            "ring", "hierarchical" (ranks of a host, then hosts; "sra" where that is one level);
            "by_hosts": what "auto" picks for large messages, whatever the size of this one.
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: hierarchical: bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a last bucket that is not full exact.
        minimal_size: tensors of fewer than max(16, minimal_size) elements travel exact.
        seed: of the noise of stochastic and shift rounding; each call derives its own from this,
            the communicator's name and a count of the calls.
        communicator_type: the transport: "SHM", "MPI", or "AUTO", the best that connects the ranks.
            "NCCL" carries messages between GPUs, and is "AUTO" between processes.
    """

    bits: int = _DEFAULTS["bits"]
    bucket_size: int = _DEFAULTS["bucket_size"]
    rounding: Rounding = _DEFAULTS["rounding"]
    algorithm: Algorithm = _DEFAULTS["algorithm"]
    gather_bits: int | None = _DEFAULTS["gather_bits"]
    intra_bits: int | None = _DEFAULTS["intra_bits"]
    skip_incomplete_buckets: bool = _DEFAULTS["skip_incomplete_buckets"]
    minimal_size: int = _DEFAULTS["minimal_size"]
    seed: int = 0
    communicator_type: CommunicatorType = "AUTO"

    def __post_init__(self) -> None:
        for name, value in zip((*_ACCEPTED, "seed"), (*_values(self), self.seed), strict=True):
            if type(value) not in (int, str, bool, NoneType):
                object.__setattr__(self, name, _plain(value))
        try:
            _parsed(self.text)
        except InvalidArgument:
            for name, accepted in _ACCEPTED.items():
                if not _accepts(name, getattr(self, name)):
                    self._refuse(name, accepted)
            raise
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            self._refuse("seed", "an integer of 64 bits, signed")
        if self.communicator_type not in _COMMUNICATOR_TYPES:
            self._refuse("communicator_type", f"one of {', '.join(map(repr, _COMMUNICATOR_TYPES))}")

    def _refuse(self, name: str, accepted: str) -> None:
        raise InvalidArgument(f"Config.{name} is {getattr(self, name)!r}; it must be {accepted}")

    @property
    def knobs(self) -> dict[str, Any]:
        """How values travel: every field but seed and communicator_type, by name."""
        return dict(zip(_ACCEPTED, _values(self), strict=True))

    @property
    def text(self) -> str:
        """The knobs as the core reads them: "bits=4 bucket_size=512 ..."."""
        return _TEXT.format(*_values(self))

    @property
    def native(self) -> _native.Config:
        """The knobs as a cgx_config_t, to be copied."""
        return _parsed(self.text)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "Config":
        """Return the Config that the CGX_* variables describe; without one, the default.

        Bits are 32 (off) by default here, as they always were in CGX.

        Args:
            environ: read instead of os.environ.

        Raises:
            InvalidArgument: names the variable, its text and what it accepts.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {"bits": _EXACT}
        for variable, name in _VARIABLES.items():
            text = environ.get(variable, "").strip()
            if text:
                values[name] = _parse(variable, name, text)
        if values.pop("intra_compress", False):
            values["intra_bits"] = values["bits"]
        for variable, words in _HOST_SWITCHES.items():
            text = environ.get(variable, "").strip()
            same = _SAME_AS.get(variable, "")
            if text and text.upper() != values.get(same):
                _check_switch(variable, words, text)
        return cls(**values)


# The names and meanings of CGX.
_VARIABLES = {
    "CGX_COMPRESSION_QUANTIZATION_BITS": "bits",
    "CGX_COMPRESSION_BUCKET_SIZE": "bucket_size",
    "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "skip_incomplete_buckets",
    "CGX_COMPRESSION_MINIMAL_SIZE": "minimal_size",
    "COMMUNICATOR_TYPE": "communicator_type",
    "CGX_INTRA_COMPRESS": "intra_compress",  # no field: whether intra_bits is bits
}
_FLAGS = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def _parse(variable: str, name: str, text: str) -> int | bool | str:
    """Return the variable's text as the value of Config's field `name`."""
    if name == "communicator_type":
        if text.upper() in _COMMUNICATOR_TYPES:
            return text.upper()
        accepted = "one of " + ", ".join(_COMMUNICATOR_TYPES)
    elif name in ("bits", "bucket_size", "minimal_size"):
        if re.fullmatch("-?[0-9]+", text) and _accepts(name, int(text)):
            return int(text)
        accepted = _ACCEPTED[name]
    else:
        if text.lower() in _FLAGS:
            return _FLAGS[text.lower()]
        accepted = "0 or 1"
    raise InvalidArgument(f"The environment variable {variable} is {text!r}; it must be {accepted}")


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
