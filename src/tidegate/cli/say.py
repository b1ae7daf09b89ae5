"""How commands answer: text with colours on a terminal, plain text in a pipe, JSON when asked."""

from __future__ import annotations

import json
import os
import sys
from typing import Final

STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}


class Say:
    """Prints what a command has to say."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.live = sys.stdout.isatty() and not as_json
        self.colours = self.live and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def style(self, text: str, *styles: str) -> str:
        """Colour a text, if the terminal shows colours."""
        codes = ";".join(STYLES[style] for style in styles)
        return f"\x1b[{codes}m{text}\x1b[0m" if self.colours and codes else text

    def line(self, text: str = "", *styles: str) -> None:
        """Print a line, unless the answer is JSON."""
        if not self.as_json:
            print(self.style(text, *styles), flush=True)

    @staticmethod
    def clean(text: str, longest: int = 60) -> str:
        """Show what somebody else wrote without letting it steer the terminal."""
        shown = "".join(sign if sign.isprintable() else "?" for sign in text)
        return shown if len(shown) <= longest else shown[: longest - 1] + "…"

    def data(self, value: object) -> None:
        """Print the answer as JSON, if that was asked for."""
        if self.as_json:
            print(json.dumps(value, indent=2 if sys.stdout.isatty() else None), flush=True)

    def error(self, text: str) -> None:
        """Say on standard error what went wrong."""
        if self.as_json:
            print(json.dumps({"error": text}), file=sys.stderr, flush=True)
        else:
            print(f"tidegate: {text}", file=sys.stderr, flush=True)

    def bar(self, used: int, quota: int, width: int = 30) -> str:
        """Draw how much of a quota is used."""
        filled = min(width, -(-used * width // quota)) if quota > 0 else width
        share = used / quota if quota > 0 else 1.0
        colour = "red" if share >= 0.95 else "yellow" if share >= 0.8 else "green"  # noqa: PLR2004 - the milestones
        return self.style("█" * filled, colour) + self.style("░" * (width - filled), "dim")
