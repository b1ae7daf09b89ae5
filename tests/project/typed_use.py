"""Checked by type checkers, never run: uses of the public interface, and mistakes that must be type errors.

A mistake carries an ignore; mypy and pyright report an ignore that is not needed.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

import httpx
import httpx2

from tidegate import AsyncLimiter, AsyncReservation, Decision, Limiter, Policy, Reservation, Usage, open_store
from tidegate.budget import TaskBudget
from tidegate.inbound import fastapi, flask, functions, starlette
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.outbound import Providers, request_options
from tidegate.outbound.aiohttp import RateLimitMiddleware as AiohttpMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.httpx2 import RateLimitTransport as Httpx2Transport
from tidegate.outbound.requests import RateLimitAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.swarm import AsyncSwarmLimiter


def limiters(limiter: Limiter) -> None:
    """Results have their types, and a wrong argument is an error."""
    assert_type(limiter.try_acquire("key"), Decision)
    assert_type(limiter.usage("key"), dict[str, Usage])
    assert_type(limiter.reserve("key"), Reservation)
    Limiter(["5/1m", "50/1d"], store=open_store("memory://"))
    Policy("api", "5/1m")
    Policy("api", ("5/1m", "50/1d"), mode="shadow")
    limiter.try_acquire("key", nonsense=1)  # type: ignore[call-arg]  # no such argument
    Limiter("5/1m", stores="memory://")  # type: ignore[call-arg]  # no such option
    Policy("api", "5/1m", mode="enforced")  # type: ignore[arg-type]  # no such mode


async def async_limiters(limiter: AsyncLimiter, swarm: AsyncSwarmLimiter) -> None:
    """A decorated coroutine function stays one."""
    assert_type(await limiter.try_acquire("key"), Decision)
    assert_type(await limiter.reserve("key"), AsyncReservation)

    @limiter.limited("key")
    async def fetch(number: int) -> str:
        return str(number)

    call: Callable[[int], Coroutine[Any, Any, str]] = fetch
    assert_type(await call(5), str)
    assert_type(await fetch(5), str)
    await fetch("five")  # type: ignore[arg-type]  # an integer is expected

    @swarm.limited("api")
    async def search() -> bytes:
        return b""

    tool: Callable[[], Coroutine[Any, Any, bytes]] = search
    assert_type(await tool(), bytes)

    @limiter.limited("key")  # type: ignore[arg-type]  # not a coroutine function
    def plain() -> None: ...


def decorated(limiter: Limiter) -> None:
    """A decorated function keeps its signature."""

    @limiter.limited(lambda user: user)
    def send(user: str) -> int:
        return len(user)

    assert_type(send("ann"), int)
    send(5)  # type: ignore[arg-type]  # a string is expected

    @functions.limit("5/1m")
    async def charge(amount: int) -> bool:
        return amount > 0

    kept: Callable[[int], Coroutine[Any, Any, bool]] = charge
    del kept


def routes() -> None:
    """An unknown option of a route limit is an error."""
    fastapi.limit("5/1m", scope="uploads")
    fastapi.limit("5/1m", nonsense=1)  # type: ignore[call-arg]  # no such option
    flask.limit("5/1m", nonsense=1)  # type: ignore[call-arg]  # no such option
    starlette.limit("5/1m", nonsense=1)  # type: ignore[call-arg]  # no such option
    functions.limit("5/1m", nonsense=1)  # type: ignore[call-arg]  # no such option


def middleware(app: RateLimitMiddleware) -> None:
    """An unknown option of a middleware, or one of the wrong type, is an error."""
    RateLimitMiddleware(app, admin=False, ipv6_prefix=56)
    RateLimitMiddleware(app, ipv6_prefx=56)  # type: ignore[call-arg]  # no such option
    RateLimitMiddleware(app, ipv6_prefix="56")  # type: ignore[arg-type]  # an integer is expected


def transports(providers: Providers) -> None:
    """An unknown option of a transport, or one of the wrong type, is an error."""
    httpx.Client(transport=RateLimitTransport(providers, "sqlite:///quota.db", timeout=5, bus="local://"))
    httpx2.Client(transport=Httpx2Transport(providers, transport=httpx2.HTTPTransport(http2=True)))
    httpx2.Client(transport=RateLimitTransport(providers))  # type: ignore[arg-type]  # a transport of httpx
    RateLimitTransport(providers, timeuot=5)  # type: ignore[call-arg]  # no such option
    RateLimitTransport(providers, store=5)  # type: ignore[arg-type]  # a URL or a Store is expected
    AsyncRateLimitTransport(providers, timeout="5s")  # type: ignore[arg-type]  # a number is expected
    RateLimitAdapter(providers, timeuot=5)  # type: ignore[call-arg]  # no such option
    AiohttpMiddleware(providers, timeuot=5)  # type: ignore[call-arg]  # no such option
    with request_options(priority=1, cost={"tokens": 800}):
        pass
    with request_options(prority=1):  # type: ignore[call-arg]  # no such option
        pass


def budgets() -> None:
    """An unknown setting of a budget is an error."""
    assert_type(TaskBudget(per_minute=20, per_day=500).health()["database"]["connected"], bool | None)
    TaskBudget(per_minit=20)  # type: ignore[call-arg]  # no such setting
