"""The variables that configure compression, with CGX's names: docs/reference/environment.md.

    fields()      fields of the Config that the variables describe, for the backend "cgx"
    auto_bits()   CGX_AUTO_BITS
    check()       checks all variables before the first communicator is created

The core itself reads COMMUNICATOR_TYPE and others.
"""

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from cgx_ops._core import library
from cgx_ops._core.tables import ACCEPTED, COMPRESSORS, DEFAULTS, EXACT_BITS
from cgx_ops.errors import InvalidArgument

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
    "CGX_COMPRESSION_RATE": "rate",
    "CGX_COMPRESSION_CLIP": "clip",
}
_WORDS = ("compressor", "rounding")
_FLAGS = ("skip_incomplete_buckets", "clip")
_FLAG_VALUES = {"0": False, "false": False, "off": False, "1": True, "true": True, "on": True}


def fields(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of Config that the variables describe; exact unless they set bits.

    Raises:
        InvalidArgument: A variable is not valid. The message has its name, its text and the
            accepted values.
    """
    given = {variable: text for variable in _VARIABLES if (text := _text(environ, variable))}
    values: dict[str, Any] = {
        _VARIABLES[variable]: _parsed(variable, text) for variable, text in given.items()
    }
    if "compressor" not in values:
        values.setdefault("bits", EXACT_BITS)
    if _flag(environ, "CGX_INTRA_COMPRESS"):
        values["intra_bits"] = _bits_within_hosts(**values)
    try:
        library.parse_config(" ".join(f"{name}={value!r}" for name, value in values.items()))
    except InvalidArgument as error:
        raise InvalidArgument(f"{', '.join(given)}: {error}") from None
    return values


def auto_bits(environ: Mapping[str, str]) -> bool:
    """Return whether CGX_AUTO_BITS requests bits by message size."""
    return _flag(environ, "CGX_AUTO_BITS")


def check(environ: Mapping[str, str]) -> None:
    """Refuse variables that are invalid, or that request a feature of CGX that does not exist here.

    Raises:
        InvalidArgument: A variable is not valid. The message has its name, its text and the
            accepted values.
    """
    compressor = fields(environ).get("compressor", DEFAULTS["compressor"])
    if auto_bits(environ) and not _has_bits(compressor):
        _refuse("CGX_AUTO_BITS", "1", f"0 or not set: {compressor!r} has no bits to choose")
    if auto_bits(environ) and _flag(environ, "CGX_INTRA_COMPRESS"):
        _refuse(
            "CGX_AUTO_BITS", "1", "0 or not set: CGX_INTRA_COMPRESS=1 needs a fixed number of bits"
        )
    transport = _text(environ, "COMMUNICATOR_TYPE").upper() or "AUTO"
    if transport not in TRANSPORTS:
        _refuse("COMMUNICATOR_TYPE", transport, f"one of {', '.join(TRANSPORTS)}")
    for variable, words in _HOST_SWITCHES.items():
        text = _text(environ, variable)
        if text and not (variable in _OF_TRANSPORTS and text.upper() == transport):
            _check_switch(variable, words, text)


def _text(environ: Mapping[str, str], variable: str) -> str:
    return environ.get(variable, "").strip()


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    text = _text(environ, variable)
    if text and text.lower() not in _FLAG_VALUES:
        _refuse(variable, text, "0 or 1")
    return _FLAG_VALUES.get(text.lower(), False)


def _parsed(variable: str, text: str) -> float | bool | str:
    """Return the variable's text as a value of its field."""
    name = _VARIABLES[variable]
    if name in _FLAGS:
        return _flag({variable: text}, variable)
    value = text.lower() if name in _WORDS else _number(text)
    if value is None or not _accepts(name, value):
        # A field that is None corresponds to a variable that is not set.
        _refuse(variable, text, ACCEPTED[name].replace("None", "not set"))
    return value


def _refuse(variable: str, text: str, accepted: str) -> NoReturn:
    raise InvalidArgument(f"The environment variable {variable} is {text!r}; it must be {accepted}")


def _accepts(name: str, value: Any) -> bool:
    """Return whether the core accepts this value of a field, whatever the other fields are."""
    try:
        library.parse_config(f"{name}={value!r}")
    except InvalidArgument as error:
        return error.field != name
    return True


def _number(text: str) -> float | None:
    """Return an integer or a decimal; None if the text is neither."""
    if re.fullmatch("-?[0-9]+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", text.lower()) else None


def _has_bits(compressor: str) -> bool:
    """Return whether the bits of a compressor can be chosen."""
    return COMPRESSORS[compressor]["bits"] != [0, 0]


def _bits_within_hosts(
    bits: int = DEFAULTS["bits"], compressor: str = DEFAULTS["compressor"], **_: Any
) -> int:
    """Return intra_bits for CGX_INTRA_COMPRESS=1: the bits between hosts."""
    if bits != EXACT_BITS and not _has_bits(compressor):
        raise InvalidArgument(
            "The environment variable CGX_INTRA_COMPRESS requests the same bits within hosts as "
            f"between them, but CGX_COMPRESSOR is {compressor!r}, which has no bits to choose: "
            "leave CGX_INTRA_COMPRESS unset"
        )
    return bits


TRANSPORTS = ("AUTO", "SHM", "MPI", "TCP", "NCCL")
_USE_NCCL = "set COMMUNICATOR_TYPE=NCCL, which sends all messages between GPUs by NCCL"
_NO_RING = "a ring would quantize values once per rank; here it happens at most twice"
# CGX's choices for its two levels. None: `hierarchical` works like this. Text: why it does not.
_HOST_SWITCHES: dict[str, dict[str, str | None]] = {
    "CGX_INTRA_BROADCAST": {
        "0": None,
        "1": "every rank of a host sends a part of its values; no single rank sends all",
    },
    "CGX_INNER_COMMUNICATOR_TYPE": {
        "SHM": None,
        "MPI": "set COMMUNICATOR_TYPE=MPI, which sends everything by MPI",
        "NCCL": _USE_NCCL,
    },
    "CGX_CROSS_COMMUNICATOR_TYPE": {"MPI": None, "NCCL": _USE_NCCL},
    "CGX_INNER_REDUCTION_TYPE": {"SRA": None, "RING": _NO_RING},
    "CGX_CROSS_REDUCTION_TYPE": {"SRA": None, "RING": _NO_RING},
}
# These variables may also repeat the value of COMMUNICATOR_TYPE.
_OF_TRANSPORTS = ("CGX_INNER_COMMUNICATOR_TYPE", "CGX_CROSS_COMMUNICATOR_TYPE")


def _check_switch(variable: str, words: Mapping[str, str | None], text: str) -> None:
    """Raise InvalidArgument unless the variable requests the only available behavior."""
    accepted = next(word for word, refusal in words.items() if refusal is None)
    refusal = words.get(text.upper(), "")
    if refusal is not None:
        _refuse(variable, text, f"{accepted}, or not set" + (f": {refusal}" if refusal else ""))
