"""Warnings to an address of yours: signed, tried again, and never in the way of a check.

`send` puts a warning into a bounded queue and returns. A thread posts them in order, as JSON, one at a time; what is
not taken is tried again after 1, 2, 4 and 8 seconds, then dropped and counted, as is what finds the queue full. With a
secret, every request carries

    X-Tidegate-Timestamp: 1750000000
    X-Tidegate-Signature: sha256=HEX        HMAC-SHA256 of the secret over "TIMESTAMP.BODY"

so that the receiver can tell who sent it, and refuse what is old. `X-Tidegate-Delivery` is the same for every attempt.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import threading
import urllib.request
from collections import deque
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError

from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.fork import at_fork

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger("tidegate.budget")

QUEUE: Final = 256
PAUSES: Final = (1, 2, 4, 8)  # seconds before each further attempt
TIMEOUT: Final = 5.0
LEAVING: Final = 2.0  # seconds that `close` gives the thread to post what is left


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a warning goes where it was told to go."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - whatever urllib passes
        """Refuse."""


class Webhook:
    """Posts warnings from a thread of its own, started by the first."""

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        *,
        queue: int = QUEUE,
        timeout: float = TIMEOUT,
        clock: Clock | None = None,
    ) -> None:
        """Post to this address."""
        self.url = url
        self.sent = self.dropped = self.retried = 0
        self._secret = secret.encode() if secret else None
        self._timeout = timeout
        self._clock: Clock = clock or SystemClock()
        self._most = queue
        self._closed = False
        self._opener = urllib.request.build_opener(_Stay)
        at_fork(child=self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        """Start without warnings: also in a forked process, whose parent posts those it has."""
        self._queue: deque[tuple[str, bytes]] = deque()
        self._lock = threading.Lock()
        self._wake = ThreadSignal()
        self._thread: threading.Thread | None = None

    def send(self, warning: Mapping[str, Any]) -> None:
        """Take a warning; never waits."""
        body = json.dumps({**warning, "at": self._clock.ns() // 10**9}, separators=(",", ":")).encode()
        with self._lock:
            if self._closed or len(self._queue) >= self._most:
                self.dropped += 1
                return
            self._queue.append((secrets.token_hex(8), body))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tidegate-webhook", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Post what is left, once each, and end."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        if thread is not None:
            thread.join(LEAVING)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    return
                number, body = self._queue[0]
            self._deliver(number, body)
            with self._lock:
                self._queue.popleft()

    def _deliver(self, number: str, body: bytes) -> None:
        for pause in (*PAUSES, None):
            problem = self._post(number, body)
            if problem is None:
                self.sent += 1
                return
            self._wake.clear()
            if pause is None or self._closed:
                break
            self.retried += 1
            self._clock.wait(self._wake, self._clock.steady() + pause * SECOND)
        self.dropped += 1
        log.warning("a warning could not be posted to the webhook, and is dropped: %s", problem)

    def _post(self, number: str, body: bytes) -> str | None:
        """Post once; say what was wrong, if anything was."""
        stamp = str(self._clock.ns() // 10**9)
        headers = {"Content-Type": "application/json", "X-Tidegate-Delivery": number, "X-Tidegate-Timestamp": stamp}
        if self._secret is not None:
            headers["X-Tidegate-Signature"] = sign(self._secret, stamp, body)
        request = urllib.request.Request(self.url, body, headers, method="POST")  # noqa: S310 - http or https, by the settings
        try:
            with self._opener.open(request, timeout=self._timeout):
                return None
        except HTTPError as error:
            error.close()
            return f"it answered {error.code}"
        except (OSError, ValueError) as error:
            return str(error)


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """Sign a request, as a receiver would to compare."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
