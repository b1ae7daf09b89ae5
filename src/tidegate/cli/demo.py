"""`tidegate demo`: the live demonstration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate import demo

if TYPE_CHECKING:
    import argparse

    from tidegate.cli.say import Say


def options(parser: argparse.ArgumentParser) -> None:
    """Take no options."""


def run(_args: argparse.Namespace, say: Say) -> int:
    """Play the demonstration."""
    say.data(demo.main(say.line) if say.as_json else demo.main())
    return 0
