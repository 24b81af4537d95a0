"""Tables of text for terminals and in Markdown, and the console that prints them."""

import io
import os
import textwrap
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

_WIDTH = 120


def console(least_width: int = 0) -> Console:
    """Return a console for stdout. It writes escape codes only to the user's terminal.

    mpirun gives each rank a pseudo-terminal, even if its own output goes to a pipe or a file. A
    rank cannot tell these cases apart, so all ranks under mpirun write plain text. As usual, a
    non-empty variable FORCE_COLOR turns colors on.

    Args:
        least_width: columns to use even if the terminal has fewer. Pipes and files get 120.
    """
    under_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ
    plain = under_mpirun and not os.environ.get("FORCE_COLOR")
    found = Console(force_terminal=False if plain else None, highlight=False, markup=False)
    if not found.is_terminal:
        least_width = _WIDTH
    found.width = max(found.width, least_width)
    return found


def paragraph(text: str) -> str:
    """Return text in lines of at most 100 columns, for generated pages."""
    return textwrap.fill(text, 100, break_on_hyphens=False)


@dataclass(frozen=True)
class Table:
    """Cells of text.

    Attributes:
        title: One line above the table.
        columns: The headings.
        rows: The rows, each with one cell per column.
        text_columns: How many of the first columns hold words. The others hold numbers, which are
            aligned to the right.
        sections: Indices of the rows that start a section; a line separates it from the last one.
        notes: Sentences below the table.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    sections: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Print the table and its notes, at least 120 columns wide."""
        output = console(_WIDTH)
        output.print(self._rich(box.SIMPLE_HEAD, self.title))
        for note in self.notes:
            output.print(note)

    def markdown(self) -> str:
        """Return the table in Markdown, under a heading of the third level."""
        text = io.StringIO()
        Console(file=text, width=1000, markup=False).print(self._rich(box.MARKDOWN, None))
        rows = (line.strip() for line in text.getvalue().splitlines())
        notes = map(paragraph, self.notes)
        return "\n\n".join([f"### {self.title}", "\n".join(filter(None, rows)), *notes])

    def _rich(self, style: box.Box, title: str | None) -> RichTable:
        lines = style is not box.MARKDOWN
        table = RichTable(title=title, title_justify="left", box=style, show_edge=not lines)
        for index, column in enumerate(self.columns):
            justify = "left" if index < self.text_columns else "right"
            table.add_column(column, justify=justify, no_wrap=True)
        for index, row in enumerate(self.rows):
            if lines and index in self.sections:
                table.add_section()
            table.add_row(*row)
        return table
