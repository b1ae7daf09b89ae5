"""`tidegate block`: deny all calls with a key for some time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.arguments import add_watch_option, positive_duration
from tidegate._cli.durations import METAVAR
from tidegate._cli.live import watch
from tidegate._cli.service_args import add_service_options, open_client, read_key
from tidegate._cli.tables import TableColumn, TextTable
from tidegate._policy.durations import format_duration
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.service.client._client import Client

EXAMPLES: Final = (
    ("tidegate block api user:42 --for 1h30m", "deny its calls for an hour and a half"),
    ("tidegate block api user:42 --remove", "allow them again"),
    ("tidegate block", "list the blocked keys"),
)
DEFAULT_DURATION: Final = 3600.0  # seconds
COLUMNS: Final = (
    TableColumn("policy"),
    TableColumn("key", shrinks=True),
    TableColumn("blocked for another", right=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key to block, and for how long."""
    parser.description = (
        "Deny all calls with a key for some time; without a key, list the blocked keys. Needs the admin token, if the "
        "service has tokens."
    )
    parser.add_argument("policy", nargs="?", metavar="POLICY", help="the name of the policy")
    parser.add_argument("key", nargs="*", metavar="KEY", help="the key; several arguments are the parts of one key")
    parser.add_argument(
        "--for",
        metavar=METAVAR,
        dest="duration",
        type=positive_duration,
        help=f"how long to block the key (default: {format_duration(DEFAULT_DURATION)})",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="the reason, for the audit log and the dashboard")
    parser.add_argument("--remove", action="store_true", help="remove the block of the key")
    add_watch_option(parser)
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Block a key, remove its block, or list all blocks."""
    if args.policy is not None and not args.key:
        raise ConfigError("expected a key after the policy; leave out both to list the blocked keys", field="KEY")
    if args.remove and args.policy is None:
        raise ConfigError("expected a policy and a key, such as: tidegate block api user:42 --remove", field="--remove")
    if args.remove and args.duration is not None:
        raise ConfigError("cannot be combined with --remove", field="--for")
    if args.watch is not None and args.policy is not None:
        raise ConfigError("only repeats the list of blocks: leave out POLICY and KEY", field="--watch")
    with open_client(args) as client:
        if args.policy is None:
            watch(lambda: list_blocks(client, output), output, args.watch)
        elif args.remove:
            client.unblock(args.policy, read_key(args), reason=args.reason)
            output.write_line(f"{args.policy}: {' '.join(args.key)} is no longer blocked")
            output.write_json({"ok": True})
        else:
            seconds = args.duration or DEFAULT_DURATION
            client.block(args.policy, read_key(args), seconds, reason=args.reason)
            output.write_line(f"{args.policy}: {' '.join(args.key)} is blocked for {format_duration(seconds)}", "red")
            output.write_json({"ok": True, "seconds": seconds})
    return 0


def list_blocks(client: Client, output: Output) -> None:
    """List the blocked keys."""
    blocks = client.blocks()
    rows = []
    for block in blocks:
        key = block["key"] if isinstance(block["key"], str) else " ".join(block["key"])
        rows.append((output.clean(block["policy"]), output.clean(key), format_duration(block["seconds"])))
    if rows:
        output.write_table(TextTable(COLUMNS, list(rows)))
    else:
        output.write_line("no key is blocked", "dim")
    output.write_json({"blocks": blocks})
