"""Traffic for `tidegate start FILE --demo`, so that the dashboard shows real data within a minute.

The traffic uses the same interfaces as users do: callers send HTTP requests, sources fetch from a server, a batch job
keeps to its budget, agents announce reductions to each other. Only components in the settings get traffic.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tidegate._policy.model import PER_CALL_UNITS
from tidegate._runtime.clock import Clock, SystemClock, TaskSignal
from tidegate.core._bounds import SECOND
from tidegate.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Policy
    from tidegate.egress._gateway import EgressGateway
    from tidegate.service._runtime.components import Components
    from tidegate.service.client._client import AsyncClient

log: logging.Logger = logging.getLogger("tidegate.service")

# The rate of each caller, as a multiple of the limit.
CALLERS: Final = {"calm": 0.3, "busy": 0.9, "greedy": 2.0, "partner:acme": 1.5}
MIN_PAUSE, MAX_PAUSE = 0.1, 4.0  # seconds between two calls of one caller
WAIT_TIMEOUT: Final = 3.0  # seconds that the `busy` caller waits for permits
SOURCES: Final = {"weather-berlin": "20s", "weather-lisbon": "30s", "weather-oslo": "45s"}
AGENTS: Final = ("agent-1", "agent-2", "agent-3")
RESOURCE: Final = "model-api"
CAPACITY: Final = 20  # calls per second of each agent
REFUSAL_INTERVAL: Final = 25.0  # seconds between two 429 responses to an agent


class DemoTraffic:
    """All demo traffic of one service."""

    def __init__(self, components: Components, *, clock: Clock | None = None, rng: random.Random | None = None) -> None:
        """Generate traffic for the service with these components."""
        self._components = components
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()  # noqa: S311 - not used for secrets

    async def run(self) -> None:
        """Generate traffic until cancelled."""
        from tidegate.service.client._client import AsyncClient  # noqa: PLC0415 - needs httpx, which is optional for a service

        settings, components = self._components.settings, self._components
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            client = AsyncClient(f"http://{settings.listen}", token=settings.decision_token)
            await stack.enter_async_context(client)
            for name, entry in settings.policies.entries.items():
                for caller, rate in CALLERS.items():
                    group.create_task(self._run_caller(client, name, entry.policy, caller, rate))
            if components.sources is not None:
                await self._add_sources(stack)
            if components.egress is not None:
                await self._start_egress(group, stack, components.egress)
            if components.budget is not None:
                group.create_task(self._run_job())
            if settings.swarm:
                for agent in AGENTS:
                    group.create_task(self._run_agent(settings.swarm, agent))

    async def _pause(self, seconds: float) -> None:
        """Wait for 0.5 to 1.5 times this long."""
        until = self._clock.steady() + round(seconds * self._rng.uniform(0.5, 1.5) * SECOND)
        await self._clock.wait_async(TaskSignal(), until)

    # ---- callers -----------------------------------------------------------------------------------------------------

    async def _run_caller(self, client: AsyncClient, name: str, policy: Policy, caller: str, rate: float) -> NoReturn:
        interval = call_interval(policy, rate)
        call = self._choose_call(client, name, policy, caller)
        while True:
            await self._pause(interval)
            try:
                await call()
            except RateLimitError as error:  # for example, a reload removed the policy
                log.debug("demo: %s", error)

    def _choose_call(self, client: AsyncClient, name: str, policy: Policy, caller: str) -> Callable[[], Any]:
        """Choose the kind of call for a policy: acquire and release, reserve and commit, or acquire alone."""
        units = {limit.unit for limit in policy.limits}
        if any(limit.rules.holds_slots for limit in policy.limits):
            return lambda: self._acquire_and_release(client, name, caller)
        if units != {"requests"}:
            return lambda: self._reserve_and_commit(client, name, policy, caller)
        if caller == "busy":
            return lambda: client.acquire(name, caller, timeout=WAIT_TIMEOUT)
        return lambda: client.try_acquire(name, caller)

    async def _acquire_and_release(self, client: AsyncClient, name: str, caller: str) -> None:
        if await client.try_acquire(name, caller):
            await self._pause(2.0)
            await client.release(name, caller)

    async def _reserve_and_commit(self, client: AsyncClient, name: str, policy: Policy, caller: str) -> None:
        bursts = {limit.unit: limit.burst for limit in policy.limits}
        cost = {unit: 1 if unit == "requests" else max(1, burst // 12) for unit, burst in bursts.items()}
        reservation = await client.reserve(name, caller, cost, ttl=30.0)
        await self._pause(0.5)
        await reservation.commit({unit: self._rng.randint(1, amount) for unit, amount in cost.items()})

    # ---- the other components ----------------------------------------------------------------------------------------

    async def _add_sources(self, stack: AsyncExitStack) -> None:
        """Add sources, and start the server from which they fetch."""
        from tidegate.outbound.sources import read_source  # noqa: PLC0415 - needs httpx

        server = await asyncio.start_server(respond_with_weather, "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        for name, interval in SOURCES.items():
            url = f"http://127.0.0.1:{port}/{name}"
            if self._components.sources is not None:
                self._components.sources.add(read_source({"name": name, "url": url, "interval": interval}))

    async def _start_egress(self, group: asyncio.TaskGroup, stack: AsyncExitStack, gateway: EgressGateway) -> None:
        """Start the provider and the callers of the egress gateway, if the file has the provider of the demo."""
        from tidegate.service._runtime import demo_egress  # noqa: PLC0415 - needs aiohttp

        if not any(provider.name == demo_egress.PROVIDER for provider in gateway.gate.providers):
            return
        await demo_egress.start_provider(gateway, stack)
        url = f"http://{self._components.settings.egress}"
        for caller, rate in demo_egress.CALLS.items():
            group.create_task(demo_egress.run_caller(url, caller, rate, self._pause, self._rng))

    async def _run_job(self) -> NoReturn:
        """Run a job that does tasks in batches, as far as its budget allows."""
        while True:
            await asyncio.to_thread(self._run_batch, self._rng.randint(1, 4))
            await self._pause(3.0)

    def _run_batch(self, tasks: int) -> None:
        budget = self._components.budget
        if budget is not None and (result := budget.check_all_limits(tasks)).allowed:
            budget.record_completed_tasks(tasks, result=result)

    async def _run_agent(self, bus: str, name: str) -> NoReturn:
        """Run an agent that gets a 429 response now and then."""
        from tidegate.swarm import AsyncSwarmLimiter  # noqa: PLC0415 - few services show a swarm

        async with AsyncSwarmLimiter(bus, agent_id=name, recovery_interval=3.0) as agent:
            await agent.set_capacity(RESOURCE, CAPACITY, 1)
            next_refusal = self._clock.steady() + round(self._rng.uniform(0.3, 3) * REFUSAL_INTERVAL * SECOND)
            while True:
                await agent.acquire(RESOURCE)
                await self._pause(0.2)
                await agent.release(RESOURCE, return_token=False)
                if self._clock.steady() > next_refusal:
                    await agent.announce_reduced(RESOURCE, "429 Too Many Requests", retry_after=1.0)
                    next_refusal += round(3 * REFUSAL_INTERVAL * SECOND)


async def respond_with_weather(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one HTTP request of a source."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"degrees": 18}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        pass  # the client disconnected
    finally:
        writer.close()


def call_interval(policy: Policy, rate: float) -> float:
    """Return the seconds between two calls, for this multiple of the limit with the shortest period."""
    per_call = [limit for limit in policy.limits if limit.unit in PER_CALL_UNITS] or policy.limits
    limit = min(per_call, key=lambda limit: limit.length)
    return min(MAX_PAUSE, max(MIN_PAUSE, limit.length / SECOND / limit.quota / rate))
