"""Servers that send too much, too slowly or without end: the memory and time of a fetch are bounded."""

import asyncio
import gzip
import json
import sqlite3
import subprocess
import sys
import time
import zlib

import pytest

from tests.outbound.sources.hostile import HostileServer, endlessly, head, slowly
from tidegate.outbound import Providers
from tidegate.outbound.sources import SourceRunner, read_source

MEGABYTE = 2**20
MANY = 800  # megabytes that the bomb decodes to
CHUNK = b"10000\r\n" + b"x" * 65_536 + b"\r\n"


@pytest.fixture(scope="module")
def bomb():
    engine = zlib.compressobj(9, wbits=31)
    zeros = bytes(MEGABYTE)
    return b"".join(engine.compress(zeros) for _ in range(MANY)) + engine.flush()


def fetch_in_process(tmp_path, **settings):
    """Fetch once in a process of its own, and give what it tells."""
    settings = {"name": "a", "interval": "1h", "retries": 0, **settings}
    words = [sys.executable, "-m", "tests.outbound.sources.fetching", str(tmp_path / "data"), json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "log": done.stderr}


async def fetch_here(tmp_path, times=1, **settings):
    """Fetch in this process, and give the rows after each time, and how long it took."""
    providers = Providers.of({"domain": "127.0.0.1", "limit": 1000, "period": "1m"})
    source = read_source({"name": "a", "interval": "1ms", "retries": 0, **settings})
    rows = []
    async with SourceRunner(providers, [source], data=tmp_path / "data") as service:
        for _ in range(times):
            began = time.monotonic()
            while not service.tasks:  # until it is due again
                await service.start_due()
            await asyncio.gather(*service.tasks)  # what the cycle started
            (row,) = service.describe()
            rows.append({**row, "took": time.monotonic() - began})
    return rows


def left_over(tmp_path):
    """List what lies in the data folder beside the databases."""
    return sorted(path.name for path in (tmp_path / "data").rglob("*") if path.is_file() and ".db" not in path.name)


@pytest.mark.once
@pytest.mark.parametrize("to", [{"files": "bodies"}, {"sqlite": "bodies.db"}, {"webhook": "http://127.0.0.1:1/"}])
def test_a_body_that_decodes_to_too_much_is_refused(tmp_path, bomb, to):
    async def script(_path, _headers):
        yield head(200, "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + bomb

    with HostileServer(script) as server:
        told = fetch_in_process(tmp_path, url=server.url, to=to, timeout="60s")
    assert told["result"] == "too large: more than 33554432 bytes"
    assert told["failed"] == 1
    assert told["megabytes"] < 50
    assert left_over(tmp_path) == []


@pytest.mark.once
@pytest.mark.parametrize(
    ("lines", "piece"),
    [
        (("Content-Type: text/plain",), b"x" * 65_536),
        (("Transfer-Encoding: chunked",), CHUNK),
        ((f"Content-Length: {10**15}",), b"x" * 65_536),
        (("Content-Encoding: gzip",), gzip.compress(b"", mtime=0)),
        (("Content-Encoding: gzip",), gzip.compress(bytes(1000), mtime=0)),
    ],
)
def test_an_endless_body_is_refused(tmp_path, lines, piece):
    async def script(_path, _headers):
        yield head(200, *lines)
        async for each in endlessly(piece):
            yield each

    with HostileServer(script) as server:
        told = fetch_in_process(tmp_path, url=server.url, max_bytes=3_000_000, timeout="60s")
    assert told["result"] == "too large: more than 3000000 bytes"
    assert told["megabytes"] < 50
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param([], id="nothing at all"),
        pytest.param([b"HTTP/1.1 200 OK\r\nX-Long: "], id="a header"),
        pytest.param([head(200, "Content-Length: 1000000")], id="a body"),
        pytest.param([head(200, "Transfer-Encoding: chunked"), b"ffffff\r\n"], id="a chunk"),
        pytest.param([head(200, "Transfer-Encoding: chunked"), b"1;"], id="an extension of a chunk"),
    ],
)
async def test_a_slowly_dripping_response_ends_at_the_timeout(tmp_path, begin, caplog):
    """Each byte comes in time; together they would take hours."""

    async def script(_path, _headers):
        for piece in begin:
            yield piece
        async for each in slowly(b"x"):
            yield each

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=server.url, timeout="500ms")
    assert row["last_result"] == "too slow: not within 500ms"
    assert row["took"] < 10
    assert "a failed: too slow: not within 500ms" in caplog.text
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"X-Header: x\r\n", id="lines"),
        pytest.param(b"x" * 65_536, id="one line"),
    ],
)
def test_endless_headers_are_refused(tmp_path, endless):
    async def script(_path, _headers):
        yield b"HTTP/1.1 200 OK\r\n"
        async for each in endlessly(endless):
            yield each

    with HostileServer(script) as server:
        told = fetch_in_process(tmp_path, url=server.url, timeout="60s")
    assert told["result"] == "RemoteProtocolError"
    assert told["megabytes"] < 50


async def test_endless_informational_responses_are_too_slow(tmp_path):
    async def script(_path, _headers):
        async for each in endlessly(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100):
            yield each

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=server.url, timeout="500ms")
    assert row["last_result"] == "too slow: not within 500ms"
    assert row["took"] < 10


def test_the_body_of_a_redirect_is_not_read(tmp_path, bomb):
    async def script(path, _headers):
        if path == "/end":
            yield head(200, "Content-Length: 4") + b"good"
            return
        yield head(302, "Location: /end", "Content-Encoding: gzip") + bomb
        async for each in endlessly(b"x" * 65_536):
            yield each

    with HostileServer(script) as server:
        told = fetch_in_process(tmp_path, url=server.url, timeout="60s")
    assert told["result"] == "status 200, 4 bytes"
    assert told["megabytes"] < 50


