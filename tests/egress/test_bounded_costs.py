"""Ceilings of tokens and money against a provider that bills what arrives, however the request hides it."""

import asyncio
import gzip
import json
import zlib
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from tests.cases import cases
from tests.egress.harness import TOKEN, raw, running
from tests.outbound.server import as_json

CEILING = 200_000  # micros
PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}, "default": {"input": 1, "output": 10}}
LONGEST = 100_000  # tokens of output of the provider, if a request sets no maximum
STORED = 40_000_000  # tokens of what a request refers to
REFERENCES = ("previous_response_id", "conversation", "file_id", "web_search", "item_reference", "cachedContent")
CHAT = "/up/v1/chat/completions"
OWN = {"callers": {"a": {"token": TOKEN, "limits": [f"{CEILING}/day unit=usd_micros"]}}}
TOKENS = {"callers": {"a": {"token": TOKEN, "limits": ["20_000/day unit=tokens"]}}}
MODES = {
    "provider": ({"callers": {"a": {"token": TOKEN}}}, {"spend": ["0.2/day unit=usd"]}),
    "caller": (OWN, {"spend": ["1000/day unit=usd"]}),
}


class Bill:
    """Bills a request by what it contains, whatever its header fields say."""

    def __init__(self, server):
        self.micros = 0
        self.arrived = []
        server.respond = self.answer

    def answer(self, request):
        body = request.body
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.arrived.append(body)
        path = urlsplit(request.path).path
        if path.endswith("batches"):
            self.micros += 5_000_000
            return as_json({"id": "batch_1", "usage": {"input_tokens": 0, "output_tokens": 0}})
        document = json.loads(body) if body else {}
        written = max(document.get("max_completion_tokens", 0), document.get("max_tokens", 0)) or LONGEST
        read = len(body) + sum(STORED for name in REFERENCES if name.encode() in body)
        self.micros += read + 10 * written
        if document.get("background"):
            return as_json({"status": "queued", "usage": None})
        return as_json({"usage": {"prompt_tokens": read, "completion_tokens": written}})


@pytest.fixture
def bill(upstream):
    return Bill(upstream)


def strict(upstream, mode, **fields):
    settings, limits = MODES[mode]
    return running(upstream.url, settings, profile="openai", price=PRICES, strict=True, **limits, **fields)


async def post(gateway, body, path=CHAT, **headers):
    headers = {"X-Tidegate-Token": TOKEN, "X-Tidegate-Timeout": "0", **headers}
    status, _, answer = await gateway.send("POST", path, data=body, headers=headers)
    return status, json.loads(answer).get("error", {})


def error_of(found):
    return found[0], found[1].get("type")


# ---- bodies that cannot be read --------------------------------------------------------------------------------------

PLAIN = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


@cases("mode", MODES)
@cases(
    ("headers", "body"),
    [
        ({"Content-Type": "application/json", "Content-Encoding": "br", "Connection": "content-encoding"}, PLAIN),
        ({"Content-Type": "application/json", "Content-Encoding": "zstd"}, PLAIN),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, PLAIN),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, gzip.compress(PLAIN)[:-3]),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip, br"}, gzip.compress(PLAIN)),
    ],
)
async def test_a_body_in_a_coding_that_cannot_be_read_is_refused(upstream, bill, mode, headers, body):
    async with strict(upstream, mode) as gateway:
        assert error_of(await post(gateway, body, **headers)) == (415, "unreadable-body")
    assert not bill.arrived


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", ["application/octet-stream", "image/png", "application/json-seq", "multipart/form-data"]
)
async def test_a_body_of_an_unusual_type_is_read_and_bounded(upstream, bill, mode, kind):
    async with strict(upstream, mode) as gateway:
        assert (await post(gateway, PLAIN, **{"Content-Type": kind}))[0] == 200
    (arrived,) = map(json.loads, bill.arrived)
    assert arrived["max_completion_tokens"] <= 20_000
    assert bill.micros <= CEILING


@cases("mode", MODES)
async def test_a_response_says_where_its_output_is_truncated(upstream, bill, mode):
    async with strict(upstream, mode) as gateway:
        headers = {"X-Tidegate-Token": TOKEN, "Content-Type": "application/json"}
        status, found, _ = await gateway.send("POST", CHAT, data=PLAIN, headers=headers)
        assert status == 200
        assert int(found["X-Tidegate-Truncates-At"]) == json.loads(bill.arrived[-1])["max_completion_tokens"]
        short = json.dumps({**json.loads(PLAIN), "max_tokens": 5}).encode()
        _, found, _ = await gateway.send("POST", CHAT, data=short, headers=headers | {"X-Tidegate-Timeout": "0"})
        assert "X-Tidegate-Truncates-At" not in found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
