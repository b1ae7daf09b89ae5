"""`tidegate usage`: show how much of each limit a key has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.service_args import add_verb_arguments, open_client, read_key

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the key and the service."""
    add_verb_arguments(parser, "usage")


def run(args: argparse.Namespace, output: Output) -> int:
    """Draw a bar for each limit."""
    with open_client(args) as client:
        usage = client.usage(args.policy, read_key(args))
    width = max(map(len, usage), default=0)
    for name, limit in usage.items():
        total = limit.used + limit.remaining
        bar = output.draw_bar(limit.used, total)
        reset = f"completely reset in {limit.reset_after:g} s" if limit.used else "unused"
        output.write_line(f"{name:<{width}}  {bar}  {limit.used:,} / {total:,} {limit.unit}  {reset}")
    output.write_json({"limits": [{"name": name, **limit._asdict()} for name, limit in usage.items()]})
    return 0
