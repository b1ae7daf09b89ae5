"""Idempotency keys in one process: the same request with the same key is decided once and gets the same response.

The number, size and age of the remembered responses are bounded; the oldest are dropped first. Other processes on the
same store use `decisions.idempotency` to charge a request only once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.service._api.problems import HTTPReply, ProblemError
from tidegate.service._decisions.idempotency import MISMATCH_ADVICE, REMEMBER_FOR, IdempotencyMismatchError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate._runtime.clock import Clock

MAX_REPLIES: Final = 10_000
MAX_BYTES: Final = 64 * 2**20  # bytes of all responses
MAX_IDEMPOTENCY_KEY_LENGTH: Final = 255  # characters of a key
REPLAYED_HEADER: Final = (b"idempotency-replayed", b"true")


class _RememberedReply(NamedTuple):
    request: bytes  # its digest
    reply: asyncio.Future[HTTPReply]
    ends_at: int


class IdempotentReplies:
    """Remembers responses by idempotency key."""

    def __init__(self, clock: Clock, max_replies: int = MAX_REPLIES, max_bytes: int = MAX_BYTES) -> None:
        """Remember at most `max_replies` responses, of at most `max_bytes` bytes in all."""
        self._clock = clock
        self._max_replies = max_replies
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, _RememberedReply] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered responses."""
        return len(self._entries)

    async def reply(self, key: bytes, request: tuple[str, bytes], run: Callable[[], Awaitable[HTTPReply]]) -> HTTPReply:
        """Return the remembered response, wait for the one in progress, or run the request.

        If it is cancelled while it runs the request, nothing is remembered: the next request with this key runs again.
        """
        if not key or len(key) > MAX_IDEMPOTENCY_KEY_LENGTH:
            raise ProblemError("bad-request", f"Idempotency-Key: expected 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} characters")
        now = self._clock.steady()
        while self._entries and (next(iter(self._entries.values())).ends_at <= now or self._full):
            self._forget(next(iter(self._entries)))
        digest = blake2b(request[1], person=request[0].encode()).digest()
        while (entry := self._entries.get(key)) is not None:
            if entry.request != digest:
                raise IdempotencyMismatchError(MISMATCH_ADVICE)
            await asyncio.wait((entry.reply,))
            if not entry.reply.cancelled():
                return mark_replayed(entry.reply.result())
            # The first client disconnected before there was a response: one of the repeated requests runs instead.
        return await self._run(key, digest, run, now)

    @property
    def _full(self) -> bool:
        return len(self._entries) >= self._max_replies or self._bytes > self._max_bytes

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None and entry.reply.done() and not entry.reply.cancelled() and not entry.reply.exception():
            self._bytes -= len(entry.reply.result().body)

    async def _run(self, key: bytes, digest: bytes, run: Callable[[], Awaitable[HTTPReply]], now: int) -> HTTPReply:
        future: asyncio.Future[HTTPReply] = asyncio.get_running_loop().create_future()
        entry = self._entries[key] = _RememberedReply(digest, future, now + REMEMBER_FOR)
        try:
            reply = await run()
        except BaseException as error:
            # As far as this process knows, nothing was decided: the next request with this key runs again.
            if self._entries.get(key) is entry:
                self._forget(key)
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # retrieved, in case no other request waits for it
            else:
                future.cancel()
            raise
        future.set_result(reply)
        if self._entries.get(key) is entry:
            self._bytes += len(reply.body)
        return reply


def mark_replayed(reply: HTTPReply) -> HTTPReply:
    """Mark a response as a replay of an earlier one."""
    return reply if REPLAYED_HEADER in reply.headers else reply._replace(headers=(*reply.headers, REPLAYED_HEADER))