async def test_a_packed_body_is_sent_plain_with_a_bound(upstream, bill, mode, pack):
    coding = "gzip" if pack is gzip.compress else "deflate"
    async with strict(upstream, mode) as gateway:
        assert (await post(gateway, pack(PLAIN), **{"Content-Encoding": coding}))[0] == 200
    (request,) = upstream.requests
    assert "content-encoding" not in request.headers
    assert json.loads(request.body)["max_completion_tokens"] <= 20_000
    assert bill.micros <= CEILING


@pytest.mark.parametrize("mode", MODES)
async def test_a_body_that_unpacks_beyond_the_bound_is_refused(upstream, bill, mode):
    large = gzip.compress(json.dumps({"model": "m", "messages": ["x" * 20_000]}).encode())
    settings, limits = MODES[mode]
    fields = {"profile": "openai", "price": PRICES, "strict": True, **limits}
    async with running(upstream.url, {**settings, "max_metered_body": 10_000}, **fields) as gateway:
        assert error_of(await post(gateway, large, **{"Content-Encoding": "gzip"})) == (413, "too-large")
    assert not bill.arrived


@pytest.mark.parametrize("mode", MODES)
async def test_a_chunked_body_without_a_type_is_read_and_bounded(upstream, bill, mode):
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nX-Tidegate-Token: {TOKEN}\r\nConnection: close\r\n"
    chunk = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(PLAIN), PLAIN)
    async with strict(upstream, mode) as gateway:
        assert (await raw(gateway.port, head.encode() + chunk)).startswith(b"HTTP/1.1 200 ")
    assert json.loads(bill.arrived[0])["max_completion_tokens"] <= 20_000
    assert bill.micros <= CEILING


REPEATED = b'{"model":"m","max_tokens":1000000,"max_tokens":5,"messages":[]}'


@cases("mode", MODES)
@cases(
    "body",
    [
        REPEATED,
        REPEATED.replace(b'"max_tokens":5', rb'"max_\u0074okens":5'),
        REPEATED.decode().encode("utf-16"),
        b'{"model":"m","max_tokens":5,"messages":[{"content":"long","content":"a: \\"b\\": \\\\"}]}',
    ],
)
async def test_a_strict_call_whose_body_repeats_a_key_is_refused(upstream, bill, mode, body):
    async with strict(upstream, mode) as gateway:
        assert error_of(await post(gateway, body)) == (415, "unreadable-body")
    assert not bill.arrived


@pytest.mark.parametrize("mode", MODES)
async def test_colons_and_quotes_in_a_text_are_no_keys(upstream, bill, mode):
    text = 'a: "b": {"a": 1, "a": 2} \\ \\" \u00e9 :'
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": [{text: text}, {text: [{"a": {}}]}]})
    async with strict(upstream, mode) as gateway:
        for each in (body.encode(), body.encode("utf-16"), gzip.compress(body.encode())):
            headers = {"Content-Encoding": "gzip"} if each[:2] == b"\x1f\x8b" else {}
            assert (await post(gateway, each, **headers))[0] == 200


async def test_a_repeated_key_does_not_hide_work_in_the_background(upstream, bill):
    body = b'{"model":"m","background":true,"background":false,"max_output_tokens":5,"input":"a"}'
    async with running(upstream.url, OWN, profile="openai", price=PRICES) as gateway:
        assert error_of(await post(gateway, body, "/up/v1/responses")) == (415, "unreadable-body")
    assert not bill.arrived


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [b"[" + PLAIN + b"]", PLAIN[:-1] + b",}", b"--b\r\n\r\n--b--"])
async def test_a_strict_call_whose_body_is_no_json_object_is_refused(upstream, bill, mode, body):
    async with strict(upstream, mode) as gateway:
        assert error_of(await post(gateway, body)) == (415, "unreadable-body")
    assert not bill.arrived


