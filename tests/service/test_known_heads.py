"""A head that was parsed once is not parsed again; the response is the same as without that."""

import json
from itertools import pairwise

import httptools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.connection_harness import OK, acquire_body, post, running
from tests.service.harness import ADMIN, DECISION
from tests.service.test_immediate_replies import OTHERS, USUAL
from tidegate.service._http import request_head
from tidegate.service._http.request_head import KnownHeads, RequestHead

WARM_UP = post(acquire_body("w"))  # the same head as that of the key "k"


class CountingParser(httptools.HttpRequestParser):
    """Counts the input of all parsers."""

    fed = b""

    def feed_data(self, data):
        CountingParser.fed += data
        super().feed_data(data)


def remaining(client):
    return [json.loads(body).get("remaining") for _, _, body in client.responses()]


async def test_a_known_head_is_not_parsed_again(monkeypatch):
    parser = CountingParser
    monkeypatch.setattr(httptools, "HttpRequestParser", parser)
    monkeypatch.setattr(parser, "fed", b"")
    async with running() as it:
        client = it.connect()
        client.send(WARM_UP)
        assert parser.fed == WARM_UP
        for key in "kkj":
            client.send(post(acquire_body(key)))
        assert parser.fed == WARM_UP
        client.send(post(acquire_body("another length")))
        assert parser.fed == WARM_UP + post(acquire_body("another length"))
        for _ in range(2):
            client.send(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await it.settle()
        assert parser.fed.count(b"GET") == 1
        first, *others = remaining(client)[:5]
        assert others == [first, first - 1, first, first]


@cases("name", [*USUAL, *OTHERS])
async def test_responses_are_the_same_after_the_head_of_another_request(name):
    request = {**USUAL, **OTHERS}[name]
    seen = []
    for earlier in ([], [WARM_UP, WARM_UP]):
        async with running() as it:
            for each in earlier:
                await it.ask(each)
            seen.append(bytes((await it.ask(request)).written))
    assert seen[0] == seen[1]


@given(cuts=st.lists(st.integers(1, 5 * len(WARM_UP) - 1), max_size=6), between=st.sampled_from([*USUAL, *OTHERS]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
async def test_known_requests_cut_anywhere_are_answered_once(cuts, between):
    """Requests with a known head: whole, in pieces, or together in one piece."""
    async with running() as it:
        await it.ask({**USUAL, **OTHERS}[between])
        client = await it.ask(WARM_UP)
        data, places = post(acquire_body("j")) * 5, sorted({0, *cuts, 5 * len(WARM_UP)})
        for start, end in pairwise(places):
            client.send(data[start:end])
        await it.settle(200)
        assert client.statuses() == [OK] * 6
        numbers = remaining(client)[1:]
        assert numbers == list(range(numbers[0], numbers[0] - 5, -1))


async def test_a_known_head_with_an_incomplete_or_longer_body():
    async with running() as it:
        client = await it.ask(WARM_UP)
        client.send(WARM_UP[:-3])
        await it.settle()
        assert client.statuses() == [OK]
        client.send(WARM_UP[-3:] + WARM_UP)
        await it.settle(100)
        assert client.statuses() == [OK] * 3
        client.send(WARM_UP + b"garbage\r\n\r\n")
        await it.settle(100)
        assert client.statuses() == [OK] * 4 + [400]


async def test_another_token_of_the_same_length_is_refused():
    async with running(decision_token=DECISION, admin_token=ADMIN) as it:
        good = post(acquire_body(), f"Authorization: Bearer {DECISION}")
        client = it.connect(good)
        client.send(good)
        client.send(good.replace(DECISION.encode(), b"x" * len(DECISION)))
        await it.settle()
        assert client.statuses() == [OK, OK, 401]


async def test_a_stopping_or_busy_service_refuses_a_known_head():
    async with running(max_concurrency=1) as it:
        client = await it.ask(WARM_UP)
        it.service.app.in_flight += 1
        client.send(WARM_UP)
        await it.settle()
        assert client.problems() == ["busy"]
        it.service.app.in_flight -= 1
        client.send(WARM_UP)
        assert client.statuses() == [OK, 503, OK]
        other = it.connect()
        it.service.app.stop()
        other.send(WARM_UP)
        await it.settle()
        assert other.problems() == ["stopping"]


def test_the_number_and_size_of_heads_are_bounded(monkeypatch):
    monkeypatch.setattr(request_head, "MAX_KNOWN_HEADS", 3)
    heads, head = KnownHeads(), RequestHead(None, "POST", "/", b"", {}, 4, keep_alive=True)
    found = [b"POST /%d\r\n\r\n" % number for number in range(8)]
    for data in found:
        heads.remember(data, head)
        assert heads.find(data) is head
    assert sum(heads.find(data) is not None for data in found) <= 3
    large = b"POST /%s\r\n\r\n" % (b"x" * request_head.MAX_KNOWN_HEAD)
    heads.remember(large, head)
    assert heads.find(large) is None
    keyed = head._replace(headers={b"idempotency-key": b"1"})  # a client sends it once
    heads.remember(b"POST /keyed\r\n\r\n", keyed)
    assert heads.find(b"POST /keyed\r\n\r\n") is None
