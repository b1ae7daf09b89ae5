"""`tidegate usage`: how much of each limit a key has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.asking import add_service, add_subject, key_of, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "show how much of each limit a key has used"


def options(parser: argparse.ArgumentParser) -> None:
    """Take whom it is about."""
    add_subject(parser)
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Ask, and draw a bar for each limit."""
    with open_client(args) as client:
        limits = client.usage(args.policy, key_of(args))
    width = max((len(limit["name"]) for limit in limits), default=0)
    for limit in limits:
        bar = say.bar(limit["used"], limit["used"] + limit["remaining"])
        whole = limit["used"] + limit["remaining"]
        after = f"all back in {limit['reset_after']:g} s" if limit["used"] else "unused"
        say.line(f"{limit['name']:<{width}}  {bar}  {limit['used']:,} / {whole:,} {limit['unit']}  {after}")
    say.data({"limits": limits})
    return 0
