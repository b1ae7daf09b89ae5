"""`tidegate peek`: show what a running service would decide, without taking permits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.acquire import write_decision
from tidegate.cli.service_args import add_key_arguments, add_service_options, open_client, read_cost, read_key

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key, the cost, and the service."""
    add_key_arguments(parser)
    parser.add_argument("--cost", default="1", metavar="COST", help="an integer, or units as in tokens=100 (1)")
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Call the service, and write the decision."""
    with open_client(args) as client:
        return write_decision(client.peek(args.policy, read_key(args), read_cost(args.cost)), output)
