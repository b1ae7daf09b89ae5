"""`tidegate usage`: show how much of each limit a key, or a provider, has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.service_args import add_verb_arguments, check_target, open_client, read_key
from tidegate.service.api.requests import TargetRequest
from tidegate.service.api.verbs import USAGE
from tidegate.service.client.protocol import read_usage

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key or the provider, and the service."""
    add_verb_arguments(parser, "usage")


def run(args: argparse.Namespace, output: Output) -> int:
    """Draw a bar for each limit."""
    check_target(args)
    with open_client(args) as client:
        if args.provider is None:
            usage = client.usage(args.policy, read_key(args))
        else:
            usage = read_usage(client.call(USAGE, TargetRequest(provider=args.provider)))
    if not usage:
        output.write_line("not limited")
    width = max(map(len, usage), default=0)
    for name, limit in usage.items():
        total = limit.used + limit.remaining
        bar = output.draw_bar(limit.used, total)
        reset = f"completely reset in {limit.reset_after:g} s" if limit.used else "unused"
        output.write_line(f"{name:<{width}}  {bar}  {limit.used:,} / {total:,} {limit.unit}  {reset}")
    output.write_json({"limits": [{"name": name, **limit._asdict()} for name, limit in usage.items()]})
    return 0
