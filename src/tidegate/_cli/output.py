"""The output of commands: text with colours on a terminal, plain text in a pipe, JSON with --json.

Colours need rich (the extra `cli`), a terminal that shows them, and no variable NO_COLOR.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from tidegate._cli.progress import Progress
from tidegate._cli.tables import Spans, TextTable, draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRESS_WIDTH: Final = 24
CLEAR_SCREEN: Final = "\x1b[H\x1b[J"


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, such as '1 policy' or '2 policies'."""
    return f"{count:,} {singular if count == 1 else plural or singular + 's'}"


@contextmanager
def without_logs() -> Iterator[None]:
    """Log nothing: the command itself writes what happens, such as a denial or an unavailable store."""
    log = logging.getLogger("tidegate")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


class OutputError(Exception):
    """Standard output cannot be written, such as a file on a full disk."""


class Output:
    """Writes the output of a command."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.live: bool = sys.stdout.isatty() and not as_json
        self.colours: bool = self.live and has_colours()
        self._progress: Progress | None = None
        self._what = ""  # the command is doing
        self._frame: list[str] | None = None  # the lines of a view that is not shown yet

    @property
    def columns(self) -> int:
        """The width of the terminal, in characters."""
        return shutil.get_terminal_size().columns

    def style(self, text: str, *styles: str) -> str:
        """Colour text, if the terminal shows colours."""
        if not self.colours or not any(styles) or not text:
            return text
        from rich.color import ColorSystem  # noqa: PLC0415 - the extra 'cli'
        from rich.style import Style  # noqa: PLC0415 - as above

        return Style.parse(" ".join(styles)).render(text, color_system=ColorSystem.STANDARD)

    def write_line(self, text: str = "", *styles: str) -> None:
        """Write a line, unless the output is JSON."""
        if self.as_json:
            return
        self.end_progress()
        if self._frame is not None:
            self._frame.append(self.style(text, *styles))
        else:
            self.write_now(f"{self.style(text, *styles)}\n")

    @staticmethod
    def write_now(text: str) -> None:
        """Write text to standard output now; raises OutputError if that fails, unless the reader is gone."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from None

    def write_lines(self, lines: list[str]) -> None:
        """Write several lines."""
        for line in lines:
            self.write_line(line)

    def write_table(self, table: TextTable) -> None:
        """Write a table."""
        self.write_lines(draw_table(table, self))

    @staticmethod
    def clean(text: str, max_length: int = 60) -> str:
        """Replace control characters, so that text from elsewhere cannot control the terminal, and shorten it."""
        shown = "".join(character if character.isprintable() else "?" for character in text)
        return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"

    def write_json(self, value: object) -> None:
        """Write a value as JSON, if the output is JSON."""
        if self.as_json:
            self.end_progress()
            self.write_now(json.dumps(value, indent=2 if sys.stdout.isatty() else None) + "\n")

    def write_error(self, text: str) -> None:
        """Write an error to standard error."""
        self.end_progress()
        if self.as_json:
            print(json.dumps({"error": text}), file=sys.stderr, flush=True)
        else:
            print(f"tidegate: {text}", file=sys.stderr, flush=True)

    @staticmethod
    def bar(used: int, quota: int, width: int = 30) -> Spans:
        """Return a bar that shows how much of a quota is used."""
        filled = min(width, -(-used * width // quota)) if quota > 0 else width
        share = used / quota if quota > 0 else 1.0
        colour = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"  # noqa: PLR2004 - the milestones
        return ("█" * filled, colour), ("░" * (width - filled), "dim")

    def draw_bar(self, used: int, quota: int, width: int = 30) -> str:
        """Draw such a bar."""
        return "".join(self.style(text, style) for text, style in self.bar(used, quota, width))

    # ---- views and progress ------------------------------------------------------------------------------------------

    @contextmanager
    def frame(self, footer: str = "") -> Iterator[None]:
        """Write the lines of the block at once, in place of the screen's content; without a terminal, below it."""
        if not self.live:
            yield
            return
        self._frame = []
        try:
            yield
        finally:
            lines, self._frame = self._frame, None
        rows = shutil.get_terminal_size().lines
        shown = lines[: max(1, rows - 2)] + ([self.style(footer, "dim")] if footer else [])
        self.write_now(CLEAR_SCREEN + "\n".join(shown) + "\n")

    @contextmanager
    def progress(self, what: str) -> Iterator[None]:
        """Show what a command is doing, on standard error, if its first output takes longer than a second."""
        if what and sys.stderr.isatty() and not self.as_json:
            self._progress, self._what = Progress(what, sys.stderr), what
        try:
            yield
        finally:
            self.end_progress()

    def show_progress(self, done: int, total: int) -> None:
        """Show on the line of the progress how much of a total is done."""
        if self._progress is not None and total:
            filled = "".join(text for text, _ in self.bar(done, total, PROGRESS_WIDTH))
            self._progress.show(f"{self._what} {filled} {100 * done // total} %")

    def end_progress(self) -> None:
        """Remove the line that shows the progress."""
        if self._progress is not None:
            self._progress.end()
            self._progress = None


def has_colours() -> bool:
    """Return whether the terminal shows colours, and rich is installed to write them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None
