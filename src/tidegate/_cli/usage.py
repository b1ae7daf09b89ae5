"""`tidegate usage`: show how much of each limit a key, or a provider, has used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.arguments import add_watch_option
from tidegate._cli.live import watch
from tidegate._cli.service_args import add_verb_arguments, check_target, open_client, read_key
from tidegate._cli.tables import TableColumn, TextTable
from tidegate._policy.durations import format_duration
from tidegate.service._api.requests import TargetRequest
from tidegate.service._api.verbs import USAGE
from tidegate.service.client._protocol import read_usage

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate._limiter.limiter import Usage
    from tidegate.service.client._client import Client

EXAMPLES: Final = (
    ("tidegate usage api user:42", "a bar for each limit of this key"),
    ("tidegate usage api user:42 --watch 5s", "update them every five seconds"),
    ("tidegate usage --provider openai", "how much of a provider's quota is used"),
)
COLUMNS: Final = (
    TableColumn("limit"),
    TableColumn("", optional=True),
    TableColumn("used", right=True),
    TableColumn("of", right=True),
    TableColumn("unit"),
    TableColumn("reset in", right=True),
)
BAR_WIDTH: Final = 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key or the provider, and the service."""
    add_verb_arguments(parser, "usage")
    add_watch_option(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Draw a bar for each limit."""
    check_target(args)
    with open_client(args) as client:
        watch(lambda: show(read(client, args), output), output, args.watch)
    return 0


def read(client: Client, args: argparse.Namespace) -> dict[str, Usage]:
    """Ask the service."""
    if args.provider is None:
        return client.usage(args.policy, read_key(args))
    return read_usage(client.call(USAGE, TargetRequest(provider=args.provider)))


def show(usage: dict[str, Usage], output: Output) -> None:
    """Write the table once."""
    rows = []
    for name, limit in usage.items():
        total = limit.used + limit.remaining
        reset = format_duration(limit.reset_after) if limit.used else "unused"
        bar = output.bar(limit.used, total, BAR_WIDTH)
        rows.append((output.clean(name), bar, f"{limit.used:,}", f"{total:,}", limit.unit, reset))
    if rows:
        output.write_table(TextTable(COLUMNS, list(rows)))
    else:
        output.write_line("not limited")
    output.write_json({"limits": [{"name": name, **limit._asdict()} for name, limit in usage.items()]})
