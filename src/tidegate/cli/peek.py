"""`tidegate peek`: show what a running service would decide, without taking permits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.acquire import write_decision
from tidegate.cli.service_args import add_verb_arguments, check_target, open_client, read_cost, read_key
from tidegate.service.api.verbs import PEEK
from tidegate.service.client.protocol import ServiceDecision, provider_peek_body

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key or the provider, the cost, and the service."""
    add_verb_arguments(parser, "peek")


def run(args: argparse.Namespace, output: Output) -> int:
    """Call the service, and write the decision."""
    check_target(args)
    cost = None if args.cost is None else read_cost(args.cost)
    with open_client(args) as client:
        if args.provider is None:
            decision = client.peek(args.policy, read_key(args), 1 if cost is None else cost)
        else:
            decision = ServiceDecision.read(client.call(PEEK, provider_peek_body(args.provider, cost)))
    return write_decision(decision, output)
