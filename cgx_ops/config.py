"""Config: every knob of a quantized collective, checked when it is made."""

import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cgx_ops.errors import InvalidArgument

Rounding = Literal["stochastic", "nearest", "shift"]
Algorithm = Literal["auto", "one_shot", "sra", "ring", "hierarchical"]
CommunicatorType = Literal["AUTO", "SHM", "MPI", "NCCL"]

_EXACT = 32
_MAX_INT64 = 2**63 - 1

# What a field accepts: the words to choose from, or (test of an int, the same in words).
_WORDS: dict[str, tuple[str, ...]] = {
    "rounding": ("stochastic", "nearest", "shift"),
    "algorithm": ("auto", "one_shot", "sra", "ring", "hierarchical"),
    "communicator_type": ("AUTO", "SHM", "MPI", "NCCL"),
}
_INTEGERS = {
    "bits": (lambda n: 1 <= n <= 8 or n == _EXACT, "an integer from 1 to 8, or 32 (exact)"),
    "bucket_size": (lambda n: 1 <= n <= _MAX_INT64, "an integer >= 1"),
    "gather_bits": (
        lambda n: 1 <= n <= 8 or n == _EXACT,
        "None (as bits), an integer from 1 to 8, or 32 (exact)",
    ),
    "intra_bits": (
        lambda n: 1 <= n <= 8 or n == _EXACT,
        "None or 32 (exact), or an integer from 1 to 8",
    ),
    "minimal_size": (lambda n: 0 <= n <= _MAX_INT64, "an integer >= 0"),
    "seed": (lambda n: -_MAX_INT64 - 1 <= n <= _MAX_INT64, "an integer of 64 bits, signed"),
}


_OPTIONAL = ("gather_bits", "intra_bits")  # may be None


def _as_integer(value: Any) -> int | None:
    """Return value as int if it is an integer of any library; None for bool and all else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


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
            "ring", "hierarchical" (ranks of a host, then hosts; "sra" where that is one level).
        gather_bits: bits of the reduced values on their way back; None: as `bits`.
        intra_bits: hierarchical: bits of values that their own host sums; None: exact.
        skip_incomplete_buckets: send a last bucket that is not full exact.
        minimal_size: tensors of fewer than max(16, minimal_size) elements travel exact.
        seed: of the noise of stochastic and shift rounding; each call derives its own from this,
            the communicator's name and a count of the calls.
        communicator_type: the transport: "SHM", "MPI", or "AUTO", the best that connects the ranks.
            "NCCL" carries messages between GPUs, and is "AUTO" between processes.
    """

    bits: int = 4
    bucket_size: int = 512
    rounding: Rounding = "stochastic"
    algorithm: Algorithm = "auto"
    gather_bits: int | None = None
    intra_bits: int | None = None
    skip_incomplete_buckets: bool = False
    minimal_size: int = 0
    seed: int = 0
    communicator_type: CommunicatorType = "AUTO"

    def __post_init__(self) -> None:
        for name, accepted in _WORDS.items():
            value = getattr(self, name)
            if value not in accepted:
                self._refuse(name, value, "one of " + ", ".join(map(repr, accepted)))
        for name, (accepts, words) in _INTEGERS.items():
            value = getattr(self, name)
            if name in _OPTIONAL and value is None:
                continue
            number = _as_integer(value)
            if number is None or not accepts(number):
                self._refuse(name, value, words)
            object.__setattr__(self, name, number)  # a numpy integer becomes an int
        if not isinstance(self.skip_incomplete_buckets, bool):
            self._refuse("skip_incomplete_buckets", self.skip_incomplete_buckets, "True or False")

    @staticmethod
    def _refuse(name: str, value: object, accepted: str) -> None:
        raise InvalidArgument(f"Config.{name} is {value!r}; it must be {accepted}")

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
    if name in _WORDS:
        if text.upper() in _WORDS[name]:
            return text.upper()
        accepted = "one of " + ", ".join(_WORDS[name])
    elif name in _INTEGERS:
        accepts, accepted = _INTEGERS[name]
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and accepts(int(text)):
            return int(text)
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
