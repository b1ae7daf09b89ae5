"""A client in a process of its own, to be killed: AsyncClient with and without leases, and cancelled calls.

python -m tests.soak.client URL JOURNAL SEED ROUND CALLS
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.soak.effects import Effect, actual_effects, expected_effects, label_of
from tests.soak.journal import ANSWERED, file_journal
from tests.soak.traffic import USUAL
from tidegate import RateLimitError
from tidegate.service.client._client import AsyncClient

if TYPE_CHECKING:
    import httpx

    from tests.soak.journal import Journal

TASKS: Final = 4
LEASE: Final = "2s"
NUMBER: Final = "soak-number"


class Recorder:
    """Records the requests of an AsyncClient, including those that it repeats by itself."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._held: dict[str, Effect] = {}

    def watch(self, client: AsyncClient) -> AsyncClient:
        """Record what this client sends."""
        client._http_client().event_hooks = {"request": [self._sent], "response": [self._answered]}  # noqa: SLF001 - the client shows nobody its repetitions
        return client

    async def _sent(self, request: httpx.Request) -> None:
        verb, body = request.url.path.rpartition("/")[2], json.loads(request.content)
        effects = expected_effects(verb, body, self._held)
        request.extensions[NUMBER] = self._journal.sent(label_of(verb, body), effects), verb, effects

    async def _answered(self, response: httpx.Response) -> None:
        await response.aread()
        number, verb, effects = response.request.extensions[NUMBER]
        answer = response.json()
        amounts = actual_effects(verb, effects, response.status_code, answer)
        # A repeated request counts as answered, even by a replay: the one whose answer was lost stays in doubt.
        self._journal.ended(number, ANSWERED, amounts)
        if verb in ("reserve", "lease") and response.status_code == 200 and answer["id"] is not None:
            self._held[answer["id"]] = Effect(effects[0].account, amounts[0] or 0)


class Traffic:
    """The tasks of this process."""

    def __init__(self, url: str, journal: Journal, draw: random.Random, round_number: int) -> None:
        self._journal = journal
        self._draw = draw
        self._round = round_number
        recorder = Recorder(journal)
        self._plain = recorder.watch(AsyncClient(url))
        self._leasing = recorder.watch(AsyncClient(url, lease=LEASE))

    async def run(self, calls: int) -> None:
        """Make this many calls, then return the unused permits."""
        async with self._plain, self._leasing, asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(self._several(calls // TASKS))

    async def _several(self, calls: int) -> None:
        for _ in range(calls):
            with suppress(RateLimitError):  # the service or the store is down, which is in the journal
                await self._draw.choices((self._leased, self._acquire, self._reserve, self._batch), (60, 20, 15, 5))[
                    0
                ]()

    async def _leased(self) -> None:
        """Take a permit, mostly from a lease, without asking."""
        sent, account = time.monotonic_ns(), ("leased", f"leased:{self._round}:{self._draw.randrange(2)}")
        if (await self._leasing.try_acquire(*account)).allowed:
            self._journal.used(account, 1, sent)
        await asyncio.sleep(0)  # a call from a lease gives nobody else a turn

    async def _acquire(self) -> None:
        timeout = self._draw.choice((0.0, 0.0, 0.1))
        await self._impatient(self._plain.acquire(*self._account(), self._draw.randint(1, 3), timeout))

    async def _reserve(self) -> None:
        cost = self._draw.randint(1, 4)
        held = await self._impatient(self._plain.reserve(*self._account(), cost))
        if held is None:
            return
        if self._draw.random() < 0.5:
            await self._impatient(self._plain.commit(held.id, self._draw.randint(0, cost)))
        else:
            await self._impatient(self._plain.cancel(held.id))

    async def _batch(self) -> None:
        await self._impatient(self._plain.batch([self._account() for _ in range(self._draw.randint(2, 6))]))

    def _account(self) -> tuple[str, str]:
        return self._draw.choice(USUAL), f"process:{self._round}:{self._draw.randrange(2)}"

    async def _impatient(self, call: Any) -> Any:
        """Cancel some calls before they are answered, as a timeout in a program does."""
        if self._draw.random() < 0.75:
            return await call
        with suppress(TimeoutError):
            return await asyncio.wait_for(call, self._draw.choice((0.001, 0.003, 0.01)))
        return None


def main() -> None:
    url, path, seed, round_number, calls = sys.argv[1:]
    draw = random.Random(f"{seed}/{round_number}/process")
    asyncio.run(run(url, Path(path), draw, int(round_number), int(calls)))


async def run(url: str, path: Path, draw: random.Random, round_number: int, calls: int) -> None:
    journal = file_journal(path)
    await Traffic(url, journal, draw, round_number).run(calls)
    path.with_suffix(".done").touch()


if __name__ == "__main__":
    main()
