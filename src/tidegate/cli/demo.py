"""`tidegate demo`: the live demonstration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate import demo

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say


def options(parser: argparse.ArgumentParser) -> None:
    """Take no options."""


def run(_args: argparse.Namespace, _say: Say) -> int:
    """Play the demonstration."""
    demo.main()
    return 0
