"""Acquires and batches on a store in memory are answered without a task; all requests however they arrive."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.connection_harness import OK, POLICIES, acquire_body, chunked, post, running
from tests.service.harness import ADMIN, DECISION
from tidegate.service._decisions.decider import Subject

BATCH = json.dumps({"policy": "api", "keys": [f"k{number}" for number in range(20)]}).encode()
ASKS = json.dumps({"asks": [{"policy": "api", "key": "a"}, {"policy": "slow", "key": "b"}]}).encode()
USUAL = {
    "acquire": post(acquire_body()),
    "chunked": post(chunked(acquire_body()), "Transfer-Encoding: chunked"),
    "keys": post(BATCH, path="/v1/batch"),
    "asks": post(ASKS, path="/v1/batch"),
}
# Other kinds of requests, and requests that are refused.
OTHERS = {
    "cost": post(acquire_body(cost=3)),
    "timeout": post(acquire_body(timeout=1)),
    "unknown policy": post(json.dumps({"policy": "nope", "key": "k"}).encode()),
    "wrong field": post(acquire_body(kee="k")),
    "no JSON": post(b"{"),
    "long key": post(acquire_body("x" * 2000)),
    "another type": post(acquire_body()).replace(b"application/json", b"text/plain"),
    "idempotency key": post(acquire_body(), "Idempotency-Key: one"),
    "close": post(acquire_body(), "Connection: close"),
    "HTTP/1.0": post(acquire_body()).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "expect": post(acquire_body(), "Expect: 100-continue"),
    "upgrade": post(acquire_body(), "Connection: Upgrade", "Upgrade: h2c"),
    "another host": post(acquire_body()).replace(b"localhost", b"example.com"),
    "GET": post(acquire_body()).replace(b"POST", b"GET"),
    "query": post(acquire_body(), path="/v1/acquire?x=1"),
    "too large": post(b" " * 5000 + acquire_body()),
}


def allowed_calls(stats):
    return {name: count.allowed for name, count in stats.totals().counts.items()}


@pytest.mark.parametrize("name", USUAL)
async def test_a_usual_request_is_answered_as_soon_as_it_has_arrived(name):
    async with running() as it:
        client = it.connect(USUAL[name])
        assert client.statuses() == [OK]  # the event loop did not run in between


async def test_a_store_that_must_be_awaited_is_asked_in_a_task():
    async with running() as it:
        it.service.decider.store.instant = False
        client = it.connect(USUAL["acquire"])
        assert client.statuses() == []
        await it.settle(100)
        assert client.statuses() == [OK]


@cases("name", [*USUAL, *OTHERS])
async def test_a_request_in_pieces_gets_the_same_bytes_and_counts(name):
    request = {**USUAL, **OTHERS}[name]
    seen = []
    for pieces in ([request], [request[:-1], request[-1:]]):
        async with running() as it:
            client = it.connect()
            for piece in pieces:
                client.send(piece)
                await it.settle()
            stats = it.service.app.decider.stats
            latency = {verb: sum(histogram.counts) for verb, histogram in stats.latency.items()}
            seen.append((bytes(client.written), stats.errors.totals(), latency, allowed_calls(stats)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("token", "statuses"), [(DECISION, [OK]), (ADMIN, [OK]), ("wrong", [401]), (None, [401])], ids=str
)
async def test_tokens_are_checked(token, statuses):
    fields = [] if token is None else [f"Authorization: Bearer {token}"]
    async with running(decision_token=DECISION, admin_token=ADMIN) as it:
        client = await it.ask(post(acquire_body(), *fields))
        assert client.statuses() == statuses


async def test_a_stopping_service_refuses_it():
    async with running() as it:
        client = it.connect()
        it.service.app.stop()
        client.send(USUAL["acquire"])
        await it.settle()
        assert client.problems() == ["stopping"]


async def test_a_blocked_key_is_denied():
    async with running() as it:
        await it.service.app.decider.block(Subject("api", "k"), 60)
        client = it.connect(USUAL["acquire"])
        assert json.loads(client.responses()[0][2])["violated"] == ["blocked"]


async def test_pipelined_requests_are_answered_in_order():
    waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
    async with running() as it:
        client = it.connect(USUAL["acquire"] + post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        assert client.statuses() == [OK, OK]
        client.send(waiting + USUAL["acquire"] * 2)
        await it.settle()
        assert client.statuses() == [OK, OK]  # the third waits, so the others wait behind it
        it.service.clock.advance(30)
        await it.settle(100)
        assert client.statuses() == [OK] * 5
        assert [json.loads(body)["allowed"] for _, _, body in client.responses()] == [True, True, False, True, True]


async def test_nothing_is_decided_for_a_client_that_does_not_read():
    async with running(max_body=2**20) as it:
        client = it.connect()
        client.unsent = 0
        keys = json.dumps({"policy": "api", "keys": [str(number) for number in range(900)]}).encode()
        client.send(post(keys, path="/v1/batch"))
        client.send(USUAL["acquire"])
        await it.settle()
        assert allowed_calls(it.service.app.decider.stats) == {"api": 900}
        client.take(10**9)
        await it.settle()
        assert client.statuses() == [OK, OK]


async def test_the_idle_time_begins_with_the_answer():
    async with running() as it:
        client = it.connect(USUAL["acquire"])
        await it.ticks(299)
        assert client.state == "open"
        await it.ticks(3)
        assert client.state == "closed"


async def test_a_connection_with_requests_is_not_closed_to_make_room():
    async with running(max_connections=20) as it:
        busy, idle = it.connect(), it.connect()
        busy.send(USUAL["acquire"])  # from now on, the other one has waited longer
        for _ in range(19):
            it.connect()
        await it.settle()
        assert (busy.state, idle.state) == ("open", "closed")


@given(st.lists(st.sampled_from([*USUAL.values(), *OTHERS.values()]), min_size=1, max_size=4), st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
async def test_requests_cut_anywhere_get_the_same_answers(requests, data):
    sent = b"".join(requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=6)))
    pieces = [sent[start:end] for start, end in zip([0, *cuts], [*cuts, len(sent)], strict=True)]
    seen = []
    for parts in (pieces, [sent[place : place + 1] for place in range(len(sent))]):
        async with running(policies=POLICIES) as it:
            client = it.connect()
            for part in parts:
                client.send(part)
                await it.settle(3)
            it.service.clock.advance(2)
            await it.settle(200)
            seen.append(client.statuses())
    assert seen[0] == seen[1]


async def test_a_pipeline_of_batches_leaves_room_for_other_connections():
    async with running(max_body=2**20) as it:
        client = it.connect(USUAL["keys"] * 5)
        assert client.statuses() == [OK]  # one batch at once; the others in tasks, one after the other
        await it.settle(200)
        assert client.statuses() == [OK] * 5


async def test_an_unexpected_error_is_answered_and_not_repeated(monkeypatch, caplog):
    async with running() as it:
        calls = []

        def fail(subject, *_):
            calls.append(subject)
            raise ZeroDivisionError

        monkeypatch.setattr(it.service.decider, "acquire_now", fail)  # no input causes one
        client = await it.ask(USUAL["acquire"])
        assert (client.problems(), len(calls)) == (["internal"], 1)
        assert "a request to /v1/acquire failed" in caplog.text


async def test_an_invalid_body_is_refused_with_a_response():
    async with running() as it:
        client = await it.ask(post(b"5\r\nabcde\r\nXX\r\n", "Transfer-Encoding: chunked"))
        assert client.statuses() == [400]


async def test_a_client_that_does_not_read_has_the_shorter_time():
    async with running(max_body=2**20) as it:
        client = it.connect()
        client.unsent = 0
        keys = json.dumps({"policy": "api", "keys": [str(number) for number in range(900)]}).encode()
        client.send(post(keys, path="/v1/batch"))
        assert client.unsent > 64 * 1024
        await it.ticks(250)
        assert client.state == "closed"
