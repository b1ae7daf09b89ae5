"""An HTTP/1.1 client that can disconnect and still read a response that was on its way.

It closes its sending side only, which the service sees as a client that is gone, and reads on until the service has
closed the connection. So it knows whether the request was answered, which no ordinary client does.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tests.soak.effects import WAITING, Effect, actual_effects, expected_effects, label_of
from tests.soak.journal import ANSWERED, BROKEN, GONE, HUNG_UP

if TYPE_CHECKING:
    from tests.soak.journal import Journal

MAX_SECONDS: Final = 30.0  # for any answer; the service has to answer or to close the connection before
LOST: Final = (OSError, asyncio.IncompleteReadError)


class Reply(NamedTuple):
    """An answer of the service."""

    status: int
    headers: dict[str, str]
    body: Any


class Connection:
    """One connection at a time, opened again when it has ended. Everything it asks is recorded in the journal."""

    def __init__(self, port: int, journal: Journal, held: dict[str, Effect]) -> None:
        self.held = held  # the charges of reservations, by their id
        self.opened = 0  # how many connections so far
        self._port = port
        self._journal = journal
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(
        self, verb: str, body: dict[str, Any], *, give_up: float | None = None, key: str | None = None
    ) -> Reply | None:
        """Ask; hang up after `give_up` seconds without an answer. None: there was no answer."""
        fields = "" if key is None else f"Idempotency-Key: {key}\r\n"
        content = json.dumps(body).encode()
        fields += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        message = head("POST", f"/v1/{verb}", fields) + content
        label = label_of(verb, body)
        reply = await self._recorded(label, expected_effects(verb, body, self.held), message, give_up, key)
        if verb == "reserve" and reply is not None and reply.status == 200 and reply.body["id"] is not None:
            self.held[reply.body["id"]] = Effect((body["policy"], body["key"]), body.get("cost", 1))
        return reply

    async def check(self, policy: str, key: str, cost: int, *, give_up: float | None = None) -> Reply | None:
        """Ask as a proxy does, which is told the decision by the status."""
        message = head("GET", f"/v1/check?policy={policy}&key={key}&cost={cost}")
        return await self._recorded("check", [Effect((policy, key), cost)], message, give_up)

    async def get(self, path: str) -> Reply | None:
        """Read something that changes nothing."""
        return await self._recorded("get", [], head("GET", path), None)

    async def _recorded(
        self, verb: str, effects: list[Effect], message: bytes, give_up: float | None, key: str | None = None
    ) -> Reply | None:
        """Send a request and record how it ended."""
        try:
            reader, writer = await self._open()
        except OSError:
            return None  # nobody listens: nothing was sent
        number = self._journal.sent(verb, effects)
        try:
            async with asyncio.timeout(MAX_SECONDS):
                reply, how = await exchange(reader, writer, message, give_up)
        except TimeoutError:
            self._journal.ended(number, BROKEN)
            self.close()
            raise
        if reply is None:
            # A question with an idempotency key goes on without its client, which may come back for the answer.
            self._journal.ended(number, GONE if key is not None and how == HUNG_UP else how)
            self.close()
            return None
        self._journal.ended(number, ANSWERED, effects_of_reply(verb, effects, reply))
        if how == HUNG_UP or reply.headers.get("connection") == "close":
            self.close()
        return reply

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self.opened += 1
        return self._reader, self._writer

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes, give_up: float | None
) -> tuple[Reply | None, str]:
    """Send a request, hang up if it takes longer than `give_up`; give the answer, if any, and how it ended."""
    reading = asyncio.create_task(read_reply(reader))
    how = BROKEN
    try:
        writer.write(message)
        await asyncio.wait((reading,), timeout=give_up)
        if not reading.done() and writer.can_write_eof():
            how = HUNG_UP
            writer.write_eof()
        return await reading, how
    except LOST:
        return None, how
    finally:
        reading.cancel()


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """Read one answer."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    is_json = headers.get("content-type", "").endswith("json")
    return Reply(int(status.split()[1]), headers, json.loads(content) if is_json and content else None)


def effects_of_reply(verb: str, effects: list[Effect], reply: Reply) -> list[int | None]:
    """Read what an answer changed; one that is repeated for its idempotency key has changed nothing more."""
    if reply.headers.get("idempotency-replayed") == "true":
        return [0] * len(effects)
    if verb == "check" and reply.status == 200:
        return [effect.amount for effect in effects]
    return actual_effects(verb.removesuffix(WAITING), effects, reply.status, reply.body)


def head(method: str, path: str, fields: str = "") -> bytes:
    """Write the head of a request."""
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}\r\n".encode()