async def test_a_lenient_call_in_an_unknown_coding_is_refused_too_where_tokens_are_limited(upstream, bill):
    limits = ["1000/1m", "10_000/1m unit=tokens"]
    async with running(upstream.url, profile="openai", limits=limits) as gateway:
        assert error_of(await post(gateway, PLAIN, **{"Content-Encoding": "br"})) == (415, "unreadable-body")
        upload = gzip.compress(b"a file")
        assert (await post(gateway, upload, "/up/v1/files", **{"Content-Encoding": "gzip"}))[0] != 415
    async with running(upstream.url, limits=["1000/1m"]) as gateway:  # nothing but requests is limited
        upstream.respond = lambda _request: as_json({})
        assert (await post(gateway, PLAIN, **{"Content-Encoding": "br"}))[0] == 200
        assert upstream.requests[-1].headers["content-encoding"] == "br"


async def test_a_signed_body_is_sent_as_it_is_and_needs_a_bound(upstream, bill):
    signed = {"Content-Encoding": "gzip", "Content-Digest": "sha-256=:x:"}
    async with strict(upstream, "provider") as gateway:
        found = await post(gateway, gzip.compress(PLAIN), **signed)
        assert (*error_of(found), "set max_completion_tokens" in found[1]["message"]) == (400, "unbounded-cost", True)
        bounded = gzip.compress(json.dumps({**json.loads(PLAIN), "max_completion_tokens": 100}).encode())
        assert (await post(gateway, bounded, **signed))[0] == 200
    assert upstream.requests[-1].body == bounded
    assert bill.micros <= CEILING


# ---- what is not in the request --------------------------------------------------------------------------------------

BASE = {"model": "m", "max_completion_tokens": 100}
REFERRING = {
    "previous_response_id": {"previous_response_id": "resp_1"},
    "conversation": {"conversation": "conv_1"},
    "prompt.id": {"prompt": {"id": "pmpt_1"}, "conversation": None},
    "file_id": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    "item_reference": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "web_search": {"tools": [{"type": "web_search"}]},
    "web_search_options": {"web_search_options": {}},
    "background": {"background": True},
}


@cases("mode", MODES)
@cases("name", REFERRING)
async def test_a_strict_call_is_not_sent_if_it_uses_what_is_not_in_it(upstream, bill, mode, name):
    async with strict(upstream, mode) as gateway:
        found = await post(gateway, json.dumps({**BASE, **REFERRING[name]}).encode(), "/up/v1/responses")
        assert error_of(found) == (400, "unbounded-cost")
        assert f"'{name}'" in found[1]["message"]
        assert f"unbounded: {{{name}: {{tokens: 50_000}}}}" in found[1]["message"]
    assert not bill.arrived


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "m", "input": [{"content": [{"type": "input_file", "file\u005fid": "f"}]}]}',
        rb'{"model": "m", "previous\u005fresponse_id": "r"}',
        '{"model": "m", "input": [{"content": [{"file_id": "f"}]}]}'.encode("utf-16"),
        b'{"model": "m", "input": [{"id": "msg_1"}]}',
        b'{"model": "m", "input": ' + b"[" * 60 + b'{"file_id": "f"}' + b"]" * 60 + b"}",
    ],
    ids=["escaped key", "escaped field", "UTF-16", "reference without a type", "deep"],
)
async def test_a_reference_is_found_however_it_is_written(upstream, bill, body):
    async with strict(upstream, "provider") as gateway:
        assert error_of(await post(gateway, body, "/up/v1/responses")) == (400, "unbounded-cost")
    assert not bill.arrived


async def test_what_only_looks_like_a_reference_is_sent(upstream, bill):
    schema = {"type": "object", "properties": {"file_id": {"type": "string"}}}
    body = {
        **BASE,
        "previous_response_id": None,
        "background": False,
        "tools": [{"type": "function", "name": "read", "parameters": schema}],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": 'the file_id of "file_id"'}]}],
    }
    async with strict(upstream, "provider") as gateway:
        upstream.respond = lambda _request: as_json({"usage": {"input_tokens": 10, "output_tokens": 10}})
        assert (await post(gateway, json.dumps(body).encode(), "/up/v1/responses"))[0] == 200


LONG = "a word " * 130_000
LETTERS = "x" * 900_000


