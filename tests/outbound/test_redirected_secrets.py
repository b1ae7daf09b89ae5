"""Secrets are sent only to their own host: not with a redirect to another host, and not over plain http."""

import socket

import httpx
import pytest

from tests.cases import cases
from tests.outbound.clients import KINDS, fetch
from tests.outbound.server import Answer, QuotaServer
from tidegate import ConfigError
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.outbound.sources import SourceRunner, read_source

KEY = "hunter2"
SECRETS = {"Authorization": KEY, "X-Api-Key": KEY, "Cookie": f"session={KEY}", "X-Whatever": KEY, "Referer": KEY}
PLACES = [{"header": "X-Api-Key"}, {"header": "Authorization", "prefix": "Bearer"}, {"query": "apikey"}]


def providers(domain="127.0.0.1", key=PLACES[0]):
    return Providers.of({"domain": domain, "limit": 100, "period": "1m", "api_key": KEY, "key": key})


def told(request):
    """Write down all that a server was told."""
    return f"{request.path} {request.headers} {request.body!r}"


# ---- keys of providers -----------------------------------------------------------------------------------------------


@cases("key", PLACES)
@cases("kind", KINDS)
def test_a_redirect_to_another_host_carries_no_key(kind, key):
    with QuotaServer() as other:
        elsewhere = f"http://localhost:{other.port}/end"
        with QuotaServer(respond=lambda _: Answer(302, (("Location", elsewhere),))) as server:
            (found,) = fetch(kind, providers(key=key), [server.url])
        assert found.status == 200
        assert KEY in told(server.requests[0])
        assert KEY not in told(other.requests[0])


