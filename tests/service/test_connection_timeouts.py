"""Timeouts of HTTP/1 connections: clients that send or read nothing, or too slowly."""

import json

import pytest

from tests.service.connection_harness import (
    CHUNKED,
    GET,
    HIGH_WATER,
    IDLE,
    OK,
    READ,
    acquire_body,
    chunked,
    post,
    running,
)
from tidegate.service._http.protocol import MIN_SENT


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n\r\n", b"G", b"GET /hea", b"GET / HTTP/1.1\r\nHost", GET[:-2]],
    ids=["silent", "empty lines", "one byte", "half a line", "half a field", "half a head"],
)
async def test_a_client_that_sends_no_request_is_disconnected(sent):
    async with running() as it:
        client = await it.ask(sent)
        await it.ticks(READ)
        assert client.state == "open"
        await it.ticks(1)
        assert (client.state, client.written) == ("closed", b"")


@pytest.mark.parametrize("sent", [b"\r\n" * 500, GET[:-2] + b"x: y\r\n" * 100], ids=["empty lines", "a head"])
async def test_a_client_that_sends_byte_by_byte_is_disconnected(sent):
    async with running() as it:
        client = it.connect()
        await it.ticks(READ // 2)
        client.send(sent[:1])
        for byte in sent[1 : 2 * READ]:
            await it.ticks(1)
            client.send(bytes((byte,)))
        assert (client.state, client.written) == ("closed", b"")


@pytest.mark.parametrize(
    "request_", [post(acquire_body()), post(chunked(acquire_body()), CHUNKED)], ids=["length", "chunked"]
)
@pytest.mark.parametrize("dripping", [False, True])
async def test_an_incomplete_body_times_out(request_, dripping):
    async with running() as it:
        client = it.connect(request_[:-20])
        for number in range(READ + 1):
            assert client.written == b""
            await it.ticks(1)
            if dripping and number % 10 == 0:
                client.send(request_[-20 + number // 10 :][:1])
        assert (client.statuses(), client.problems()) == ([408], ["timeout"])
        assert client.responses()[0][1]["connection"] == "close"
        assert it.service.app.in_flight == 0
        assert it.service.decider.stats.errors.totals()["timeout"] == 1
        # The client may read that before the connection is closed, but cannot keep it open.
        assert (client.state, client.eof) == ("open", True)
        client.send(b"more")
        await it.ticks(READ + 1)
        assert client.state == "closed"


async def test_an_incomplete_body_of_an_answered_request():
    async with running() as it:
        client = await it.ask(GET[:-2] + b"Content-Length: 10\r\n\r\n1")
        assert client.statuses() == [OK]
        await it.ticks(READ)
        assert client.state == "open"
        await it.ticks(1)
        assert (client.state, client.statuses()) == ("closed", [OK])


async def test_idle_connections_are_closed():
    async with running() as it:
        client = await it.ask(GET)
        await it.ticks(IDLE)
        client.send(GET)
        await it.settle()
        await it.ticks(IDLE)
        assert (client.state, client.statuses()) == ("open", [OK, OK])
        client.send(b"\r\n")  # is no request
        await it.ticks(1)
        assert client.state == "closed"


async def test_each_request_has_its_own_timeout():
    async with running() as it:
        client = await it.ask(GET)
        await it.ticks(IDLE)
        client.send(GET[:10])
        await it.ticks(READ)
        client.send(GET[10:])
        await it.settle()
        assert (client.state, client.statuses()) == ("open", [OK, OK])


async def test_a_waiting_request_does_not_time_out():
    async with running() as it:
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        client = await it.ask(post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode()))
        client.send(GET[:10])  # a second request, not read to its end before the first is answered
        await it.ticks(10 * IDLE)
        assert (client.state, client.written) == ("open", b"")
        it.service.clock.advance(30)
        await it.settle()
        assert client.statuses() == [OK]
        await it.ticks(READ)
        client.send(GET[10:])
        await it.settle()
        assert client.statuses() == [OK, OK]


async def test_an_incomplete_pipelined_request():
    async with running() as it:
        late = await it.ask(GET + post(acquire_body())[:-5])
        assert late.statuses() == [OK]
        await it.ask(post(json.dumps({"policy": "slow", "key": "k"}).encode()))
        waiting = post(json.dumps({"policy": "slow", "key": "k", "timeout": 30}).encode())
        patient = await it.ask(GET + waiting + GET[:10])
        await it.ticks(READ + 1)
        assert late.statuses() == [OK, 408]
        assert patient.statuses() == [OK]  # what is behind a request that waits need not come before its answer
        it.service.clock.advance(30)
        await it.settle()
        patient.send(GET[10:])
        await it.settle()
        assert patient.statuses() == [OK] * 3


async def test_a_client_that_reads_no_responses_is_disconnected():
    async with running(max_body=2**20) as it:
        client = it.connect()
        client.unsent = 0
        asks = json.dumps({"policy": "api", "keys": [str(number) for number in range(900)]}).encode()
        for _ in range(3):
            client.send(post(asks, path="/v1/batch"))
            await it.settle()
        assert client.unsent > HIGH_WATER
        for _ in range(4):  # slow
            await it.ticks(READ)
            client.take(MIN_SENT)
        assert client.state == "open"
        await it.ticks(2 * READ + 2)
        assert client.state == "closed"


async def test_a_client_that_does_not_read_its_last_response():
    async with running() as it:
        client = it.connect()
        client.unsent = 0
        client.send(GET[:-2] + b"Connection: close\r\n\r\n")
        await it.settle()
        assert (client.state, client.statuses()) == ("closing", [OK])
        await it.ticks(2 * READ + 2)
        assert client.state == "closed"
