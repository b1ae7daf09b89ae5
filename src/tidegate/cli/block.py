"""`tidegate block`: deny all calls with a key for some time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate.cli.budget import format_duration
from tidegate.cli.service_args import add_service_options, open_client, read_key
from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output
    from tidegate.service.client.client import Client

DEFAULT_DURATION: Final = "1h"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key to block, and for how long."""
    parser.add_argument("policy", nargs="?", metavar="POLICY", help="the name of the policy")
    parser.add_argument("key", nargs="*", metavar="KEY", help="the key; several arguments are the parts of one key")
    parser.add_argument(
        "--for",
        metavar="TIME",
        dest="duration",
        help=f"how long to block the key, such as 10m (default: {DEFAULT_DURATION})",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="the reason, for the audit log and the dashboard")
    parser.add_argument("--remove", action="store_true", help="remove the block of the key")
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Block a key, remove its block, or list all blocks."""
    if args.policy is not None and not args.key:
        raise ConfigError("expected a key after the policy; leave out both to list the blocked keys", field="KEY")
    if args.remove and args.policy is None:
        raise ConfigError("expected a policy and a key, such as: tidegate block api user:42 --remove", field="--remove")
    if args.remove and args.duration is not None:
        raise ConfigError("cannot be combined with --remove", field="--for")
    with open_client(args) as client:
        if args.policy is None:
            list_blocks(client, output)
        elif args.remove:
            client.unblock(args.policy, read_key(args), reason=args.reason)
            output.write_line(f"{args.policy}: {' '.join(args.key)} is not blocked")
            output.write_json({"ok": True})
        else:
            seconds = read_seconds(args.duration or DEFAULT_DURATION)
            client.block(args.policy, read_key(args), seconds, reason=args.reason)
            output.write_line(f"{args.policy}: {' '.join(args.key)} is blocked for {format_duration(seconds)}", "red")
            output.write_json({"ok": True, "seconds": seconds})
    return 0


def list_blocks(client: Client, output: Output) -> None:
    """List the blocked keys."""
    blocks = client.blocks()
    for block in blocks:
        key = block["key"] if isinstance(block["key"], str) else " ".join(block["key"])
        output.write_line(f"{block['policy']}: {output.clean(key)}, for another {format_duration(block['seconds'])}")
    if not blocks:
        output.write_line("no key is blocked", "dim")
    output.write_json({"blocks": blocks})


def read_seconds(text: str) -> float:
    """Read a duration such as 10m, or a number of seconds."""
    try:
        return parse_period(float(text) if text.replace(".", "", 1).isdecimal() else text) / SECOND
    except ConfigError:
        raise ConfigError(f"expected a duration such as 10m or 1h, not {text!r}", field="--for") from None
