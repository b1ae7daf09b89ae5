"""HTTP/2: many requests over one connection, each counted."""

import asyncio

import h2.config
import h2.connection
import h2.events
import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport
from tidegate.testing import ManualClock


async def serve(reader, writer):
    """Answer every request of one connection, in clear text by prior knowledge."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    writer.write(connection.data_to_send())
    while data := await reader.read(65_536):
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                connection.send_headers(event.stream_id, [(":status", "200"), ("content-length", "2")])
                connection.send_data(event.stream_id, b"ok", end_stream=True)
        writer.write(connection.data_to_send())
        await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_http2_streams_are_counted_individually():
    connections = []

    async def connected(reader, writer):
        connections.append(asyncio.current_task())
        await serve(reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    clock = ManualClock(1_728_000_000)
    known = Providers.of({"domain": "127.0.0.1", "limit": 10, "period": "1m"})
    inner = httpx.AsyncHTTPTransport(http1=False, http2=True)
    transport = AsyncRateLimitTransport(known, transport=inner, clock=clock)
    async with httpx.AsyncClient(transport=transport, timeout=30) as client:
        await client.get(url)
        waiting = [asyncio.create_task(client.get(url)) for _ in range(24)]
        for _ in range(2):
            while transport.gate.metrics()["waiting"] + sum(task.done() for task in waiting) < 24:
                await asyncio.sleep(0.001)
                clock.advance(0)  # a sign of life, else it would move by itself on a busy machine
            clock.advance(60)
        answers = await asyncio.gather(*waiting)
        assert {(answer.http_version, answer.status_code) for answer in answers} == {("HTTP/2", 200)}
        assert len(connections) == 1
        assert clock.now() >= 1_728_000_120
    await asyncio.gather(*connections)
    server.close()
    await server.wait_closed()
