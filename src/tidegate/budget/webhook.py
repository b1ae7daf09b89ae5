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
import io
import json
import logging
import secrets
import threading
import urllib.request
from collections import deque
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError

from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.fork import at_fork
from tidegate.urls import redact_text

if TYPE_CHECKING:
    import socket
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


class _Stream(io.RawIOBase):
    """Reads from a socket until a deadline; the timeout of a socket would begin anew with every byte."""

    def __init__(self, connection: socket.socket, opened: io.BufferedIOBase) -> None:
        self._socket = connection
        self._opened = opened
        self._clock = SystemClock()
        self._until = self._clock.steady() + round((connection.gettimeout() or TIMEOUT) * SECOND)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as io has it
        left = self._until - self._clock.steady()
        if left <= 0:
            raise TimeoutError("its answer took too long")
        self._socket.settimeout(left / SECOND)
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        self._opened.close()
        super().close()


class _Response(HTTPResponse):
    """An answer whose head comes within the timeout, or not at all. Its body is never read."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as http.client has it
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_Stream(sock, self.fp))


class _Plain(HTTPConnection):
    response_class = _Response


class _Encrypted(HTTPSConnection):
    response_class = _Response


class _PlainHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Plain, request)


class _EncryptedHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Encrypted, request)


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
        self._opener = urllib.request.build_opener(_Stay, _PlainHandler, _EncryptedHandler)
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
        except OSError as error:
            return redact_text(error)
        except (HTTPException, ValueError) as error:  # its text may quote the address, or what the receiver sent
            return f"its answer is malformed ({type(error).__name__})"


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """Sign a request, as a receiver would to compare."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