async def test_endless_redirects_are_refused(tmp_path):
    async def script(path, _headers):
        yield head(302, f"Location: /{int(path[1:] or 0) + 1}", "Content-Length: 0")

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=f"{server.url}/0")
    assert row["last_result"] == "more than 10 redirects"
    assert len(server.requests) == 11


async def test_the_body_of_a_failure_is_not_read(tmp_path):
    async def script(_path, _headers):
        yield head(500)
        async for each in endlessly(b"x" * 65_536):
            yield each

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=server.url)
    assert row["last_result"] == "status 500"
    assert server.sent < 20 * MEGABYTE


@pytest.mark.parametrize("to", [{"files": "kept"}, {"sqlite": "kept.db"}])
async def test_a_failed_fetch_keeps_the_previous_body(tmp_path, to):
    answers = iter([b"good", b"x" * 5000, b"good again"])

    async def script(_path, _headers):
        body = next(answers)
        yield head(200, f"Content-Length: {len(body)}", "Content-Type: text/plain") + body

    with HostileServer(script) as server:
        rows = await fetch_here(tmp_path, times=3, url=server.url, max_bytes=1000, to=to)
    assert [row["last_result"] for row in rows] == [
        "status 200, 4 bytes",
        "too large: more than 1000 bytes",
        "status 200, 10 bytes",
    ]
    assert bodies(tmp_path, to) == [b"good", b"good again"]


def bodies(tmp_path, to):
    if "files" in to:
        return [path.read_bytes() for path in sorted((tmp_path / "data" / "kept" / "a").iterdir())]
    db = sqlite3.connect(tmp_path / "data" / "kept.db")
    found = [row[0] for row in db.execute("SELECT body FROM bodies ORDER BY fetched_at")]
    db.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("to", [{"files": "kept"}, {"sqlite": "kept.db"}])
@pytest.mark.parametrize("coding", ["", "gzip", "deflate"])
def test_a_large_body_is_streamed_with_little_memory(tmp_path, to, coding):
    body = b"0123456789abcdef" * (30 * MEGABYTE // 16)
    packed = {"": lambda: body, "gzip": lambda: gzip.compress(body, 1), "deflate": lambda: zlib.compress(body, 1)}[
        coding
    ]()

    async def script(_path, headers):
        assert headers["accept-encoding"] == "gzip, deflate"
        yield head(200, f"Content-Length: {len(packed)}", *([f"Content-Encoding: {coding}"] if coding else []))
        yield packed

    with HostileServer(script) as server:
        told = fetch_in_process(tmp_path, url=server.url, to=to, timeout="60s")
    assert told["result"] == f"status 200, {len(body)} bytes"
    assert told["megabytes"] < 20
    assert bodies(tmp_path, to) == [body]


@pytest.mark.parametrize(
    ("coding", "body", "result"),
    [
        ("br", b"x", "the content-encoding 'br' is not supported"),
        ("gzip, gzip", b"x", "the content-encoding 'gzip, gzip' is not supported"),
        ("gzip", b"not gzip", "the body is not valid gzip data"),
        ("gzip", gzip.compress(b"good", mtime=0)[:-5], "the body is incomplete gzip data"),
        ("deflate", b"\xff\xff\xff", "the body is not valid deflate data"),
    ],
)
async def test_a_body_that_cannot_be_decoded_is_a_failure(tmp_path, coding, body, result):
    async def script(_path, _headers):
        yield head(200, f"Content-Encoding: {coding}", f"Content-Length: {len(body)}") + body

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=server.url)
    assert (row["last_result"], row["failed"]) == (result, 1)
    assert left_over(tmp_path) == []


async def test_the_response_of_a_webhook_is_not_read(tmp_path):
    async def script(path, _headers):
        if path == "/source":
            yield head(200, "Content-Length: 4") + b"good"
            return
        yield head(200)
        async for each in endlessly(b"x" * 65_536):
            yield each

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=f"{server.url}/source", to={"webhook": f"{server.url}/hook"})
    assert row["last_result"] == "status 200, 4 bytes"
    assert server.sent < 20 * MEGABYTE


async def test_a_webhook_redirect_is_a_failure(tmp_path):
    async def script(path, _headers):
        yield head(200 if path == "/source" else 302, "Location: /elsewhere", "Content-Length: 4") + b"good"

    with HostileServer(script) as server:
        (row,) = await fetch_here(tmp_path, url=f"{server.url}/source", to={"webhook": f"{server.url}/hook"})
    assert row["last_result"] == "the body was not stored: OSError"
    assert [path for path, _ in server.requests] == ["/source", "/hook"]


async def test_cookies_last_for_one_fetch(tmp_path):
    """They may be needed by redirects; kept for longer, a server could fill the memory with them."""

    async def script(path, _headers):
        yield head(302 if path == "/" else 200, "Location: /end", "Set-Cookie: a=b", "Content-Length: 0")

    with HostileServer(script) as server:
        await fetch_here(tmp_path, times=2, url=f"{server.url}/")
    assert [headers.get("cookie") for _, headers in server.requests] == [None, "a=b", None, "a=b"]


async def test_partial_files_of_a_killed_process_are_removed(tmp_path):
    async def script(_path, _headers):
        yield head(200, "Content-Length: 4", "Content-Type: text/plain") + b"good"

    folder = tmp_path / "data" / "kept" / "a"
    folder.mkdir(parents=True)
    (folder / "123.part").write_text("half")
    with HostileServer(script) as server:
        await fetch_here(tmp_path, url=server.url, to={"files": "kept"})
    assert bodies(tmp_path, {"files": "kept"}) == [b"good"]
