"""A server with a limit that its clients do not know: by default 50 requests per second, and 429 for the others."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

from tidegate import Limiter

if TYPE_CHECKING:
    from types import TracebackType


class HiddenLimit:
    """Serves on a free loopback port, in a thread. A context manager."""

    def __init__(self, limit: str = "50/1s burst=20") -> None:
        """Serve as many requests as the limit allows."""
        self.limiter = Limiter(limit)
        self.served = self.refused = 0
        counting = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            """Responds with 200 or 429."""

            def do_GET(self) -> None:
                allowed = outer.limiter.try_acquire("all").allowed
                with counting:
                    outer.served += allowed
                    outer.refused += not allowed
                self.send_response(200 if allowed else 429)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Self:
        """Serve."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
