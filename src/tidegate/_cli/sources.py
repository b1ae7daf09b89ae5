"""`tidegate sources`: list the sources of a running service, with their results."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.arguments import add_data_option, add_watch_option, data_folder
from tidegate._cli.live import watch
from tidegate._cli.tables import TableColumn, TextTable
from tidegate.core._bounds import SECOND
from tidegate.outbound.sources._control import send_command

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (
    ("tidegate sources", "when each was and will be fetched"),
    ("tidegate sources --watch", "follow the fetches"),
    ("tidegate sources --run fmp-aapl-prices", "fetch this source now"),
)
COLUMNS: Final = (
    TableColumn("name", shrinks=True),
    TableColumn("provider", shrinks=True),
    TableColumn("next run"),
    TableColumn("last result", shrinks=True),
    *(TableColumn(name, right=True) for name in ("ok", "failed")),
    *(TableColumn(name, right=True, optional=True) for name in ("skipped", "requeued")),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the data folder of the service."""
    add_data_option(parser)
    add_watch_option(parser)
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="fetch a source now, within the quota of its provider"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Write the sources as a table, or fetch one."""
    if args.run_name is not None:
        reply = send_command(data_folder(args), verb="run", name=args.run_name)
        output.write_line(reply["says"])
        output.write_json(reply)
        return 0
    watch(lambda: show(args, output), output, args.watch)
    return 0


def show(args: argparse.Namespace, output: Output) -> None:
    """Write the table once."""
    reply = send_command(data_folder(args), verb="sources")
    rows = list(map(format_source, reply["sources"]))
    output.write_table(TextTable(COLUMNS, list(rows), empty="no source is configured"))
    for message in (*reply["recovered"], *reply["problems"]):
        output.write_line(message, "yellow")
    output.write_json(reply)


def format_source(source: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a source's row."""
    state = source["state"] if source["state"] != "idle" else format_instant(source["due"])
    if source["skip_reason"]:
        state = f"skipped: {source['skip_reason']}"
    last = f"{format_instant(source['last_at'])} {source['last_result']}" if source["last_at"] else "-"
    counts = (str(source[name]) for name in ("ok", "failed", "skipped", "requeued"))
    return (source["name"], source["provider"] or "unlimited", state, last, *counts)


def format_instant(microseconds: int) -> str:
    """Write an instant as UTC date and time."""
    return datetime.fromtimestamp(microseconds // SECOND, UTC).strftime("%Y-%m-%d %H:%M:%S")
