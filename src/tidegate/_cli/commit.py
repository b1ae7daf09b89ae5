"""`tidegate commit`: settle permits of a provider, or a reservation, with the actual cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.arguments import read_cost
from tidegate._cli.service_args import add_service_options, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (
    ("tidegate commit 3f2a…", "the call cost what was reserved"),
    ("tidegate commit 3f2a… --cost tokens=312", "it cost 312 tokens"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the id, the actual cost, and the service."""
    parser.description = "Settle permits of a provider, or a reservation, with the actual cost."
    add_id_argument(parser)
    parser.add_argument("--cost", metavar="COST", help="the actual cost: an integer, or units such as tokens=100")
    add_service_options(parser)


def add_id_argument(parser: argparse.ArgumentParser) -> None:
    """Add the id of what is settled."""
    parser.add_argument(
        "id", metavar="ID", help="the id that 'tidegate acquire --provider' or POST /v1/reserve returned"
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Commit."""
    with open_client(args) as client:
        client.commit(args.id, None if args.cost is None else read_cost(args.cost))
    output.write_line("committed", "green")
    output.write_json({"ok": True})
    return 0
