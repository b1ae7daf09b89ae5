"""Real frameworks under real servers, with a real client."""

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.inbound.servers import raw_status, serving

COMBINATIONS = [
    ("uvicorn", "starlette_site:app"),
    ("uvicorn", "fastapi_site:app"),
    ("granian", "fastapi_site:app"),
    ("granian", "flask_site:app"),
    ("gunicorn", "flask_site:app"),
    ("gunicorn", "django_site:app"),
    ("uvicorn", "django_site:async_app"),
]


@pytest.mark.parametrize(("server", "site"), COMBINATIONS)
def test_limits_hold_under_server_and_framework(server, site):
    with serving(server, site) as url, httpx.Client(base_url=url) as client:
        replies = [client.get(f"/hello/{name}") for name in ("ann", "bob", "ann", "nobody", "eve", "zoe")]
        assert [reply.status_code for reply in replies] == [200] * 5 + [429]
        assert [reply.headers["x-ratelimit-remaining"] for reply in replies] == ["4", "3", "2", "1", "0", "0"]
        assert {reply.headers["x-ratelimit-limit"] for reply in replies} == {"5"}
        denied = replies[-1]
        assert 3590 <= int(denied.headers["retry-after"]) <= 3600
        assert denied.headers["cache-control"] == "no-store"
        assert denied.text == "Rate limit exceeded. Try again later."
        assert client.get("/nowhere").status_code == 429  # a probe
        assert client.head("/hello/ann").status_code == 429
        assert client.head("/hello/ann").content == b""
        problem = client.get("/hello/ann", headers={"Accept": "application/json"})
        assert problem.headers["content-type"] == "application/problem+json"
        assert problem.json()["violated-policies"] == ["read"]
        assert client.get("/health").status_code == 200
        assert "x-ratelimit-limit" not in client.get("/health").headers
        spoofed = client.get("/hello/ann", headers={"X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4"})
        assert spoofed.status_code == 429
        stats = client.get("/api/admin/rate-limit-stats")
        assert stats.json()["by_category"]["read"] == 1


# Targets that reach the same route, which allows two requests per hour; `{}` is its mount point.
@pytest.mark.once
@pytest.mark.parametrize(
    ("server", "site", "more", "targets"),
    [
        (
            "gunicorn",
            "flask_app",
            {"SCRIPT_NAME": "/pre"},
            ["{}/import/a", "{}import/a", "{}//import/a", "{}%69mport/a"],
        ),
        ("uvicorn", "quart_app", {"--http": "h11"}, ["/import/a", "http://site/import/a", "http://site/import/a;x"]),
        ("uvicorn", "quart_app", {"--root-path": "/pre", "--http": "h11"}, ["/import/a", "import/a", "//import/a"]),
        ("uvicorn", "starlette_app", {}, ["/pre/import/a", "/pre/%69mport/a", "/pre/import/%61"]),
        ("uvicorn", "starlette_app", {"--root-path": "/v1"}, ["/pre/import/a", "/pre/%69mport/a", "/pre/import/b"]),
    ],
)
def test_all_spellings_of_a_path_share_one_count(server, site, more, targets):
    words = [word for pair in more.items() if pair[0].startswith("--") for word in pair]
    env = {name: value for name, value in more.items() if not name.startswith("--")}
    with serving(server, f"import_site:{site}", *words, **env) as url:
        targets = [target.format("/pre") for target in targets]
        assert raw_status(url, targets[0]) == 200
        assert raw_status(url, targets[1]) == 200
        assert [raw_status(url, target) for target in targets] == [429] * len(targets)


def test_streams_background_tasks_mounts_and_websockets_work():
    with serving("uvicorn", "starlette_site:app") as url, httpx.Client(base_url=url) as client:
        stream = client.get("/stream")
        assert stream.text == "".join(f"part {number}\n" for number in range(5))
        assert len(stream.headers.get_list("x-ratelimit-remaining")) == 1
        assert client.get("/background").text == "now"
        assert client.get("/health").json() == ["later"]
        assert client.get("/mounted/hello").headers["x-ratelimit-remaining"] == "2"
        with connect(f"{url.replace('http', 'ws')}/ws") as websocket:
            assert websocket.response.headers["x-ratelimit-remaining"] == "1"
            assert exceed_limit(websocket).code == 1008
        assert client.get("/hello").status_code == 200
        with pytest.raises(InvalidStatus) as refused, connect(f"{url.replace('http', 'ws')}/ws"):
            pass
        assert refused.value.response.status_code == 429
        assert int(refused.value.response.headers["retry-after"]) > 3000


def exceed_limit(websocket):
    """Send one message more than are allowed; returns how the server closed the websocket."""
    for text in ("one", "two", "three"):
        websocket.send(text)
        assert websocket.recv(10) == text
    websocket.send("four")
    with pytest.raises(ConnectionClosed) as closed:
        websocket.recv(10)
    return closed.value.rcvd


def test_a_message_over_the_limit_closes_a_fastapi_websocket():
    with serving("uvicorn", "socket_site:closing") as url:
        with connect(f"{url.replace('http', 'ws')}/ws/a") as websocket:
            closing = exceed_limit(websocket)
        assert (closing.code, closing.reason) == (1008, "Rate limit exceeded")
        with connect(f"{url.replace('http', 'ws')}/ws/b") as websocket:  # the client's messages, not the connection's
            websocket.send("five")
            with pytest.raises(ConnectionClosed):
                websocket.recv(10)


def test_messages_over_the_limit_are_dropped_and_the_websocket_stays_open():
    with serving("uvicorn", "socket_site:dropping") as url, connect(f"{url.replace('http', 'ws')}/ws/a") as websocket:
        for text in ("one", "two", "three", "four", "five"):
            websocket.send(text)
        assert [websocket.recv(10) for _ in range(3)] == ["one", "two", "three"]
        assert websocket.ping().wait(10)
        with pytest.raises(TimeoutError):
            websocket.recv(0)


def test_clients_on_a_unix_socket_are_unknown_and_not_blocked(tmp_path):
    path = str(tmp_path / "site.sock")
    transport = httpx.HTTPTransport(uds=path)
    with (
        serving("uvicorn", "starlette_site:app", socket_path=path),
        httpx.Client(transport=transport, base_url="http://site") as client,
    ):
        assert [client.get("/hello").status_code for _ in range(7)] == [200] * 7
        assert client.get("/api/admin/rate-limit-stats").status_code == 403  # the caller has no address
