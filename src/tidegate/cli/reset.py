"""`tidegate reset`: forget what a key has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.asking import add_service, add_subject, key_of, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "forget what a key has used (needs the admin token)"


def options(parser: argparse.ArgumentParser) -> None:
    """Take whom it is about."""
    add_subject(parser)
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Ask."""
    with open_client(args) as client:
        client.reset(args.policy, key_of(args))
    say.line(f"{args.policy}: {' '.join(args.key)} starts afresh")
    say.data({"ok": True})
    return 0
