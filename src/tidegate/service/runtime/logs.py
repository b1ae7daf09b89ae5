"""How the service logs: lines for people on a terminal, JSON for machines elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TextIO

from tidegate.clock import TaskSignal
from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.observe.logs import DecisionLog

LINE_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Write it."""
        said: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def set_up(stream: TextIO | None = None, *, level: int = logging.INFO) -> logging.Handler:
    """Log to standard error, in the form that suits whoever reads it."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(LINE_FORMAT) if stream.isatty() else JsonFormatter())
    logger = logging.getLogger("tidegate")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


def take_down(handler: logging.Handler) -> None:
    """Log as before `set_up`."""
    logger = logging.getLogger("tidegate")
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


async def count_denials(denials: DecisionLog, clock: Clock) -> None:
    """Log once a second how many denials had no line of their own, until cancelled."""
    while True:
        await clock.wait_async(TaskSignal(), clock.steady() + SECOND)
        denials.flush(clock.ns() // 1000)
