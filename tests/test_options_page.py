"""docs/options.md lists the rows of the core's table, with their defaults."""

import ast
import re
from pathlib import Path

from cgx_ops import _native

PAGE = (Path(__file__).resolve().parent.parent / "docs/options.md").read_text()


def test_the_page_has_the_rows_of_the_table() -> None:
    rows = re.findall(r"^\| `([a-z_]+)` \| (.*) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == [field["name"] for field in _native.CONFIG_FIELDS]
    for (name, accepted, default), field in zip(rows, _native.CONFIG_FIELDS, strict=True):
        first = re.split("[;:]", default)[0].strip("`")
        assert ast.literal_eval(first) == ast.literal_eval(field["default"]), name
        missing = [word for word in field["words"] if word not in accepted]
        assert not missing or name == "compressor", (name, missing)
