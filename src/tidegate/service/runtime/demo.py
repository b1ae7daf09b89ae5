"""Demonstration traffic: so that a newcomer sees something true within a minute. `tidegate start FILE --demo`.

Everything it does, it does as users would: callers ask over HTTP, sources fetch from a server, a batch job keeps to its
budget, agents slow each other down. Of each, only what the settings name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tidegate.clock import Clock, SystemClock, TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.policy.model import PER_CALL_UNITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.policy import Policy
    from tidegate.service.client.client import AsyncClient
    from tidegate.service.runtime.components import Components

log = logging.getLogger("tidegate.service")

# How much of a limit's pace each kind of caller wants.
CALLERS: Final = {"calm": 0.3, "busy": 0.9, "greedy": 2.0, "partner:acme": 1.5}
MIN_PAUSE, MAX_PAUSE = 0.1, 4.0  # seconds between two calls of a caller
WAIT_TIMEOUT: Final = 3.0  # seconds that a patient caller waits
SOURCES: Final = {"weather-berlin": "20s", "weather-lisbon": "30s", "weather-oslo": "45s"}
AGENTS: Final = ("agent-1", "agent-2", "agent-3")
RESOURCE: Final = "model-api"
CAPACITY: Final = 20  # calls a second of each agent
REFUSAL_INTERVAL: Final = 25.0  # seconds between two 429s that an agent meets


class DemoTraffic:
    """All demonstration traffic of one service."""

    def __init__(self, parts: Components, *, clock: Clock | None = None, chance: random.Random | None = None) -> None:
        """Make traffic for the service with these parts."""
        self._parts = parts
        self._clock = clock or SystemClock()
        self._chance = chance or random.Random()  # noqa: S311 - who comes when is no secret

    async def run(self) -> None:
        """Go on until cancelled."""
        from tidegate.service.client.client import AsyncClient  # noqa: PLC0415 - needs httpx, which a service need not have

        settings, parts = self._parts.settings, self._parts
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            asking = AsyncClient(f"http://{settings.listen}", token=settings.decision_token)
            client = await stack.enter_async_context(asking)
            for name, entry in settings.policies.entries.items():
                for caller, pace in CALLERS.items():
                    group.create_task(self._calling(client, name, entry.policy, caller, pace))
            if parts.sources is not None:
                await self._fetching(stack)
            if parts.budget is not None:
                group.create_task(self._working())
            if settings.swarm:
                for agent in AGENTS:
                    group.create_task(self._flying(settings.swarm, agent))

    async def _pause(self, seconds: float) -> None:
        """Wait about so long."""
        until = self._clock.steady() + round(seconds * self._chance.uniform(0.5, 1.5) * SECOND)
        await self._clock.wait_async(TaskSignal(), until)

    # ---- callers -----------------------------------------------------------------------------------------------------

    async def _calling(self, client: AsyncClient, name: str, policy: Policy, caller: str, pace: float) -> NoReturn:
        between = seconds_between(policy, pace)
        ask = self._way(client, name, policy, caller)
        while True:
            await self._pause(between)
            try:
                await ask()
            except RateLimitError as error:  # such as: the file has changed, and the policy is gone
                log.debug("demonstration: %s", error)

    def _way(self, client: AsyncClient, name: str, policy: Policy, caller: str) -> Callable[[], Any]:
        """Choose how a policy is asked: by slots, by estimates, or plainly; the busy wait for their turn."""
        units = {limit.unit for limit in policy.limits}
        if any(limit.algorithm == "concurrency" for limit in policy.limits):
            return lambda: self._hold(client, name, caller)
        if units != {"requests"}:
            return lambda: self._estimate(client, name, policy, caller)
        wait = WAIT_TIMEOUT if caller == "busy" else 0.0
        return lambda: client.acquire(name, caller, wait=wait)

    async def _hold(self, client: AsyncClient, name: str, caller: str) -> None:
        if await client.acquire(name, caller):
            await self._pause(2.0)
            await client.release(name, caller)

    async def _estimate(self, client: AsyncClient, name: str, policy: Policy, caller: str) -> None:
        most = {limit.unit: limit.burst for limit in policy.limits}
        cost = {unit: 1 if unit == "requests" else max(1, burst // 12) for unit, burst in most.items()}
        held = await client.reserve(name, caller, cost, ttl=30.0)
        if held.id is not None:
            await self._pause(0.5)
            await client.commit(held.id, {unit: self._chance.randint(1, amount) for unit, amount in cost.items()})

    # ---- the other parts ---------------------------------------------------------------------------------------------

    async def _fetching(self, stack: AsyncExitStack) -> None:
        """Add sources that fetch from a small server of our own."""
        from tidegate.outbound.sources import read_source  # noqa: PLC0415 - needs httpx

        server = await asyncio.start_server(weather, "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        for name, interval in SOURCES.items():
            url = f"http://127.0.0.1:{port}/{name}"
            if self._parts.sources is not None:
                self._parts.sources.add(read_source({"name": name, "url": url, "interval": interval}))

    async def _working(self) -> NoReturn:
        """Be a job that does tasks in batches, as far as the budget goes."""
        while True:
            await asyncio.to_thread(self._batch, self._chance.randint(1, 4))
            await self._pause(3.0)

    def _batch(self, tasks: int) -> None:
        budget = self._parts.budget
        if budget is not None and (checked := budget.check_all_limits(tasks)).allowed:
            budget.record_completed_tasks(tasks, result=checked)

    async def _flying(self, bus: str, name: str) -> NoReturn:
        """Be an agent that now and then meets a 429."""
        from tidegate.swarm import AsyncSwarmLimiter  # noqa: PLC0415 - few services show a swarm

        async with AsyncSwarmLimiter(bus, name, recovery_interval=3.0) as agent:
            await agent.set_capacity(RESOURCE, CAPACITY, 1)
            refused = self._clock.steady() + round(self._chance.uniform(0.3, 3) * REFUSAL_INTERVAL * SECOND)
            while True:
                await agent.acquire(RESOURCE)
                await self._pause(0.2)
                await agent.release(RESOURCE, return_token=False)
                if self._clock.steady() > refused:
                    await agent.announce_reduced(RESOURCE, "429 Too Many Requests", retry_after=1.0)
                    refused += round(3 * REFUSAL_INTERVAL * SECOND)


async def weather(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"degrees": 18}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # whoever it was is gone
    finally:
        writer.close()


def seconds_between(policy: Policy, pace: float) -> float:
    """Tell how long a caller pauses who wants so much of what the limit with the shortest period gives."""
    counted = [limit for limit in policy.limits if limit.unit in PER_CALL_UNITS] or policy.limits
    limit = min(counted, key=lambda limit: limit.length)
    return min(MAX_PAUSE, max(MIN_PAUSE, limit.length / SECOND / limit.quota / pace))
