"""`tidegate usage`: show how much of each limit a key has used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.cli.service_args import add_key_options as add_options
from tidegate.cli.service_args import open_client, read_key

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.output import Output

__all__ = ["add_options", "run"]


def run(args: argparse.Namespace, output: Output) -> int:
    """Draw a bar for each limit."""
    with open_client(args) as client:
        limits = client.usage(args.policy, read_key(args))
    width = max((len(limit["name"]) for limit in limits), default=0)
    for limit in limits:
        total = limit["used"] + limit["remaining"]
        bar = output.draw_bar(limit["used"], total)
        reset = f"completely reset in {limit['reset_after']:g} s" if limit["used"] else "unused"
        output.write_line(f"{limit['name']:<{width}}  {bar}  {limit['used']:,} / {total:,} {limit['unit']}  {reset}")
    output.write_json({"limits": limits})
    return 0
