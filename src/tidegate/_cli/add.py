"""`tidegate add`: add a source to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidegate._cli.arguments import add_data_option, data_folder
from tidegate.outbound.sources._control import send_command
from tidegate.outbound.sources._source import read_source

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (("tidegate add prices.yaml", "fetch this source from now on"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the file of the source, and the data folder of the service."""
    parser.add_argument("source", type=Path, metavar="FILE", help="the YAML file of the source")
    add_data_option(parser)


def run(args: argparse.Namespace, output: Output) -> int:
    """Check the file, and send it to the service."""
    read_source(args.source)
    reply = send_command(
        data_folder(args), verb="add", text=args.source.read_text(encoding="utf-8"), file=str(args.source)
    )
    output.write_line(reply["says"])
    output.write_json(reply)
    return 0
