"""`tidegate peek`: show what a running service would decide, without taking permits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli import EXIT_OK
from tidegate._cli.acquire import write_decision
from tidegate._cli.arguments import add_watch_option, read_cost
from tidegate._cli.live import watch
from tidegate._cli.service_args import add_verb_arguments, check_target, open_client, read_key
from tidegate.service._api.verbs import PEEK
from tidegate.service.client._protocol import ServiceDecision, provider_peek_body

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output
    from tidegate.service.client._client import Client

EXAMPLES: Final = (
    ("tidegate peek api user:42", "would a call be allowed?"),
    ("tidegate peek --provider openai --watch", "check again every second"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key or the provider, the cost, and the service."""
    add_verb_arguments(parser, "peek")
    add_watch_option(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Call the service, and write the decision."""
    check_target(args)
    codes = [EXIT_OK]
    with open_client(args) as client:
        watch(lambda: codes.append(write_decision(peek(client, args), output)), output, args.watch)
    return codes[-1]


def peek(client: Client, args: argparse.Namespace) -> ServiceDecision:
    """Ask the service."""
    cost = None if args.cost is None else read_cost(args.cost)
    if args.provider is None:
        return client.peek(args.policy, read_key(args), 1 if cost is None else cost)
    return ServiceDecision.read(client.call(PEEK, provider_peek_body(args.provider, cost)))