@cases("mode", MODES)
@cases(
    ("profile", "message"),
    [
        ("openai", {"role": "user", "type": "image_url", "content": LONG}),
        ("mistral", {"role": "user", "type": "image_url", "content": LONG}),
        ("anthropic", {"role": "user", "type": "image", "content": LONG}),
        ("openai", {"role": "user", "content": [{"type": "image_url", "image_url": "https://a.test", "text": LONG}]}),
        ("openai", {"role": "user", "content": {"image_url": LONG}}),
        ("openai", {"role": "user", "content": {"image_url": LETTERS}}),
        ("openai", {"role": "user", "content": {"image_url": {"url": "https://a.test/ " + LONG}}}),
        ("anthropic", {"content": [{"type": "document", "source": {"type": "text", "data": LETTERS}}]}),
        ("google", {"parts": [{"inlineData": {"mimeType": "text/plain", "data": LETTERS}}]}),
        ("openai", {"content": [{"type": "file", "file": {"file_data": "data:text/plain;base64," + LETTERS}}]}),
    ],
)
async def test_a_text_that_looks_like_a_medium_is_paid_as_a_text(upstream, bill, mode, profile, message):
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": [message]}).encode()
    settings, limits = MODES[mode]
    fields = {"profile": profile, "price": PRICES, "strict": True, **limits}
    async with running(upstream.url, settings, **fields) as gateway:
        assert error_of(await post(gateway, body))[0] == 429
    assert not bill.arrived


