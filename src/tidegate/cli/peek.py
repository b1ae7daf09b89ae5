"""`tidegate peek`: show what a running service would decide, without taking permits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.acquire import write_decision
from tidegate.cli.service_args import add_verb_arguments, open_client, read_cost, read_key

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key, the cost, and the service."""
    add_verb_arguments(parser, "peek")


def run(args: argparse.Namespace, output: Output) -> int:
    """Call the service, and write the decision."""
    with open_client(args) as client:
        return write_decision(client.peek(args.policy, read_key(args), read_cost(args.cost)), output)
