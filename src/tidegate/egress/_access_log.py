"""The access log: one JSON line for each request, without query strings, keys and tokens."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from tidegate.core._bounds import SECOND
from tidegate.egress._settings import STANDARD_OUTPUT

if TYPE_CHECKING:
    from tidegate._runtime.clock import Clock
    from tidegate.egress._exchange import EgressExchange

LOGGER: Final = "tidegate.egress.access"
MAX_PATH: Final = 500  # characters of a path in the log


class AccessLog:
    """Writes a line for each request, to standard output or a file."""

    def __init__(self, target: str, clock: Clock) -> None:
        """Write to a file, or with `-` to standard output."""
        self._clock = clock
        self._handler: logging.Handler = (
            logging.StreamHandler(sys.stdout) if target == STANDARD_OUTPUT else logging.FileHandler(target)
        )
        self._handler.setFormatter(logging.Formatter("%(message)s"))
        self._log = logging.getLogger(LOGGER)
        self._log.addHandler(self._handler)
        self._log.setLevel(logging.INFO)
        self._log.propagate = False

    def write(self, exchange: EgressExchange) -> None:
        """Write the line of a request that has ended."""
        now = self._clock.steady()
        first = exchange.first_byte
        line = {
            "time": datetime.fromtimestamp(self._clock.ns() / 1e9, UTC).isoformat(timespec="milliseconds"),
            "caller": exchange.caller,
            "provider": exchange.provider,
            "member": exchange.member,
            "method": exchange.method,
            "host": exchange.host,
            "path": exchange.path[:MAX_PATH],
            "status": exchange.status,
            "problem": exchange.problem or None,
            "waited": round(exchange.waited, 6),
            "first_byte": None if first is None else (first - exchange.started) / SECOND,
            "duration": (now - exchange.started) / SECOND,
            "attempts": exchange.attempts,
            "reserved": exchange.cost,
            "used": exchange.parts or None,
        }
        self._log.info("%s", json.dumps(line))

    def close(self) -> None:
        """Close the file."""
        self._log.removeHandler(self._handler)
        if not isinstance(self._handler, logging.FileHandler):
            self._handler.flush()
            return
        self._handler.close()
