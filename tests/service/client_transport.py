"""An HTTP/1 connection without a socket, as its client sees it, and an httpx transport over such connections."""

import asyncio
import json

import httpx

HIGH_WATER = 64 * 1024


class ClientTransport(asyncio.Transport):
    """The connection as the client sees it: the bytes that were written, and whether it was closed."""

    def __init__(self, protocol):
        super().__init__({"peername": ("127.0.0.1", 123)})
        self.changed = asyncio.Event()  # set when something was written, and at the end
        self.protocol = protocol
        self.written = bytearray()
        self.unsent = None  # None: the client reads everything at once
        self.state = "open"
        self.eof = self.paused = False
        self._inbox = b""
        protocol.connection_made(self)

    # what the protocol does

    def write(self, data):
        assert not self.eof
        self.changed.set()
        if self.state == "open":
            self.written += data
            if self.unsent is not None:
                self.unsent += len(data)
                if self.unsent > HIGH_WATER:
                    self.protocol.pause_writing()

    def write_eof(self):
        self.eof = True

    def can_write_eof(self):
        return True

    def get_write_buffer_size(self):
        return self.unsent or 0

    def is_closing(self):
        return self.state != "open"

    def close(self):
        if self.state == "open":
            self.state = "closing"
            if not self.unsent:
                self._lose(None)

    def abort(self):
        if self.state != "closed":
            self._lose(None)

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False
        asyncio.get_running_loop().call_soon(self.send, b"")

    def _lose(self, error):
        self.state = "closed"
        self.changed.set()
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, error)

    # what the client does

    def send(self, data):
        self._inbox += data
        if self._inbox and not self.paused and self.state == "open":
            data, self._inbox = self._inbox, b""
            self.protocol.data_received(data)

    def take(self, count):
        """Read so many of the written bytes."""
        self.unsent = max(0, self.unsent - count)
        if self.unsent < HIGH_WATER // 4:
            self.protocol.resume_writing()
        if self.state == "closing" and not self.unsent:
            self._lose(None)

    def responses(self):
        """Return the responses so far: status, header fields, body."""
        found, data = [], bytes(self.written)
        while data:
            head, _, data = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:])
            length = int(fields.get("content-length", 0))
            found.append((int(lines[0].split()[1]), fields, data[:length]))
            data = data[length:]
        return found

    def statuses(self):
        return [status for status, _, _ in self.responses()]

    def problems(self):
        """Return the kinds of the problems among the responses."""
        found = []
        for status, fields, body in self.responses():
            if fields.get("content-type") == "application/problem+json":
                assert json.loads(body)["status"] == status
                found.append(json.loads(body)["type"].removeprefix("urn:tidegate:problem:"))
        return found


class SocketlessTransport(httpx.AsyncBaseTransport):
    """Sends each request of an httpx client over a connection of its own to a server in this process."""

    def __init__(self, server):
        self._server = server

    async def handle_async_request(self, request):
        body = await request.aread()
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%s: %s" % field for field in request.headers.raw]
        client = ClientTransport(self._server.connect())
        client.send(b"\r\n".join((*lines, b"", b"")) + body)
        try:
            while (response := read_response(request, bytes(client.written))) is None:
                if client.state != "open":
                    raise httpx.RemoteProtocolError("the server has closed the connection", request=request)
                client.changed.clear()
                await client.changed.wait()
        finally:
            client.abort()
        return response


def read_response(request, data):
    """Return the response in these bytes, once it is complete."""
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return None
    status, *lines = head.split(b"\r\n")
    fields = [tuple(line.split(b": ", 1)) for line in lines]
    length = 0 if request.method == "HEAD" else int(dict(fields)[b"content-length"])
    if len(body) < length:
        return None
    return httpx.Response(int(status.split()[1]), headers=fields, content=body[:length], request=request)
