"""Posts warnings to a webhook: signed, retried, and without delaying a check.

`send` puts a warning into a bounded queue and returns. A thread posts the warnings in order, as JSON, one at a time. A
failed request is retried after 1, 2, 4 and 8 seconds; then the warning is dropped and counted. If the
queue is full, a new warning is dropped too. With a secret, every request carries

    X-Tidegate-Timestamp: 1750000000
    X-Tidegate-Signature: sha256=HEX        HMAC-SHA256 of the secret over "TIMESTAMP.BODY"

so that the receiver can verify the sender and refuse old requests. `X-Tidegate-Delivery` is the same in every attempt.
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

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.fork import at_fork
from tidegate._runtime.urls import redact_text
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

log: logging.Logger = logging.getLogger("tidegate.budget")

MAX_QUEUED_WARNINGS: Final = 256
RETRY_PAUSES: Final = (1, 2, 4, 8)  # seconds before each further attempt
POST_TIMEOUT: Final = 5.0
MAX_ANSWER: Final = 65_536  # bytes of the answer to a question
CLOSE_TIMEOUT: Final = 2.0  # seconds that `close` waits for the thread to post the queue


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: warnings go only to the configured URL."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - urllib's arguments
        """Return None, which makes urllib raise an HTTPError."""


class _DeadlineStream(io.RawIOBase):
    """Reads from a socket until a deadline; the timeout of a socket starts again with every byte."""

    def __init__(self, connection: socket.socket, opened: io.BufferedIOBase) -> None:
        self._socket = connection
        self._opened = opened
        self._clock = SystemClock()
        self._until = self._clock.steady() + round((connection.gettimeout() or POST_TIMEOUT) * SECOND)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - as io has it
        left = self._until - self._clock.steady()
        if left <= 0:
            raise TimeoutError("the response took too long")
        self._socket.settimeout(left / SECOND)
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        self._opened.close()
        super().close()


class _Response(HTTPResponse):
    """A response whose head must arrive within the timeout. Its body is never read."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:  # noqa: ANN401 - as http.client has it
        super().__init__(sock, *args, **options)
        self.fp = io.BufferedReader(_DeadlineStream(sock, self.fp))


class _HTTPConnection(HTTPConnection):
    response_class = _Response


class _HTTPSConnection(HTTPSConnection):
    response_class = _Response


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_HTTPConnection, request)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_HTTPSConnection, request)


class Webhook:
    """Posts warnings from its own thread, which the first warning starts."""

    dropped: int
    retried: int
    sent: int

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        *,
        max_queued: int = MAX_QUEUED_WARNINGS,
        timeout: float = POST_TIMEOUT,
        clock: Clock | None = None,
    ) -> None:
        """Post to this URL."""
        self.url = url
        self.sent = self.dropped = self.retried = 0
        self._secret = secret.encode() if secret else None
        self._timeout = timeout
        self._clock: Clock = clock or SystemClock()
        self._max_queued = max_queued
        self._closed = False
        self._opener = urllib.request.build_opener(_NoRedirects, _HTTPHandler, _HTTPSHandler)
        self._thread = BackgroundThread(self._post_next, "tidegate-webhook", clock=self._clock)
        at_fork(child=self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        """Start with an empty queue, also in a forked process: the parent posts the warnings it has queued."""
        self._queue: deque[tuple[str, bytes]] = deque()
        self._lock = threading.Lock()
        self._attempts = 0  # to post the first of the queue

    def send(self, warning: Mapping[str, Any]) -> None:
        """Queue a warning; never waits."""
        body = json.dumps({**warning, "at": self._clock.ns() // 10**9}, separators=(",", ":")).encode()
        with self._lock:
            if self._closed or len(self._queue) >= self._max_queued:
                self.dropped += 1
                return
            self._queue.append((secrets.token_hex(8), body))
        self._thread.start()

    def close(self) -> None:
        """Try each queued warning once, and end the thread."""
        with self._lock:
            self._closed = True
        self._thread.stop(CLOSE_TIMEOUT)
        with self._lock:
            lost = len(self._queue)
            self._queue.clear()
            self.dropped += lost
        if lost:
            log.warning("dropped %d events that the webhook did not accept within %s s", lost, CLOSE_TIMEOUT)

    def _post_next(self) -> int | None:
        """Post the first warning of the queue; returns when to post again, or None if the queue is empty."""
        with self._lock:
            if not self._queue:
                return None
            delivery, body = self._queue[0]
        problem = self._post(delivery, body)
        if problem is not None and self._attempts < len(RETRY_PAUSES) and not self._closed:
            self.retried += 1
            self._attempts += 1
            return self._clock.steady() + RETRY_PAUSES[self._attempts - 1] * SECOND
        self._attempts = 0
        with self._lock:
            if not self._queue:  # `close` did not wait any longer, and has counted it as dropped
                return None
            self._queue.popleft()
            self.sent += problem is None
            self.dropped += problem is not None
        if problem is not None:
            log.warning("dropped an event that could not be posted to the webhook: %s", problem)
        return self._clock.steady()

    def _post(self, delivery: str, body: bytes) -> str | None:
        """Post once; returns what went wrong, or None."""
        timestamp = str(self._clock.ns() // 10**9)
        headers = {
            "Content-Type": "application/json",
            "X-Tidegate-Delivery": delivery,
            "X-Tidegate-Timestamp": timestamp,
        }
        if self._secret is not None:
            headers["X-Tidegate-Signature"] = sign(self._secret, timestamp, body)
        request = urllib.request.Request(self.url, body, headers, method="POST")  # noqa: S310 - http or https, by the settings
        try:
            with self._opener.open(request, timeout=self._timeout):
                return None
        except HTTPError as error:
            error.close()
            return f"it responded with status {error.code}"
        except OSError as error:
            return redact_text(error)
        except (HTTPException, ValueError) as error:  # its text may quote the URL, or what the receiver sent
            return f"its response is malformed ({type(error).__name__})"


def post_question(url: str, question: Mapping[str, Any], secret: bytes | None, timeout: float, clock: Clock) -> bytes:
    """Post a question once, and return the answer, whose size is bounded; raises OSError or ValueError without one."""
    at = clock.ns() // 10**9
    body = json.dumps({**question, "at": at}, separators=(",", ":")).encode()
    headers = {"Content-Type": "application/json", "X-Tidegate-Timestamp": str(at)}
    if secret is not None:
        headers["X-Tidegate-Signature"] = sign(secret, str(at), body)
    request = urllib.request.Request(url, body, headers, method="POST")  # noqa: S310 - http or https, as its caller checks
    opener = urllib.request.build_opener(_NoRedirects, _HTTPHandler, _HTTPSHandler)
    try:
        with opener.open(request, timeout=timeout) as response:
            answer: bytes = response.read(MAX_ANSWER + 1)
    except HTTPException as error:
        raise ValueError(f"its response is malformed ({type(error).__name__})") from None
    if len(answer) > MAX_ANSWER:
        raise ValueError(f"its answer is longer than {MAX_ANSWER} bytes")
    return answer


def sign(secret: bytes, timestamp: str, body: bytes) -> str:
    """Return the signature of a request; a receiver compares it with the header."""
    return "sha256=" + hmac.new(secret, timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