@pytest.fixture
def example(monkeypatch):
    """Have api.example.com lead to this machine."""
    real = socket.getaddrinfo

    def look_up(host, *args, **options):
        return real("127.0.0.1" if host in ("api.example.com", b"api.example.com") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_key_is_not_sent_over_plain_http(kind, key, example, caplog):
    with QuotaServer() as server:
        url = f"http://api.example.com:{server.port}/"
        fetch(kind, providers("example.com", key), [url, url])
        assert len(server.requests) == 2
        assert all(KEY not in told(request) for request in server.requests)
        assert caplog.text.count("the key of provider example.com is not sent over plain http") == 1
        assert KEY not in caplog.text
        fetch(kind, providers("example.com", {**key, "plain_http": True}), [url])
        assert KEY in told(server.requests[-1]), "unless that is allowed"


def test_a_redirect_from_https_to_http_carries_no_key():
    seen = []

    def respond(request):
        seen.append((str(request.url), request.headers.get("x-api-key")))
        return httpx.Response(302, headers={"Location": "http://api.example.com/b"} if len(seen) == 1 else {})

    transport = RateLimitTransport(providers("example.com"), transport=httpx.MockTransport(respond))
    with httpx.Client(transport=transport, follow_redirects=True) as client:
        client.get("https://api.example.com/a")
    assert seen == [("https://api.example.com/a", KEY), ("http://api.example.com/b", None)]


@pytest.mark.parametrize("host", ["localhost", "api.localhost", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_loopback_receives_a_key_over_plain_http(host):
    seen = []

    def respond(request):
        seen.append(request.headers.get("x-api-key"))
        return httpx.Response(200)

    transport = RateLimitTransport(providers(host), transport=httpx.MockTransport(respond))
    with httpx.Client(transport=transport) as client:
        client.get(f"http://{host}:8080/")
    assert seen == [KEY]


def test_plain_http_must_be_a_boolean():
    with pytest.raises(ConfigError, match=r"key\.plain_http: expected true or false"):
        providers(key={"header": "X", "plain_http": "perhaps"})


# ---- headers of sources ----------------------------------------------------------------------------------------------


async def fetch_source(tmp_path, url, respond, **settings):
    """Fetch a source through a transport that records requests; gives these, and the result."""
    seen = []

    def answer(request):
        seen.append(request)
        return respond(request)

    source = read_source({"name": "a", "url": url, "interval": "1h", "retries": 0, **settings})
    known = Providers.of({"domain": "limited.test", "limit": 100, "period": "1m"})
    service = SourceRunner(known, [source], data=tmp_path / "data", transport=httpx.MockTransport(answer))
    async with service:
        await service.start_due()  # one cycle
        for task in tuple(service.tasks):  # and what it started
            await task
        (row,) = service.describe()
    return seen, row["last_result"]


def redirecting(*places, status=302):
    """Answer each request by a redirect to the next place, and the last one by a body."""
    left = list(places)

    def respond(_request):
        return httpx.Response(status, headers={"Location": left.pop(0)}) if left else httpx.Response(200, text="x")

    return respond


@pytest.mark.parametrize(
    ("start", "place", "kept"),
    [
        ("https://a.test/", "https://b.test/", False),
        ("https://a.test/", "https://a.test:8443/", False),
        ("https://a.test/", "http://a.test/", False),
        ("https://a.test/", "//b.test/", False),
        ("https://a.test/", "https://sub.a.test/", False),
        ("https://a.test/", "https://a.test.evil.test/", False),
        ("https://a.test/", "https://user@b.test/", False),
        ("http://a.test:8080/", "https://a.test/", False),
        ("http://a.test/", "https://a.test:8443/", False),
        ("https://a.test/", "/elsewhere", True),
        ("https://a.test/", "https://a.test:443/x", True),
        ("https://a.test/", "https://A.TEST/x", True),
        ("http://a.test/", "https://a.test/", True),
    ],
)
async def test_headers_of_a_source_stay_with_its_origin(tmp_path, start, place, kept):
    headers = {**SECRETS, "Accept": "text/csv", "User-Agent": "mine"}
    seen, result = await fetch_source(tmp_path, start, redirecting(place), headers=headers)
    assert result == "status 200, 1 bytes"
    assert seen[0].headers["x-api-key"] == KEY
    assert (seen[1].headers.get("x-whatever") == KEY) is kept
    assert (KEY in str(seen[1].headers.multi_items())) is kept
    assert (seen[1].headers["accept"], seen[1].headers["user-agent"]) == ("text/csv", "mine")


async def test_headers_stay_removed_after_a_redirect_back(tmp_path):
    places = ("https://b.test/", "https://a.test/again")
    seen, _ = await fetch_source(tmp_path, "https://a.test/", redirecting(*places), headers=SECRETS)
    assert [KEY in str(request.headers.multi_items()) for request in seen] == [True, False, False]


@pytest.mark.parametrize("status", [307, 308])
async def test_a_body_does_not_go_to_another_origin(tmp_path, status):
    how = {"method": "POST", "body": KEY}
    seen, result = await fetch_source(tmp_path, "https://a.test/", redirecting("https://b.test/", status=status), **how)
    assert result == "redirected to another origin with method POST: not followed"
    assert len(seen) == 1
    seen, result = await fetch_source(tmp_path / "2", "https://a.test/", redirecting("/b", status=status), **how)
    assert (result, seen[1].content) == ("status 200, 1 bytes", KEY.encode())


async def test_a_password_in_a_url_does_not_go_to_another_origin(tmp_path):
    url = f"https://me:{KEY}@a.test/"
    seen, _ = await fetch_source(tmp_path, url, redirecting("https://b.test/"))
    assert seen[0].headers["authorization"].startswith("Basic ")
    assert "authorization" not in seen[1].headers
    assert KEY not in str(seen[1].url)


@pytest.mark.parametrize("place", ["ftp://a.test/", "https://a.test:99999/", "https://[", "https://exa mple/", "\x00"])
async def test_a_redirect_to_an_invalid_url_is_a_failure(tmp_path, place, caplog):
    seen, result = await fetch_source(tmp_path, "https://a.test/", redirecting(place))
    assert result in ("RemoteProtocolError", "redirected to a URL that cannot be used")
    assert len(seen) == 1
    assert "unexpected error" not in caplog.text
