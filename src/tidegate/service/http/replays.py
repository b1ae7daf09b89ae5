"""Idempotency keys: the same question with the same key gets the same answer, and is decided once.

Bounded and forgetful: the oldest of too many or too large answers go first, and each after its time. They belong to
this process; that other processes on the same store charge nothing twice is up to `service.idempotency`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.service.decisions.idempotency import MISMATCH_ADVICE, REMEMBER_FOR, IdempotencyMismatchError
from tidegate.service.http.problems import HTTPReply, ProblemError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.clock import Clock

MAX_ANSWERS: Final = 10_000
MAX_BYTES: Final = 64 * 2**20  # bytes of all answers
MAX_IDEMPOTENCY_KEY_LENGTH: Final = 255  # characters of a key
REPLAYED_HEADER: Final = (b"idempotency-replayed", b"true")


class _RememberedReply(NamedTuple):
    question: bytes  # its digest
    answer: asyncio.Future[HTTPReply]
    ends: int


class IdempotentReplies:
    """Remembers answers by idempotency key."""

    def __init__(self, clock: Clock, most: int = MAX_ANSWERS, largest: int = MAX_BYTES) -> None:
        """Remember at most so many, and answers of so many bytes."""
        self._clock = clock
        self._most = most
        self._largest = largest
        self._bytes = 0
        self._kept: OrderedDict[bytes, _RememberedReply] = OrderedDict()

    def __len__(self) -> int:
        """Count what is remembered."""
        return len(self._kept)

    async def answer(
        self, key: bytes, question: tuple[str, bytes], ask: Callable[[], Awaitable[HTTPReply]]
    ) -> HTTPReply:
        """Give the remembered answer, wait for the one that is under way, or ask.

        Cancelled while it asks, it leaves nothing behind: the next one with this key asks again.
        """
        if not key or len(key) > MAX_IDEMPOTENCY_KEY_LENGTH:
            raise ProblemError("bad-request", f"an idempotency key has 1 to {MAX_IDEMPOTENCY_KEY_LENGTH} characters")
        now = self._clock.steady()
        while self._kept and (next(iter(self._kept.values())).ends <= now or self._full):
            self._forget(next(iter(self._kept)))
        digest = blake2b(question[1], person=question[0].encode()).digest()
        while (kept := self._kept.get(key)) is not None:
            if kept.question != digest:
                raise IdempotencyMismatchError(MISMATCH_ADVICE)
            await asyncio.wait((kept.answer,))
            if not kept.answer.cancelled():
                return replayed(kept.answer.result())
            # Whoever asked has hung up before there was an answer: one of those who asked again takes its place.
        return await self._first(key, digest, ask, now)

    @property
    def _full(self) -> bool:
        return len(self._kept) >= self._most or self._bytes > self._largest

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None and kept.answer.done() and not kept.answer.cancelled() and not kept.answer.exception():
            self._bytes -= len(kept.answer.result().body)

    async def _first(self, key: bytes, digest: bytes, ask: Callable[[], Awaitable[HTTPReply]], now: int) -> HTTPReply:
        future: asyncio.Future[HTTPReply] = asyncio.get_running_loop().create_future()
        mine = self._kept[key] = _RememberedReply(digest, future, now + REMEMBER_FOR)
        try:
            reply = await ask()
        except BaseException as error:
            # Nothing was decided, as far as we know: the next one with this key asks again.
            if self._kept.get(key) is mine:
                self._forget(key)
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # nobody has to be waiting
            else:
                future.cancel()
            raise
        future.set_result(reply)
        if self._kept.get(key) is mine:
            self._bytes += len(reply.body)
        return reply


def replayed(reply: HTTPReply) -> HTTPReply:
    """Mark an answer as one that was given before."""
    return reply if REPLAYED_HEADER in reply.headers else reply._replace(headers=(*reply.headers, REPLAYED_HEADER))
