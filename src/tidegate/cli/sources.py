"""`tidegate sources`: list the sources of a running service, with their results."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tidegate.cli.start import add_data_option
from tidegate.core.bounds import SECOND
from tidegate.outbound.sources.control import send_command

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output

COLUMNS = ("name", "provider", "next run", "last result", "ok", "failed", "skipped", "requeued")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the data folder of the service."""
    add_data_option(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the sources as a table."""
    reply = send_command(args.data, verb="sources")
    rows = [COLUMNS, *map(format_source, reply["sources"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for number, row in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        output.write_line(text.rstrip(), *(() if number else ("bold",)))
    for message in reply["recovered"]:
        output.write_line(message, "yellow")
    output.write_json(reply)
    return 0


def format_source(source: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a source's row."""
    state = source["state"] if source["state"] != "idle" else format_instant(source["due"])
    last = f"{format_instant(source['last_at'])} {source['last_result']}" if source["last_at"] else "-"
    counts = (str(source[name]) for name in ("ok", "failed", "skipped", "requeued"))
    return (source["name"], source["provider"] or "unlimited", state, last, *counts)


def format_instant(microseconds: int) -> str:
    """Write an instant as UTC date and time."""
    return datetime.fromtimestamp(microseconds // SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S")
