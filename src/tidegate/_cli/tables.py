"""Tables of the command line: one description and one layout, drawn by rich or as plain text."""

from __future__ import annotations

import io
import unicodedata
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._cli.output import Output

Spans = tuple[tuple[str, str], ...]  # parts of a text, each with its style
Cell = str | Spans
GAP: Final = "  "
CURVE_CHARACTERS: Final = " ▁▂▃▄▅▆▇█"
MIN_SHRUNK_WIDTH: Final = 8  # characters that a shortened column keeps


@dataclass(frozen=True)
class TableColumn:
    """A column: its header, whether it is aligned to the right, and whether it may be shortened or left out."""

    name: str
    right: bool = False
    shrinks: bool = False
    optional: bool = False


@dataclass(frozen=True)
class TextTable:
    """A table. `styles` are the styles of its rows; a row without one has the style of its cells."""

    columns: tuple[TableColumn, ...]
    rows: list[tuple[Cell, ...]]
    styles: list[str] = field(default_factory=list)
    empty: str = ""  # shown below the header if there are no rows

    def style_of(self, row: int) -> str:
        """Return the style of a row."""
        return self.styles[row] if row < len(self.styles) else ""


def columns(*names: str, left: int = 1) -> tuple[TableColumn, ...]:
    """Return columns: the first ones to the left, of which the first may be shortened; the others to the right."""
    return tuple(TableColumn(name, right=i >= left, shrinks=i == 0) for i, name in enumerate(names))


def draw_table(table: TextTable, output: Output) -> list[str]:
    """Draw a table as lines of text. On a terminal, it fits into the width of the terminal."""
    table, widths = fit(table, output.columns if output.live else None)
    lines = (draw_rich if output.colours else draw_plain)(table, widths)
    return lines if table.rows or not table.empty else [*lines, output.style(table.empty, "dim")]


def draw_plain(table: TextTable, widths: list[int]) -> list[str]:
    """Draw a table as plain text."""
    rows = [tuple(column.name for column in table.columns), *table.rows]
    rights = [column.right for column in table.columns]
    return [
        GAP.join(pad(plain(cell), width, right=right) for cell, width, right in zip(row, widths, rights, strict=True))
        .rstrip()
        for row in rows
    ]  # fmt: skip


def draw_rich(table: TextTable, widths: list[int]) -> list[str]:
    """Draw a table with rich."""
    from rich import box  # noqa: PLC0415 - the extra 'cli'
    from rich import table as rich_table  # noqa: PLC0415 - as above
    from rich.console import Console  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    drawn = rich_table.Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column, width in zip(table.columns, widths, strict=True):
        drawn.add_column(Text(column.name), width=width, no_wrap=True, justify="right" if column.right else "left")
    for number, row in enumerate(table.rows):
        cells = (((cell, ""),) if isinstance(cell, str) else cell for cell in row)
        drawn.add_row(*(Text.assemble(*cell) for cell in cells), style=table.style_of(number) or None)
    console = Console(
        file=io.StringIO(), width=sum(widths) + len(GAP) * len(widths), force_terminal=True, color_system="standard",
        legacy_windows=False, markup=False, highlight=False, emoji=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(drawn)
    return [line.rstrip() for line in captured.get().splitlines()]


def plain(cell: Cell) -> str:
    """Return the text of a cell without its styles."""
    return cell if isinstance(cell, str) else "".join(text for text, _ in cell)


def fit(table: TextTable, width: int | None) -> tuple[TextTable, list[int]]:
    """Return the table and its column widths: without optional columns, and shortened, as far as is needed."""
    while True:
        widths = [
            max(map(width_of, (column.name, *(row[i] for row in table.rows)))) for i, column in enumerate(table.columns)
        ]
        total = sum(widths) + len(GAP) * (len(widths) - 1)
        if width is None or total <= width:
            return table, widths
        dropped = [i for i, column in enumerate(table.columns) if column.optional]
        if not dropped:
            break
        table = without_column(table, dropped[-1])
    excess = total - width
    for i in sorted((i for i, column in enumerate(table.columns) if column.shrinks), key=lambda i: -widths[i]):
        least = max(MIN_SHRUNK_WIDTH, width_of(table.columns[i].name))
        cut = min(excess, max(0, widths[i] - least))
        widths[i] -= cut
        excess -= cut
    rows = [tuple(shorten(cell, widths[i]) for i, cell in enumerate(row)) for row in table.rows]
    return replace(table, rows=rows), widths


def without_column(table: TextTable, index: int) -> TextTable:
    """Return the table without a column."""
    rows = [(*row[:index], *row[index + 1 :]) for row in table.rows]
    return replace(table, columns=(*table.columns[:index], *table.columns[index + 1 :]), rows=rows)


def shorten(cell: Cell, width: int) -> Cell:
    """Cut a text that is too wide; parts with styles of their own are not cut."""
    if not isinstance(cell, str) or width_of(cell) <= width:
        return cell
    while width_of(cell) > width - 1:
        cell = cell[:-1]
    return f"{cell}…"


def pad(text: str, width: int, *, right: bool) -> str:
    """Fill a text with spaces up to a width."""
    space = " " * (width - width_of(text))
    return space + text if right else text + space


def width_of(cell: Cell) -> int:
    """Return how many columns of a terminal a text takes: two for East Asian wide characters."""
    if not isinstance(cell, str):
        return sum(width_of(text) for text, _ in cell)
    if cell.isascii():
        return len(cell)
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in cell)


def draw_curve(counts: Sequence[float]) -> str:
    """Draw counts as block characters, relative to the highest."""
    highest = max(counts, default=0)
    last = len(CURVE_CHARACTERS) - 1
    return "".join([CURVE_CHARACTERS[max(1, int(count * last // highest)) if count else 0] for count in counts])


def join_within(items: Sequence[str], width: int, separator: str = ", ") -> list[str]:
    """Join items to lines that are at most this wide, if each item is."""
    lines: list[str] = []
    for item in items:
        if lines and width_of(lines[-1] + separator + item) <= width:
            lines[-1] += separator + item
        else:
            lines.append(item)
    return [line + separator.rstrip() for line in lines[:-1]] + lines[-1:]
