"""Types of command-line arguments, whose errors say what is expected, and options that several commands share."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING, Final

from tidegate.cli.durations import METAVAR, duration, positive_duration

if TYPE_CHECKING:
    import argparse

DEFAULT_INTERVAL: Final = 1.0  # seconds between two updates of a view

__all__ = ["add_watch_option", "duration", "integer", "number", "positive_duration", "positive_integer"]


def number(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a number, not {text!r}") from None


def integer(text: str) -> int:
    """Read an integer."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected an integer, not {text!r}") from None


def positive_integer(text: str) -> int:
    """Read an integer of at least 1."""
    found = integer(text)
    if found < 1:
        raise ArgumentTypeError(f"expected an integer of at least 1, not {text!r}")
    return found


def watch_interval(text: str) -> float:
    """Read the time between two updates."""
    try:
        return positive_duration(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; write --watch after the other arguments, or --watch=1s") from None


def add_watch_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that repeats a view."""
    parser.add_argument(
        "--watch",
        metavar=METAVAR,
        nargs="?",
        type=watch_interval,
        const=DEFAULT_INTERVAL,
        help="repeat the view until you press q or Ctrl-C, every second by default",
    )
