"""Hostile and slow clients of the RESP port: invalid bytes, half commands, silence, unread replies, too many."""

import asyncio
import logging
import socket
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.connection_harness import ClientTransport
from tests.service.resp.harness import InProcessResp, connected, encode

POLICIES = {"api": "1000000/1m", "slow": "1/1h"}
ACQUIRE = encode("TG.ACQUIRE", "api", "k")
HTTP_LINES = [b"POST / HTTP/1.1", b"GET /v1/acquire HTTP/1.1", b"Host: localhost:6390"]


async def read_end(client):
    """Read everything until the service closes the connection."""
    try:
        return await asyncio.wait_for(client.reader.read(), 20)
    except ConnectionError:
        return b"reset"


async def tick(service, count):
    """Let so many ticks of the timer pass."""
    for _ in range(count):
        await asyncio.sleep(0)
        service.connections.tick()


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@cases(
    "data",
    [
        b"PING\r\n",
        b"*1\r\n$999999999\r\n",
        b"*999999999\r\n",
        b"*1\r\n" * 1000,
        b"*1\r\n$4\r\nPINGxx",
        b"\x16\x03\x01\x02\x00\x01",
        b"*1\r\n:1\r\n",
        b"\0" * 100_000,
    ],
)
async def test_invalid_bytes_end_the_connection_with_an_error_after_earlier_replies(data):
    async with connected(policies=POLICIES) as (service, client):
        client.writer.write(ACQUIRE + encode("PING") + data)
        assert (await client.read())[0] == 1
        assert await client.read() == "PONG"
        assert str(await client.read()).startswith("ERR Protocol error: ")
        assert await read_end(client) == b""
        assert service.decider.stats.errors.totals()["bad-request"] == 1
        client.close()
        await until(lambda: not len(service.connections))
        assert await (await service.connect()).ask("PING") == "PONG"


@pytest.mark.parametrize("line", HTTP_LINES)
async def test_an_http_request_closes_the_connection_at_once(line, caplog):
    async with connected(policies=POLICIES) as (service, client):
        body = encode("TG.ACQUIRE", "slow", "k")
        with caplog.at_level(logging.WARNING, "tidegate.service"):
            client.writer.write(line + b"\r\nContent-Length: 40\r\n\r\n" + body)
            assert await read_end(client) in (b"", b"reset")
            again = await service.connect()
            again.writer.write(line + b"\r\n")
            assert await read_end(again) in (b"", b"reset")
        assert caplog.text.count("an HTTP request was sent to the RESP port") == 1  # a client cannot flood the log
        assert service.decider.stats.errors.totals()["bad-request"] == 2
        assert (await (await service.connect()).ask("TG.ACQUIRE", "slow", "k"))[0] == 1  # not charged


async def test_a_command_that_arrives_in_pieces_is_answered():
    async with connected(policies=POLICIES) as (_, client):
        for byte in ACQUIRE:
            client.writer.write(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.read())[0] == 1


async def test_half_a_command_is_refused_after_the_read_timeout_and_silence_closes():
    async with connected(policies=POLICIES) as (service, client):
        silent, idle = await service.connect(), await service.connect()
        assert await idle.ask("PING") == "PONG"
        client.writer.write(ACQUIRE[:20])
        await until(lambda: len(service.connections) == 3)
        await tick(service, service.connections.read_ticks + 1)
        assert "the command was not received within 5 s" in str(await client.read())
        assert await read_end(silent) == b""
        assert await idle.ask("PING") == "PONG"
        await tick(service, service.connections.idle_ticks + 1)
        assert await read_end(idle) == b""


async def test_dripping_bytes_do_not_extend_the_time_of_a_command():
    async with connected(policies=POLICIES) as (service, client):
        for number in range(service.connections.read_ticks + 2):
            if not client.writer.is_closing():
                client.writer.write(ACQUIRE[number : number + 1])
            await asyncio.sleep(0.001)  # the bytes have to pass through a real socket
            service.connections.tick()
        assert "was not received within" in str(await client.read())


