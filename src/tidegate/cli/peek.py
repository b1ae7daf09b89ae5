"""`tidegate peek`: what a running service would answer, without taking anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.acquire import told
from tidegate.cli.asking import add_service, add_subject, cost_of, key_of, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "ask what a running service would answer, and change nothing"


def options(parser: argparse.ArgumentParser) -> None:
    """Take whom it is about, and what it would cost."""
    add_subject(parser)
    parser.add_argument("--cost", default="1", metavar="COST", help="a number, or units as in tokens=100 (1)")
    add_service(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Ask."""
    with open_client(args) as client:
        return told(client.peek(args.policy, key_of(args), cost_of(args.cost)), say)
