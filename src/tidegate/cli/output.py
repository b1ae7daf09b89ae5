"""The output of commands: text with colours on a terminal, plain text in a pipe, JSON with --json."""

from __future__ import annotations

import json
import os
import sys
from typing import Final

STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun, such as '1 policy' or '2 policies'."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


class Output:
    """Writes the output of a command."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.live: bool = sys.stdout.isatty() and not as_json
        self.colours: bool = self.live and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def style(self, text: str, *styles: str) -> str:
        """Colour text, if the terminal shows colours."""
        codes = ";".join(STYLES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.colours and codes else text

    def write_line(self, text: str = "", *styles: str) -> None:
        """Write a line, unless the output is JSON."""
        if not self.as_json:
            print(self.style(text, *styles), flush=True)

    @staticmethod
    def clean(text: str, max_length: int = 60) -> str:
        """Replace control characters, so that text from elsewhere cannot control the terminal, and shorten it."""
        shown = "".join(character if character.isprintable() else "?" for character in text)
        return shown if len(shown) <= max_length else shown[: max_length - 1] + "…"

    def write_json(self, value: object) -> None:
        """Write a value as JSON, if the output is JSON."""
        if self.as_json:
            print(json.dumps(value, indent=2 if sys.stdout.isatty() else None), flush=True)

    def write_error(self, text: str) -> None:
        """Write an error to standard error."""
        if self.as_json:
            print(json.dumps({"error": text}), file=sys.stderr, flush=True)
        else:
            print(f"tidegate: {text}", file=sys.stderr, flush=True)

    def draw_bar(self, used: int, quota: int, width: int = 30) -> str:
        """Draw how much of a quota is used."""
        filled = min(width, -(-used * width // quota)) if quota > 0 else width
        share = used / quota if quota > 0 else 1.0
        colour = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"  # noqa: PLR2004 - the milestones
        return self.style("█" * filled, colour) + self.style("░" * (width - filled), "dim")
