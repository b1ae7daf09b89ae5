"""The clients and the application on both sides of a proxy; each client has its own loopback address."""

from __future__ import annotations

import itertools
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

import httpx

from tests.servers.process import until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.proxy import Proxy


class Application:
    """Records requests. `/status/403` returns 403, `/drop` closes the connection, other paths return 200."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.bodies: list[bytes] = []
        self.origins: list[str | None] = []
        lock = threading.Lock()
        application = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with lock:
                    application.seen[f"{self.command} {self.path}"] += 1
                    application.bodies.append(body)
                    application.origins.append(self.headers.get("Origin"))
                if self.path == "/drop":
                    self.close_connection = True
                    return
                status = int(self.path.rpartition("/")[2]) if self.path.startswith("/status/") else 200
                content = f"the application responds {status}".encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815 - the name that the library calls

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Log nothing: a proxy that ends resets its connections."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.port: int = self._server.server_address[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ClientAddresses:
    """Returns unused loopback addresses."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)

    def new(self) -> str:
        high, low = divmod(next(self._numbers), 250)
        return f"127.0.{high + 1}.{low + 1}"


def send_request(
    proxy: Proxy, client: str, path: str = "/", method: str = "GET", body: bytes = b"", **more: str
) -> httpx.Response:
    """Send a request through a proxy, from this address, over a new connection."""
    transport = httpx.HTTPTransport(local_address=client, verify=False)  # creating a TLS context is slow
    with httpx.Client(transport=transport, timeout=30) as http:
        return http.request(method, f"http://127.0.0.1:{proxy.port}{path}", content=body, headers=more)


def rate_fields(response: httpx.Response) -> dict[str, int]:
    """Return the header fields about limits; each may occur only once."""
    names = [name for name, _ in response.headers.multi_items() if name.startswith(("x-ratelimit", "retry-after"))]
    assert len(names) == len(set(names)), names
    return {name: int(response.headers[name]) for name in names}


def check_outages(
    kind: type[Proxy], app: Application, clients: ClientAddresses, folder: Path, rules: str, *flags: str
) -> None:
    """Stop the store, suspend the service, then end it; check proxies that fail open and that fail closed."""
    path, payload = f"/lost/{kind.name}", b"hello" * 1000
    with ValkeyServer() as valkey, serving(folder, f"store: {valkey.url}?deadline=200ms\n{rules}", *flags) as service:
        ports = (app.port, service.port, service.grpc)
        fails_open, fails_closed = kind(*ports, patient=False), kind(*ports, closed=True, patient=False)

        def check_failure_mode(refusal: int, times: int = 6) -> None:
            client = clients.new()
            for _ in range(times):  # more than the limit
                response = send_request(fails_open, client, path, "POST", payload)
                assert (response.status_code, response.text) == (200, "the application responds 200")
                assert app.bodies[-1] == payload
                assert rate_fields(response) == {}
            seen = app.seen[f"POST {path}"]
            # On a busy machine, a response may exceed the timeout of the proxy, which then treats the service as hung.
            refused: set[int] = set()

            def is_refused() -> bool:
                refused.add(send_request(fails_closed, client, path, "POST", payload).status_code)
                return refusal in refused

            until(is_refused, f"a {refusal}")
            assert refused <= {refusal, kind.refusals[1]}
            assert app.seen[f"POST {path}"] == seen

        with fails_open, fails_closed:
            for proxy in (fails_open, fails_closed):
                until(lambda proxy=proxy: send_request(proxy, clients.new()).status_code == 200, "a response")  # type: ignore[misc]  # bound at once
            store_lost, hanging, down = kind.refusals
            valkey.kill()
            until(lambda: service.get("/v1/check?policy=api&key=k").status_code == 503, "the outage of the store")
            check_failure_mode(store_lost)
            service.process.send_signal(signal.SIGSTOP)
            try:
                check_failure_mode(hanging, times=1)
            finally:
                service.process.send_signal(signal.SIGCONT)
            service.stop()
            check_failure_mode(down)
