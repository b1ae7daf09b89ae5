"""Warnings about deployments whose limits do not work as configured: unknown proxies, and counts per worker."""

import subprocess
import sys

import pytest

from tests.cases import cases
from tests.servers.process import free_port
from tidegate.inbound._limiting.worker_processes import count_workers
from tidegate.stores import MemoryStore

PROXY = "10.0.0.1"
FORWARDED = [("X-Forwarded-For", "198.51.100.7")]
IGNORED = (
    "ignored the header {} from 10.0.0.1, which is not in trusted_proxies: if it is a proxy, all its clients share one "
    "limit; list its address in trusted_proxies=[…]"
)


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


# ---- proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [[], ["192.0.2.0/24"]], ids=["no proxies", "other proxies"])
def test_a_forwarded_address_from_an_untrusted_peer_is_a_warning_once(make_app, caplog, trusted):
    api = make_app(trusted_proxies=trusted)
    api.request(peer=PROXY, headers=FORWARDED)
    api.request(peer=PROXY, headers=FORWARDED)
    api.request(peer="10.0.0.2", headers=FORWARDED)
    assert warnings(caplog) == [IGNORED.format("x-forwarded-for")]


@pytest.mark.parametrize("trusted", [[], ["192.0.2.0/24"]], ids=["no proxies", "other proxies"])
def test_the_header_is_found_in_any_request_of_a_peer(make_app, caplog, trusted):
    """Health checks of a proxy, for example, have no such header."""
    api = make_app(trusted_proxies=trusted)
    for _ in range(3):
        api.request(peer=PROXY)
    assert warnings(caplog) == []
    for _ in range(2):
        api.request(peer=PROXY, headers=FORWARDED)
    assert warnings(caplog) == [IGNORED.format("x-forwarded-for")]


def test_the_warning_names_the_header_that_was_ignored(make_app, caplog):
    make_app().request(peer=PROXY, headers=[("Forwarded", "for=198.51.100.7")])
    assert warnings(caplog) == [IGNORED.format("forwarded")]


def test_trusted_proxies_and_direct_clients_cause_no_warning(make_app, caplog):
    api = make_app(trusted_proxies=[PROXY])
    api.request(peer=PROXY, headers=FORWARDED)
    api.request(peer="203.0.113.9")
    assert warnings(caplog) == []


def test_a_peer_that_the_server_has_replaced_causes_no_warning(make_app, caplog):
    """uvicorn and ProxyFix set the peer to the address in the header, and leave the header as it is."""
    make_app().request(peer="198.51.100.7", headers=FORWARDED)
    assert warnings(caplog) == []


# ---- workers ---------------------------------------------------------------------------------------------------------

WORKERS = "each of the 4 worker processes of this server counts in its own memory, so together they allow up to 4 times"


def test_counts_in_the_memory_of_several_workers_are_a_warning(make_app, caplog, monkeypatch):
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    make_app()
    (line,) = warnings(caplog)
    assert line.startswith(WORKERS)


def test_a_shared_store_or_one_worker_causes_no_warning(make_app, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    make_app(store=f"sqlite:///{tmp_path}/limits.db", clock=None)
    make_app(store=MemoryStore(), clock=None)
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    make_app()
    assert warnings(caplog) == []


@cases(
    ("line", "environ", "workers"),
    [
        ("/bin/uvicorn site:app --workers 3", {}, 3),
        ("/bin/gunicorn -w 2 site:app", {}, 2),
        ("/bin/gunicorn -w2 site:app", {}, 2),
        ("/lib/gunicorn/__main__.py --workers=5 site:app", {"WEB_CONCURRENCY": "4"}, 5),
        ("/bin/gunicorn site:app", {"GUNICORN_CMD_ARGS": "--threads 4 --workers=6"}, 6),
        ("/bin/gunicorn --workers 1 site:app", {"WEB_CONCURRENCY": "4"}, 1),
        ("/bin/gunicorn --worker-connections 9 site:app", {}, 1),
        ("/bin/uvicorn site:app", {"WEB_CONCURRENCY": "many"}, 1),
        ("crawler.py --workers 8", {}, 1),
        ("", {"WEB_CONCURRENCY": "0"}, 1),
    ],
)
def test_the_number_of_workers_is_that_of_the_server(line, environ, workers):
    assert count_workers(environ, line.split()) == workers


PROGRAM = """
import sys, uvicorn
from tidegate.inbound.asgi import RateLimitMiddleware

class App:
    def __init__(self):
        self.app = RateLimitMiddleware(self.end)

    async def end(self, scope, receive, send):
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "the test is over"})

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)

def make():
    return App()

if __name__ == "__main__":
    if sys.argv[2] == "1":
        uvicorn.run(make, factory=True, port=int(sys.argv[1]), log_level="critical")
    else:
        config = uvicorn.Config("program:make", factory=True, port=int(sys.argv[1]), workers=2, log_level="critical")
        process = uvicorn._subprocess.get_subprocess(config, uvicorn.Server(config).run, [config.bind_socket()])
        process.start()
        process.join(60)
"""


@pytest.mark.parametrize(("workers", "lines"), [(1, 0), (2, 1)])
def test_a_worker_of_uvicorn_warns(tmp_path, workers, lines):
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "program.py", str(free_port()), str(workers)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.count("2 worker processes of this server") == lines, done.stderr
