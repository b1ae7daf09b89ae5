"""`tidegate block`: deny a key for a while, whatever its limits say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.asking import add_service, key_of, open_client
from tidegate.cli.budget import duration
from tidegate.core.bounds import SECOND
from tidegate.core.limit import parse_period
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say
    from tidegate.service.client import Client

HELP = "deny a key for a while, whatever its limits say; without a key: list the blocks (needs the admin token)"


def options(parser: argparse.ArgumentParser) -> None:
    """Take whom to block, and for how long."""
    parser.add_argument("policy", nargs="?", metavar="POLICY")
    parser.add_argument("key", nargs="*", metavar="KEY", help="the key; several words are its parts")
    parser.add_argument("--for", default="1h", metavar="TIME", dest="lasting", help="how long, as in 10m (1h)")
    parser.add_argument("--remove", action="store_true", help="deny it no longer")
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Block, unblock or list."""
    if args.policy is not None and not args.key:
        raise ConfigError("name a key of the policy too, or neither, to list the blocks", field="KEY")
    with open_client(args) as client:
        if args.policy is None:
            listed(client, say)
        elif args.remove:
            client.unblock(args.policy, key_of(args))
            say.line(f"{args.policy}: {' '.join(args.key)} is not blocked")
            say.data({"ok": True})
        else:
            seconds = seconds_of(args.lasting)
            client.block(args.policy, key_of(args), seconds)
            say.line(f"{args.policy}: {' '.join(args.key)} is blocked for {duration(seconds)}", "red")
            say.data({"ok": True, "seconds": seconds})
    return 0


def listed(client: Client, say: Say) -> None:
    """List the blocks."""
    blocks = client.blocks()
    for block in blocks:
        key = block["key"] if isinstance(block["key"], str) else " ".join(block["key"])
        say.line(f"{block['policy']}: {say.clean(key)}, for another {duration(block['seconds'])}")
    if not blocks:
        say.line("nobody is blocked", "dim")
    say.data({"blocks": blocks})


def seconds_of(text: str) -> float:
    """Read a time such as 10m, or a number of seconds."""
    try:
        return parse_period(float(text) if text.replace(".", "", 1).isdecimal() else text) / SECOND
    except ConfigError:
        raise ConfigError(f"expected a time such as 10m or 1h, not {text}", field="--for") from None
