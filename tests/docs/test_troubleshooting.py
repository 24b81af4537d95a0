"""Every message that docs/guides/troubleshooting.md quotes is still in the sources.

A quote is code in the first column of a table. "…" in it stands for values. Tables of messages
of other libraries are ignored.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/troubleshooting.md").read_text()
FOREIGN = ("Messages of other libraries", "No message")


def _quotes() -> list[str]:
    quotes = []
    for section in PAGE.split("\n## ")[1:]:
        if section.startswith(FOREIGN):
            continue
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert rows, section.splitlines()[0]
        quotes += [quote for row in rows for quote in re.findall("`([^`]+)`", row.split(" | ")[0])]
    return quotes


def _texts_of_python(path: Path) -> list[str]:
    """Return the constant parts of all strings."""
    tree = ast.parse(path.read_text())
    return [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is str]


def _texts_of_cpp(path: Path) -> list[str]:
    """Return all string literals; adjacent ones are joined."""
    joined = re.sub(r'"\s*\n\s*"', "", path.read_text())
    return [text.replace('\\"', '"') for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)]


@pytest.fixture(scope="module")
def texts() -> str:
    found = []
    for folder in ("cgx_ops", "torch_ops", "xla_ffi"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py":
                found += _texts_of_python(path)
            elif path.suffix in (".cc", ".h"):
                found += _texts_of_cpp(path)
    return "\n".join(found)


@pytest.mark.parametrize("quote", _quotes())
def test_a_quoted_message_exists(quote: str, texts: str) -> None:
    for part in quote.split("…"):
        assert part.strip() in texts, f"{part.strip()!r} is not in the sources"
