"""`tidegate add`: add a source to a running service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.start import add_data
from tidegate.outbound.sources.control import ask
from tidegate.outbound.sources.source import read_source

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say

HELP = "add a source to the running service"


def options(parser: argparse.ArgumentParser) -> None:
    """Take the source's file and the service's folder."""
    parser.add_argument("source", type=Path, metavar="FILE", help="the source's YAML file")
    add_data(parser)


def run(args: argparse.Namespace, say: Say) -> int:
    """Check the file, and send it."""
    read_source(args.source)
    said = ask(args.data, verb="add", text=args.source.read_text(encoding="utf-8"), file=str(args.source))
    say.line(said["says"])
    say.data(said)
    return 0
