"""`tidegate demo`: run a short live demonstration in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidegate import _demo as demo

if TYPE_CHECKING:
    import argparse

    from tidegate._cli.output import Output

EXAMPLES: Final = (("tidegate demo", "three clients and one limiter, for 12 seconds"),)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(_args: argparse.Namespace, output: Output) -> int:
    """Run the demonstration."""
    output.write_json(demo.main(output.write_line) if output.as_json else demo.main())
    return 0
