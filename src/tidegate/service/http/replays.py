"""Idempotency keys: the same question with the same key gets the same answer, and is decided once.

Bounded and forgetful: the oldest of too many go first, and each after its time. They belong to this process: a client
that repeats a request keeps its connection, or asks a service of one process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.service.http.problems import ProblemError, Reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.clock import Clock

MOST: Final = 10_000
LASTS: Final = 600 * SECOND
LONGEST: Final = 255  # characters of a key
HEADER: Final = (b"idempotency-replayed", b"true")


class _Kept(NamedTuple):
    question: tuple[str, bytes]
    answer: asyncio.Future[Reply]
    ends: int


class Replays:
    """Remembers answers by idempotency key."""

    def __init__(self, clock: Clock, most: int = MOST) -> None:
        """Remember at most so many."""
        self._clock = clock
        self._most = most
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def __len__(self) -> int:
        """Count what is remembered."""
        return len(self._kept)

    async def answer(self, key: bytes, question: tuple[str, bytes], ask: Callable[[], Awaitable[Reply]]) -> Reply:
        """Give the remembered answer, wait for the one that is under way, or ask."""
        if not key or len(key) > LONGEST:
            raise ProblemError("bad-request", f"an idempotency key has 1 to {LONGEST} characters")
        now = self._clock.steady()
        while self._kept and (next(iter(self._kept.values())).ends <= now or len(self._kept) >= self._most):
            self._kept.popitem(last=False)
        kept = self._kept.get(key)
        if kept is not None:
            if kept.question != question:
                raise ProblemError("idempotency-mismatch", "use a new idempotency key for a new request")
            reply = await asyncio.shield(kept.answer)
            return reply._replace(headers=(*reply.headers, HEADER))
        return await self._first(key, question, ask, now)

    async def _first(
        self, key: bytes, question: tuple[str, bytes], ask: Callable[[], Awaitable[Reply]], now: int
    ) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._kept[key] = _Kept(question, future, now + LASTS)
        try:
            reply = await ask()
        except BaseException as error:
            # Nothing was decided, as far as we know: the next one with this key asks again.
            self._kept.pop(key, None)
            if isinstance(error, Exception):
                future.set_exception(error)
                future.exception()  # nobody has to be waiting
            else:
                future.cancel()
            raise
        future.set_result(reply)
        return reply
