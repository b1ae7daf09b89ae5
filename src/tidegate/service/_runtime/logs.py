"""Logging of the service: plain lines on a terminal, JSON elsewhere."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TextIO

from tidegate._runtime.clock import TaskSignal
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock
    from tidegate.observe.logs import DecisionLog

LINE_FORMAT: Final = "%(asctime)s %(levelname)-7s %(message)s"


class JsonFormatter(logging.Formatter):
    """Writes each record as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up(stream: TextIO | None = None, *, level: int = logging.INFO) -> logging.Handler:
    """Log to standard error: plain lines on a terminal, JSON elsewhere. Returns the new handler."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(LINE_FORMAT) if stream.isatty() else JsonFormatter())
    logger = logging.getLogger("tidegate")
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    return handler


def tear_down(handler: logging.Handler) -> None:
    """Undo `set_up`."""
    logger = logging.getLogger("tidegate")
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


async def log_denial_counts(denials: DecisionLog, clock: Clock) -> None:
    """Log once a second how many denials were not logged individually, until cancelled."""
    while True:
        await clock.wait_async(TaskSignal(), clock.steady() + SECOND)
        denials.flush(clock.ns() // 1000)
