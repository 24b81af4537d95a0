"""Tables that the core reports, and the numeric codes of words in cgx.h."""

import ast
import json
from ctypes import c_char_p
from typing import Any

from cgx_ops._core.binary import LIBRARY


def _table(function: str) -> list[dict[str, Any]]:
    reports = getattr(LIBRARY, function)
    reports.restype = c_char_p
    return json.loads(reports())


CONFIG_FIELDS = _table("cgx_config_fields")
COMPRESSORS = {row["name"]: row for row in _table("cgx_compressors")}
VERBS = {row["name"]: row for row in _table("cgx_verbs")}
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3, "product": 4}
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
CPU, CUDA = 0, 1  # cgx_device_t
ALGORITHMS: dict[str, int] = next(
    row["words"] for row in CONFIG_FIELDS if row["name"] == "algorithm"
)
EXACT_BITS = 32
DEFAULT_RATE = 2.0  # if Config.rate is None
SMALLEST_COMPRESSED = 16  # CGX_SMALLEST_COMPRESSED
# By field of Config: the accepted values in words, and the default.
ACCEPTED: dict[str, str] = {row["name"]: row["accepted"] for row in CONFIG_FIELDS}
DEFAULTS = {row["name"]: ast.literal_eval(row["default"]) for row in CONFIG_FIELDS}
# Fields that only some compressors have.
OF_COMPRESSOR = tuple(row["name"] for row in CONFIG_FIELDS if row["of_compressor"])
