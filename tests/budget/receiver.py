"""A small HTTP server that stores requests and responds as configured."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class Receiver(ThreadingHTTPServer):
    """Stores requests as (headers, body); responds with each of `statuses` once, then with 204."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.arrived = 0  # requests, also those that are not answered yet
        self.statuses: list[int] = []
        self.may_respond = threading.Event()
        self.may_respond.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.arrived += 1
        self.server.may_respond.wait(30)
        self.server.requests.append((dict(self.headers), body))
        status = self.server.statuses.pop(0) if self.server.statuses else 204
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def run_receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.may_respond.set()
        server.shutdown()
        server.server_close()
        thread.join()
