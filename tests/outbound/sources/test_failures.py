"""The default interval of a source without a schedule, and the messages of failed fetches."""

import logging
import socket
import ssl
from contextlib import contextmanager
from threading import Thread

import httpx
import pytest

from tests.outbound.sources.fetching import fetch_once
from tests.outbound.sources.test_service import FMP, source, world
from tests.servers.process import free_port
from tidegate import ConfigError, Limiter
from tidegate.outbound.sources import SourceRunner, read_source
from tidegate.outbound.sources._failures import explain

START = 1_728_000_000
MINUTE = 60_000_000
LITERAL = {"name": "aapl", "url": "https://fmp.test/aapl"}


# ---- the literal source file -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "every", "text"), [({}, 3600, "1h"), ({"interval": 90}, 90, "90s")])
async def test_a_source_with_only_a_name_and_a_url_has_the_default_interval(tmp_path, caplog, options, every, text):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, [read_source(LITERAL)], **options) as here:
        said = f"it has neither an interval nor a cron expression, so it is fetched every {text}"
        assert f"aapl: {said}" in caplog.text
        await here.cycle()
        assert (here.row("aapl")["ok"], here.row("aapl")["schedule"]) == (1, f"every {text}")
        assert here.row("aapl")["due"] == (START + every) * 1_000_000
        answer = here.service.add(read_source({**LITERAL, "name": "msft"}))
        assert answer == f"added msft: limited by provider fmp.test (300/1m sliding_log); {said}"
        assert answer in caplog.text
        here.clock.advance(every)
        await here.cycle()
        assert here.row("aapl")["ok"] == 2


def test_a_wrong_default_interval_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="interval: must be above 0 seconds"):
        SourceRunner(None, data=tmp_path, interval=0)


# ---- RateLimitExceeded -----------------------------------------------------------------------------------------------


async def test_a_fetch_that_is_put_back_is_called_rate_limit_exceeded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, [source("a")], {**FMP, "limit": 1}) as here:
        (chosen,) = await here.service.scheduler.choose(here.service.now(), 10)
        with Limiter(next(iter(here.service.gate.providers)).policy, store=here.store) as others:
            assert others.try_acquire("fmp.test")
        await here.service.fetch_source(chosen)  # the worker's turn
        assert "a: RateLimitExceeded (denied by 1m): queued again" in caplog.text
        row = here.service.ledger.record("a")
        assert (row.last_result, row.last_at, row.requeued) == (
            "RateLimitExceeded (denied by 1m)", START * 1_000_000, 1,
        )  # fmt: skip


async def test_a_429_is_called_rate_limit_exceeded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with world(tmp_path, [source("a")], respond=lambda _request: httpx.Response(429)) as here:
        await here.cycle()
        assert here.row("a")["last_result"] == "RateLimitExceeded (the provider responded with status 429)"


# ---- what failed -----------------------------------------------------------------------------------------------------


@contextmanager
def answering(answer):
    """Accept connections, one after the other, and let `answer` have each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def plain_http(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


async def failure(tmp_path, url):
    row = await fetch_once(tmp_path, {"name": "a", "url": url, "retries": 0})
    assert (row["ok"], row["failed"]) == (0, 1)
    return row["result"]


async def test_a_refused_connection_is_named(tmp_path):
    assert await failure(tmp_path, f"http://127.0.0.1:{free_port()}/") == "refused: the host refused the connection"


async def test_a_host_that_does_not_resolve_is_named(tmp_path):
    assert (await failure(tmp_path, "http://nowhere.invalid/")).startswith("DNS: the host cannot be resolved (")


async def test_a_failed_tls_handshake_is_named(tmp_path):
    with answering(plain_http) as port:
        assert (await failure(tmp_path, f"https://127.0.0.1:{port}/")).startswith("TLS: ")


async def test_a_status_is_named(tmp_path):
    with answering(plain_http) as port:
        assert await failure(tmp_path, f"http://127.0.0.1:{port}/") == "status 400"


async def test_a_broken_connection_is_named(tmp_path):
    with answering(lambda connection: connection.recv(10)) as port:
        assert await failure(tmp_path, f"http://127.0.0.1:{port}/") in (
            "broken: the connection was closed",
            "RemoteProtocolError",
        )


def wrapped(cause):
    """Wrap an error as httpx and the libraries below it do."""
    group = ExceptionGroup("all attempts failed", [OSError("no"), cause])
    outer = httpx.ConnectError("https://user:hunter2@host/")
    outer.__cause__ = group
    return outer


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "refused: the host refused the connection"),
        (socket.gaierror(-2, "Name not known"), "DNS: the host cannot be resolved (Name not known)"),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), "TLS: "),
        (ConnectionResetError(104, "reset"), "broken: the connection was closed"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
        (ValueError("x"), "ConnectError"),
    ],
)  # fmt: skip
def test_causes_are_found_inside_what_wraps_them(cause, text):
    assert explain(wrapped(cause)).startswith(text)
    assert "hunter2" not in explain(wrapped(cause))


# ---- suffixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("application/json; charset=utf-8", ".json"),
        ("application/ld+json", ".json"),
        ("application/atom+xml", ".xml"),
        ("text/csv", ".csv"),
        ("application/pdf", ".pdf"),
        ("application/zip", ".zip"),
        ("application/gzip", ".gz"),
        ("application/x-ndjson", ".ndjson"),
        ("text/tab-separated-values", ".tsv"),
        ("image/png", ".png"),
        ("image/jpeg", ".jpg"),
        ("text/html", ".html"),
        ("application/vnd.unheard-of", ".bin"),
        ("", ".bin"),
        ("../../etc", ".bin"),
    ],
)
async def test_bodies_have_the_suffix_of_their_content_type(tmp_path, kind, suffix):
    respond = lambda _request: httpx.Response(200, content=b"x", headers={"content-type": kind})  # noqa: E731 - short
    async with world(tmp_path, [source("a")], respond=respond) as here:
        await here.cycle()
        assert here.row("a")["ok"] == 1
    (body,) = (tmp_path / "data" / "bodies" / "a").iterdir()
    assert body.suffix == suffix