async def test_a_client_that_reads_nothing_is_disconnected():
    async with InProcessResp(policies=POLICIES) as service:
        raw = socket.create_connection(("127.0.0.1", service.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await until(lambda: len(service.connections) == 1)
        sent = 0
        blocked = 0
        while blocked < 100:  # turns of the event loop in which nothing could be sent
            try:
                sent += raw.send(encode("COMMAND") * 1000)
                blocked = 0
            except BlockingIOError:
                blocked += 1
            assert sent < 2**26, "the service keeps on reading"
            await asyncio.sleep(0)
        await tick(service, 4 * service.connections.read_ticks)
        await until(lambda: not len(service.connections))
        raw.close()
        assert await (await service.connect()).ask("PING") == "PONG"


async def test_a_client_that_has_read_its_replies_may_wait_for_a_permit():
    """The replies before the waiting call exceed what is sent at once; the client reads them in time."""
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "slow", "k")
        slow = ClientTransport(service.resp.connect())
        slow.unsent = 0
        slow.send(encode("COMMAND") * 500 + encode("TG.ACQUIRE", "slow", "k", "TIMEOUT", "30"))
        await until(lambda: service.decider.waiting)
        assert slow.paused
        slow.take(slow.unsent)
        slow.written.clear()
        await tick(service, 2 * service.connections.read_ticks)
        assert slow.state == "open"
        service.clock.advance(31)
        await until(lambda: slow.written)
        assert slow.written.startswith(b"*5\r\n:0\r\n")


async def test_the_time_to_read_replies_is_not_taken_from_the_next_command():
    """While the client reads, the service reads nothing: the rest of the command cannot arrive."""
    async with InProcessResp(policies=POLICIES) as service:
        slow = ClientTransport(service.resp.connect())
        slow.unsent = 0
        slow.send(encode("COMMAND") * 500 + ACQUIRE[:-3])
        await until(lambda: slow.paused)
        await tick(service, service.connections.read_ticks)
        slow.take(slow.unsent)
        slow.written.clear()
        await tick(service, 2)
        slow.send(ACQUIRE[-3:])
        await until(lambda: slow.written)
        assert slow.written.startswith(b"*5\r\n:1\r\n")


async def test_a_busy_service_refuses_usual_commands_as_over_http():
    async with connected(policies=POLICIES, max_concurrency=1) as (service, client):
        service.app.in_flight += 1
        for words in (("TG.ACQUIRE", "api", "k"), ("CL.THROTTLE", "k", 4, 1, 3600)):
            for commands in ((words,), (words, words)):
                replies = await client.ask_all(*commands)
                assert ["TRYAGAIN busy" in str(reply) for reply in replies] == [True] * len(commands)
        service.app.in_flight -= 1
        assert (await client.ask("TG.ACQUIRE", "api", "k"))[0] == 1


async def test_input_beyond_a_running_command_is_bounded():
    async with connected(policies=POLICIES) as (service, client):
        await client.ask("TG.ACQUIRE", "slow", "k")
        client.writer.write(encode("TG.ACQUIRE", "slow", "k", "TIMEOUT", "30"))
        await until(lambda: service.decider.waiting)
        client.writer.write(ACQUIRE * 50_000)
        for _ in range(200):
            await asyncio.sleep(0)
        (connection,) = service.connections.snapshot()
        assert len(connection._unparsed) < 2**20  # noqa: SLF001 - no public attribute shows it
        service.clock.advance(31)
        assert (await client.read())[0] == 0
        for _ in range(50_000):
            assert (await client.read())[0] == 1


async def test_the_connection_that_waited_longest_makes_room():
    async with InProcessResp(policies=POLICIES, max_connections=3) as service:
        clients = [await service.connect() for _ in range(3)]
        for client in clients:
            assert await client.ask("PING") == "PONG"
        service.connections.tick()
        for client in (clients[0], clients[2]):
            assert (await client.ask("TG.ACQUIRE", "api", "k"))[0] == 1  # the fast path counts as activity, too
        last = await service.connect()
        assert await last.ask("PING") == "PONG"
        assert await read_end(clients[1]) in (b"", b"reset")
        assert await clients[0].ask("PING") == "PONG"


async def test_a_stop_answers_what_is_under_way_and_closes():
    async with connected(policies=POLICIES) as (service, client):
        idle = await service.connect()
        await client.ask("TG.ACQUIRE", "slow", "k")
        client.writer.write(encode("TG.ACQUIRE", "slow", "k", "TIMEOUT", "20") + encode("PING"))
        await until(lambda: service.decider.waiting)
        for connection in service.connections.snapshot():
            connection.shutdown()
        assert await read_end(idle) == b""
        service.clock.advance(21)
        assert (await client.read())[0] == 0
        assert await client.read() == "PONG"
        with pytest.raises(EOFError):
            await client.read()


async def test_a_command_that_fails_unexpectedly_is_an_error_reply(monkeypatch, caplog):
    async with connected(policies=POLICIES) as (service, client):

        async def fail(*_args, **_options):
            raise ZeroDivisionError

        monkeypatch.setattr(service.decider, "usage", fail)
        assert "internal: see the log" in str(await client.ask("TG.USAGE", "api", "k"))
        assert "ZeroDivisionError" in caplog.text
        assert await client.ask("PING") == "PONG"


# ---- random bytes ----------------------------------------------------------------------------------------------------

VALID = st.sampled_from([ACQUIRE, encode("PING"), encode("TG.USAGE", "api", "k"), encode("HELLO", "3"), b"*0\r\n"])
HEADERS = st.sampled_from([b"*", b"$", b"\r\n", b"*3\r\n", b"$3\r\n"])
PIECES = st.lists(st.one_of(VALID, st.binary(max_size=40), HEADERS), max_size=12)


async def send_cut(pieces, cuts):
    async with connected(policies=POLICIES) as (service, client):
        data = b"".join(pieces)
        bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for start, end in pairwise(bounds):
            client.writer.write(data[start:end])
            await asyncio.sleep(0)
        with suppress(OSError):  # the service has closed the connection
            client.writer.write_eof()
        await read_end(client)
        client.close()
        await until(lambda: not len(service.connections))
        assert await (await service.connect()).ask("TG.ACQUIRE", "api", "k")


@settings(max_examples=150, deadline=None)
@given(PIECES, st.lists(st.integers(0, 10**6), max_size=5))
def test_random_bytes_cut_anywhere_never_harm_the_service(pieces, cuts):
    asyncio.run(send_cut(pieces, cuts))