async def test_an_image_is_not_paid_as_a_text(upstream, bill):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 200_000}}
    body = json.dumps({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": [image]}]}).encode()
    async with strict(upstream, "provider") as gateway:
        assert (await post(gateway, body))[0] == 200


@pytest.mark.parametrize("mode", MODES)
async def test_the_provider_file_can_give_a_reference_a_cost(upstream, bill, mode):
    given = {"previous_response_id": {"tokens": 50_000}, "web_search": {"tokens": 1000, "usd_micros": 70_000}}
    async with strict(upstream, mode, unbounded=given) as gateway:
        upstream.respond = lambda _request: as_json({"usage": {"input_tokens": 50_000, "output_tokens": 100}})
        body = json.dumps({**BASE, "previous_response_id": "r", "tools": [{"type": "web_search"}]}).encode()
        statuses = [(await post(gateway, body, "/up/v1/responses"))[0] for _ in range(3)]
        # 50,000 of input, 1,000 of output, and 70,000 for the search that no usage reports: about 121,000 each
        assert statuses == [200, 429, 429]


async def test_a_lenient_call_may_use_what_is_not_in_it_because_its_usage_is_charged(upstream, bill):
    settings, _ = MODES["caller"]
    async with running(upstream.url, settings, profile="openai", price=PRICES) as gateway:
        body = json.dumps({**BASE, "previous_response_id": "resp_1"}).encode()
        assert [(await post(gateway, body, "/up/v1/responses"))[0] for _ in range(2)] == [200, 429]


# ---- what no response reports ----------------------------------------------------------------------------------------

BATCH = json.dumps({"input_file_id": "f", "endpoint": "/v1/chat/completions", "completion_window": "24h"}).encode()


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("settings", "fields"),
    [(OWN, {}), (TOKENS, {}), ({"callers": {"a": {"token": TOKEN}}}, {"spend": ["0.2/day unit=usd"]})],
)
@pytest.mark.parametrize("path", ["/up/v1/batches", "/up//v1/batches/", "/up/v1/%62atches", "/up/v1/Batches"])
async def test_a_batch_is_not_free_where_tokens_or_money_are_limited(upstream, bill, settings, fields, path, is_strict):
    fields = {"profile": "openai", "price": PRICES, "strict": is_strict, **fields}
    async with running(upstream.url, settings, **fields) as gateway:
        found = await post(gateway, BATCH, path)
        assert (*error_of(found), "'batches'" in found[1]["message"]) == (400, "unbounded-cost", True)
        cancel = await post(gateway, b"", "/up/v1/batches/batch_1/cancel")
        assert cancel[0] == 200
    assert bill.micros < CEILING or len(bill.arrived) == 1


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("mode", MODES)
async def test_a_batch_costs_what_the_provider_file_says(upstream, bill, mode, is_strict):
    settings, limits = MODES[mode]
    given = {"batches": {"usd_micros": 90_000}}
    fields = {"profile": "openai", "price": PRICES, "strict": is_strict, "unbounded": given, **limits}
    async with running(upstream.url, settings, **fields) as gateway:
        assert [(await post(gateway, BATCH, "/up/v1/batches"))[0] for _ in range(3)] == [200, 200, 429]


async def test_a_batch_is_sent_where_only_the_providers_tokens_are_limited(upstream, bill):
    """It has a queue of its own there."""
    async with running(upstream.url, profile="openai", limits=["9/1m", "1000/1m unit=tokens"], strict=True) as gateway:
        assert (await post(gateway, BATCH, "/up/v1/batches"))[0] == 200


async def test_work_in_the_background_is_not_free_for_a_lenient_caller(upstream, bill):
    async with running(upstream.url, OWN, profile="openai", price=PRICES) as gateway:
        body = json.dumps({**BASE, "background": True}).encode()
        assert error_of(await post(gateway, body, "/up/v1/responses")) == (400, "unbounded-cost")
    assert not bill.arrived


@pytest.fixture
async def realtime():
    """A provider that bills each message of a WebSocket."""
    billed = []

    async def handle(request):
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        async for message in connection:
            billed.append(message.data)
            await connection.send_str("done")
        return connection

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", billed
    await runner.cleanup()


@cases("is_strict", [True, False])
@cases(
    ("settings", "fields"),
    [
        (OWN, {}),
        (TOKENS, {}),
        ({"callers": {"a": {"token": TOKEN}}}, {"spend": ["0.2/day unit=usd"]}),
        ({"callers": {"a": {"token": TOKEN}}}, {"limits": ["10/1m", "1000/1m unit=tokens"]}),
    ],
)
async def test_a_websocket_is_refused_where_tokens_or_money_are_limited(realtime, settings, fields, is_strict):
    url, billed = realtime
    headers = {"X-Tidegate-Token": TOKEN}
    fields = {"profile": "openai", "price": PRICES, "strict": is_strict, **fields}
    async with running(url, settings, **fields) as gateway:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await gateway.client.ws_connect(f"{gateway.url}/up/v1/realtime?model=m", headers=headers)
        assert refused.value.status == 400
    assert not billed


async def test_a_websocket_costs_what_the_provider_file_says(realtime):
    url, billed = realtime
    headers = {"X-Tidegate-Token": TOKEN, "X-Tidegate-Timeout": "0"}
    given = {"websocket": {"tokens": 15_000}}
    async with running(url, TOKENS, profile="openai", unbounded=given) as gateway:
        address = f"{gateway.url}/up/v1/realtime?model=m"
        async with gateway.client.ws_connect(address, headers=headers) as connection:
            await connection.send_str("hello")
            assert (await connection.receive_str()) == "done"
        await asyncio.sleep(0)
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await gateway.client.ws_connect(address, headers=headers)
        assert refused.value.status == 429
    assert billed == ["hello"]


# ---- the caller's own limits of strict calls -------------------------------------------------------------------------


async def test_the_output_of_a_strict_call_is_bounded_by_its_callers_limits(upstream, bill):
    async with strict(upstream, "caller") as gateway:
        wanted = json.dumps({"model": "m", "max_completion_tokens": 90_000}).encode()
        assert (await post(gateway, wanted))[0] == 200
        assert json.loads(bill.arrived[0])["max_completion_tokens"] < 20_000
        assert (await post(gateway, wanted))[0] == 429
    assert bill.micros <= CEILING


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(("settings", "fields"), [*MODES.values(), (TOKENS, {})])
async def test_a_usage_without_an_output_does_not_make_the_output_free(upstream, settings, fields, is_strict):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 5}})
    body = json.dumps({"model": "m", "max_tokens": 9000, "messages": []}).encode()
    async with running(upstream.url, settings, profile="openai", price=PRICES, strict=is_strict, **fields) as gateway:
        statuses = [(await post(gateway, body))[0] for _ in range(4)]
    assert statuses == [200, 200, 429, 429]


async def test_what_hides_the_usage_is_not_passed_on_to_google(upstream, bill):
    path = "/up/v1beta/models/m:generateContent?fields=candidates&%24fields=candidates&alt=json"
    headers = {"X-Goog-FieldMask": "candidates", "X-HTTP-Method-Override": "POST"}
    async with running(upstream.url, TOKENS, profile="google") as gateway:
        assert (await post(gateway, b'{"contents": []}', path, **headers))[0] == 200
    (request,) = upstream.requests
    assert urlsplit(request.path).query == "alt=json"
    assert not {"x-goog-fieldmask", "x-http-method-override"} & set(request.headers)
