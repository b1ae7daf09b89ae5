"""`tidegate sources`: what a running service fetches, and what came of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidegate.cli.start import add_data
from tidegate.core.bounds import SECOND
from tidegate.outbound.sources.control import ask

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "list the sources of the running service"
COLUMNS = ("name", "provider", "next run", "last result", "ok", "failed", "skipped", "requeued")


def options(parser: argparse.ArgumentParser) -> None:
    """Take the service's folder."""
    add_data(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Show a table."""
    said = ask(args.data, verb="sources")
    rows = [COLUMNS, *map(row_of, said["sources"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for number, row in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say.line(text.rstrip(), *(() if number else ("bold",)))
    for message in said["recovered"]:
        say.line(message, "yellow")
    say.data(said)
    return 0


def row_of(source: dict[str, Any]) -> tuple[str, ...]:
    """Word a source as a row."""
    state = source["state"] if source["state"] != "idle" else instant(source["due"])
    last = f"{instant(source['last_at'])} {source['last_result']}" if source["last_at"] else "-"
    counts = (str(source[name]) for name in ("ok", "failed", "skipped", "requeued"))
    return (source["name"], source["provider"] or "unlimited", state, last, *counts)


def instant(micros: int) -> str:
    """Write an instant."""
    return datetime.fromtimestamp(micros // SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S")
