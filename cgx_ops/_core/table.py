"""Tables of text, for terminals and in Markdown."""

import io
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

_WIDTH = 120


@dataclass(frozen=True)
class Table:
    """Cells, as text.

    Attributes:
        title: one line.
        columns: headings.
        rows: as many cells each as there are columns.
        text_columns: how many of the first columns are words; the others are numbers.
        sections: numbers of the rows that begin a group, which a line divides from the last.
        notes: sentences below it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    sections: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        """Print it, at least _WIDTH columns wide: what mpirun starts thinks that it has 80."""
        console = Console(width=max(Console().width, _WIDTH), highlight=False, markup=False)
        console.print(self._rich(box.SIMPLE_HEAD, self.title))
        for note in self.notes:
            console.print(note)

    def markdown(self) -> str:
        """Return it in Markdown, under a heading of the third level."""
        text = io.StringIO()
        Console(file=text, width=1000, markup=False).print(self._rich(box.MARKDOWN, None))
        rows = (line.strip() for line in text.getvalue().splitlines())
        return "\n\n".join([f"### {self.title}", "\n".join(filter(None, rows)), *self.notes])

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
