"""Reverse mode: a client changes its base URL, and its calls stay within the provider's quota."""

import json
from urllib.parse import quote, quote_plus

import pytest
from yarl import URL

from tests.egress.harness import KEY, running
from tests.outbound.server import Answer

KEY_FIELDS = {"api_key": KEY, "key": {"header": "Authorization", "prefix": "Bearer"}}


@pytest.mark.parametrize("form", ["/up/v1/models?a=b%20c", "/to/127.0.0.1:{port}/v1/models?a=b%20c"])
async def test_a_call_is_passed_on_with_its_path_and_query(upstream, form):
    async with running(upstream.url) as gateway:
        status, headers, body = await gateway.get(form.format(port=upstream.port))
        assert (status, json.loads(body)) == (200, {"path": "/v1/models?a=b%20c"})
        assert headers["X-Tidegate-Provider"] == "up"
        assert float(headers["X-Tidegate-Waited"]) < 9
        assert headers["X-Tidegate-Cost"] == "requests=1"
        assert headers["X-Tidegate-Remaining"] == "1m=999"
        assert gateway.gateway.gate.metrics()["sent"] == 1


async def test_the_key_of_the_provider_is_put_in_and_that_of_the_client_removed(upstream):
    async with running(upstream.url, **KEY_FIELDS) as gateway:
        await gateway.get(
            "/up/x", headers={"Authorization": "Bearer dummy", "X-Api-Key": "dummy", "X-Tidegate-Tag": "a"}
        )
    (request,) = upstream.requests
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert "x-api-key" not in request.headers
    assert "x-tidegate-tag" not in request.headers


async def test_a_key_in_the_query_replaces_that_of_the_client(upstream):
    async with running(upstream.url, api_key=KEY, key={"query": "apikey"}) as gateway:
        await gateway.get("/up/x?apikey=dummy&b=2")
    assert upstream.requests[0].path == f"/x?b=2&apikey={KEY}"


async def test_hop_by_hop_fields_are_removed_in_both_directions(upstream):
    upstream.respond = lambda _request: Answer(
        200, (("Connection", "X-Hop"), ("X-Hop", "1"), ("X-Kept", "1"), ("X-Tidegate-Waited", "9"))
    )
    async with running(upstream.url) as gateway:
        sent = {"Connection": "X-Secret", "X-Secret": "1", "TE": "trailers", "X-Other": "2", "Proxy-Authorization": "x"}
        _, headers, _ = await gateway.get("/up/x", headers=sent)
    received = upstream.requests[0].headers
    assert received["x-other"] == "2"
    assert not {"x-secret", "te", "proxy-authorization"} & received.keys()
    assert headers["X-Kept"] == "1"
    assert "X-Hop" not in headers
    assert float(headers["X-Tidegate-Waited"]) < 9


async def test_a_body_is_passed_on(upstream):
    async with running(upstream.url) as gateway:
        await gateway.send("POST", "/up/x", data=b"abc" * 1000)
        await gateway.send("PUT", "/up/y", json={"a": 1})
    assert upstream.requests[0].body == b"abc" * 1000
    assert json.loads(upstream.requests[1].body) == {"a": 1}


async def test_a_redirect_is_passed_to_the_caller_without_the_key(upstream):
    upstream.respond = lambda request: Answer(302, (("Location", f"https://elsewhere.example{request.path}"),), (b"",))
    async with running(upstream.url, api_key=KEY, key={"query": "apikey"}) as gateway:
        status, headers, _ = await gateway.get("/up/x")
        assert status == 302
        assert "Location" not in headers
    async with running(upstream.url) as gateway:
        status, headers, _ = await gateway.get("/up/x")
        assert (status, headers["Location"]) == (302, "https://elsewhere.example/x")
    assert len(upstream.requests) == 2


@pytest.mark.parametrize("write", [str, quote_plus, lambda key: quote(key, safe="").lower()], ids=["as is", "+", "%"])
async def test_a_link_that_repeats_the_key_is_removed(upstream, write):
    key = "sk+the/key=of the provider"
    link = f"<https://api.example/x?page=2&apikey={write(key)}>; rel=next"
    fields = (("Link", link), ("X-Other", "a+b%20c"))
    upstream.respond = lambda _request: Answer(200, fields, (b"ok",))
    async with running(upstream.url, api_key=key, key={"query": "apikey"}) as gateway:
        status, headers, _ = await gateway.get("/up/x")
        assert (status, headers.get("Link"), headers["X-Other"]) == (200, None, "a+b%20c")


async def test_trace_is_refused_since_its_response_repeats_the_key(upstream):
    async with running(upstream.url, api_key=KEY, key={"header": "Authorization"}) as gateway:
        status, _, body = await gateway.send("TRACE", "/up/x")
        assert (status, json.loads(body)["error"]["type"]) == (405, "method-not-allowed")
    assert not upstream.requests


async def test_head_and_no_content_have_no_body(upstream):
    upstream.respond = lambda _request: Answer(204, (), (b"",))
    async with running(upstream.url) as gateway:
        assert (await gateway.send("DELETE", "/up/x"))[0] == 204
        assert (await gateway.send("DELETE", "/up/x"))[0] == 204


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/nothing/v1", 404, "unknown-provider"),
        ("/to/other.example/v1", 403, "host-not-allowed"),
        ("/to/127.0.0.1:1/v1", 403, "port-not-allowed"),
        ("/to/127.0.0.1@evil.example/v1", 400, "bad-target"),
        ("/to/", 400, "bad-target"),
        ("/", 404, "unknown-provider"),
    ],
)
async def test_what_is_not_configured_cannot_be_reached(upstream, path, status, kind):
    async with running(upstream.url) as gateway:
        found, _, body = await gateway.get(path)
        assert (found, json.loads(body)["error"]["type"]) == (status, kind)
    assert not upstream.requests


@pytest.mark.parametrize("path", ["/up/v1/files/%2e%2e/chat", "/up/v1/..%2fchat", "/up/v1/%252e%252e/chat"])
async def test_dot_segments_are_refused(upstream, path):
    async with running(upstream.url) as gateway:
        response = await gateway.client.get(URL(gateway.url + path, encoded=True))
        assert response.status == 400
    assert not upstream.requests
