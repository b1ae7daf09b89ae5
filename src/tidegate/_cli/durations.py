"""How the command line reads durations: 500ms, 30s, 5m, 1h30m. `tidegate._policy.durations` writes them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from typing import Final

from tidegate._policy.setting_values import DURATION_EXAMPLES as EXAMPLES
from tidegate.core._bounds import SECOND
from tidegate.core._limit import parse_period
from tidegate.errors import ConfigError

METAVAR: Final = "TIME"
HELP: Final = f"{METAVAR} is a duration such as {EXAMPLES}; without a unit, seconds."
SECONDS = re.compile(r"\d+(?:\.\d+)?")


def read_duration(text: str) -> float:
    """Read a duration, in seconds; 0 is allowed. Raises ConfigError."""
    try:
        if SECONDS.fullmatch(text):
            return float(text) and parse_period(float(text)) / SECOND
        return 0.0 if text in ("0s", "0ms") else parse_period(text) / SECOND
    except ConfigError:
        raise ConfigError(f"expected a duration such as {EXAMPLES}, not {text!r}") from None


def duration(text: str) -> float:
    """Read the value of an option that is a duration, in seconds."""
    try:
        return read_duration(text)
    except ConfigError as error:
        raise ArgumentTypeError(error.detail) from None


def positive_duration(text: str) -> float:
    """Read the value of an option that is a duration above 0, in seconds."""
    found = duration(text)
    if not found:
        raise ArgumentTypeError(f"expected a duration above 0, such as {EXAMPLES}, not {text!r}")
    return found
