"""`tidegate cancel`: return the permits of a provider, or of a reservation, that were not used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.commit import add_id_argument
from tidegate._cli.service_args import add_service_options, open_client

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (("tidegate cancel 3f2a…", "return the permits of this reservation"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the id and the service."""
    parser.description = "Return the unused permits of a provider or of a reservation."
    add_id_argument(parser)
    add_service_options(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Cancel."""
    with open_client(args) as client:
        client.cancel(args.id)
    output.write_line("cancelled", "green")
    output.write_json({"ok": True})
    return 0
