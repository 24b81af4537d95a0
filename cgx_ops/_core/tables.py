"""The core's tables, as the core reports them: compressors, and the fields of a Config."""

import ast
from typing import Any

from cgx_ops._core import library

EXACT_BITS = 32
COMPRESSORS: dict[str, dict[str, Any]] = {row["name"]: row for row in library.COMPRESSORS}
# Of each field of Config: the accepted values in words, and the default.
ACCEPTED: dict[str, str] = {row["name"]: row["accepted"] for row in library.CONFIG_FIELDS}
DEFAULTS = {row["name"]: ast.literal_eval(row["default"]) for row in library.CONFIG_FIELDS}
# Fields that one compressor has and another has not.
OF_COMPRESSOR = tuple(row["name"] for row in library.CONFIG_FIELDS if row["of_compressor"])
