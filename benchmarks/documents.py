"""Put generated tables into a page of docs/, between markers.

A page has a pair of markers for each block::

    <!-- begin scores -->
    <!-- end scores -->
"""

import textwrap
from pathlib import Path

from cgx_ops._core.text_table import Table


def body_of(table: Table) -> str:
    """Return a table and its notes in Markdown, without the title: the page has its own."""
    rule = ["---"] * table.text_columns + ["---:"] * (len(table.columns) - table.text_columns)
    rows = [" | ".join(cells) for cells in (table.columns, rule, *table.rows)]
    return "\n\n".join(["\n".join(f"| {row} |" for row in rows), *map(_wrapped, table.notes)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def insert(page: Path, blocks: dict[str, str]) -> None:
    """Replace the blocks of a page.

    Args:
        page: a Markdown file that has the markers of every block.
        blocks: the new text of each block, by name.

    Raises:
        ValueError: a marker is missing. The page is unchanged.
    """
    text = page.read_text()
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no lines {begin!r} and {end!r}: add them")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    page.write_text(text)
