"""Types of command-line arguments; their errors say what is expected."""

from __future__ import annotations

from argparse import ArgumentTypeError


def seconds(text: str) -> float:
    """Read a number of seconds."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a number of seconds such as 0.5, not {text!r}") from None


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
