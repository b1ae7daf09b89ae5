# ruff: noqa: INP001 - an example, not a package
"""A stand-in for a provider of quotes: GET /quote/SYMBOL, at most three requests in any second."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tidegate import Limiter

QUOTA = Limiter("3/1s sliding_log")
COUNTS = {"served": 0, "refused": 0}
LOCK = threading.Lock()


class QuotesHandler(BaseHTTPRequestHandler):
    """Answers within the quota, and refuses other requests with a 429."""

    def do_GET(self) -> None:
        """Return a quote, or how many requests were served and refused."""
        if self.path == "/counts":
            return self.respond(200, COUNTS)
        allowed = bool(QUOTA.try_acquire("all"))
        with LOCK:
            COUNTS["served" if allowed else "refused"] += 1
        symbol = self.path.rpartition("/")[2]
        return self.respond(200 if allowed else 429, {"symbol": symbol, "price": 100 + len(symbol)})

    def respond(self, status: int, value: object) -> None:
        """Respond with JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), QuotesHandler).serve_forever()
