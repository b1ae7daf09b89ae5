"""How TLS connections are accepted: one at a time, and in spite of clients that disconnect at once."""

import asyncio
import socket
import ssl

from tests.service.resp.harness import InProcessResp, RespClient

MAX_CONNECTIONS = 4


class CountingListener(socket.socket):
    """Records how many connections the service counted each time it accepted a further one."""

    def __init__(self, service, errors=()):
        made = socket.create_server(("127.0.0.1", 0))
        super().__init__(fileno=made.detach())
        self.service, self.errors, self.counted = service, list(errors), []

    def accept(self):
        accepted = super().accept()
        self.counted.append(len(self.service.connections))
        if self.errors:
            accepted[0].close()
            raise self.errors.pop()
        return accepted


def tls_service(certificate, **more):
    files = {"resp_tls_cert": str(certificate / "cert.pem"), "resp_tls_key": str(certificate / "key.pem")}
    return InProcessResp(policies={"api": "5/1h"}, **files, **more)


async def connect(certificate, port):
    context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    async with asyncio.timeout(20):
        return RespClient(*await asyncio.open_connection("127.0.0.1", port, ssl=context))


async def test_each_connection_is_counted_before_the_next_one_is_accepted(certificate):
    """asyncio accepts connections that are already there without a turn of the event loop."""
    service = tls_service(certificate, max_connections=MAX_CONNECTIONS)
    listener = CountingListener(service)
    callers = [socket.create_connection(listener.getsockname(), 20) for _ in range(3 * MAX_CONNECTIONS)]
    await service.resp.start(listener)
    async with asyncio.timeout(20):
        while len(listener.counted) < len(callers):
            await asyncio.sleep(0)
    assert listener.counted == [*range(MAX_CONNECTIONS), *[MAX_CONNECTIONS] * (2 * MAX_CONNECTIONS)]
    for caller in callers:
        caller.close()
    await service.__aexit__()


async def test_a_client_that_disconnects_before_it_is_accepted_delays_no_other(certificate, caplog):
    service = tls_service(certificate)
    listener = CountingListener(service, [ConnectionAbortedError()])
    await service.resp.start(listener)
    with socket.create_connection(listener.getsockname(), 20):
        client = await connect(certificate, listener.getsockname()[1])
        assert await client.ask("PING") == "PONG"
        client.close()
    assert not listener.errors
    assert "cannot accept" not in caplog.text  # after that, the service would pause
    await service.__aexit__()
