"""`tidegate remove`: remove a source from a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate._cli.arguments import add_data_option, data_folder
from tidegate.outbound.sources._control import send_command

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (("tidegate remove fmp-aapl-prices", "stop fetching this source"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the name of the source, and the data folder of the service."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help="the name of the source; one in a file returns when the file changes, or at the next start",
    )
    add_data_option(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Send the name to the service."""
    reply = send_command(data_folder(args), verb="remove", name=args.name)
    output.write_line(reply["says"])
    output.write_json(reply)
    return 0
