"""Types of command-line arguments, whose errors say what is expected, and options that several commands share."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate._cli.durations import METAVAR, duration, positive_duration
from tidegate.errors import ConfigError
from tidegate.service._config.settings import DATA_FOLDER

if TYPE_CHECKING:
    import argparse

DEFAULT_INTERVAL: Final = 1.0  # seconds between two updates of a view

__all__ = [
    "add_data_option",
    "add_watch_option",
    "data_folder",
    "duration",
    "integer",
    "number",
    "positive_duration",
    "positive_integer",
    "read_cost",
]


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


def add_data_option(parser: argparse._ActionsContainer) -> None:
    """Add the data folder of a running service."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"the data folder of the service (default: TIDEGATE_DATA, or ./{DATA_FOLDER})",
    )


def data_folder(args: argparse.Namespace) -> Path:
    """Return the data folder of the service: of the option, of the environment, or the default."""
    return args.data or Path(os.environ.get("TIDEGATE_DATA") or DATA_FOLDER)


def read_cost(text: str) -> Any:  # noqa: ANN401 - an integer, or an integer for each unit
    """Read a cost such as 3, or tokens=100,requests=1."""
    if text.isdecimal():
        return int(text)
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(unit.strip() and amount.strip().isdecimal() for unit, _, amount in pairs):
        raise ConfigError(f"expected an integer, or units such as tokens=100,requests=1, not {text!r}", field="--cost")
    return {unit.strip(): int(amount) for unit, _, amount in pairs}
