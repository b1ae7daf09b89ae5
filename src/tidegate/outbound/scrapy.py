"""Scrapy: a downloader middleware that obeys the quotas of providers, and `Retry-After`.

    DOWNLOADER_MIDDLEWARES = {"tidegate.outbound.scrapy.RateLimitMiddleware": 900}
    TIDEGATE_PROVIDER_DIRS = ["providers"]
    TIDEGATE_STORE = "sqlite:///quota.db"

A request waits for its permit before it is downloaded, in all spiders and processes that share the store. Its response
settles the permit; a 429 or 503 pauses the provider for as long as its `Retry-After` says. Requests to hosts without a
provider file are not limited. Scrapy must use the asyncio reactor, as it does by default.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self

from tidegate.errors import ConfigError, Denied
from tidegate.outbound._providers.registry import Providers
from tidegate.outbound._quota.exchange import CURRENT_OPTIONS, OutboundRequest, ProviderResponse
from tidegate.outbound._quota.gate import AsyncGate

try:
    from scrapy import signals
    from scrapy.exceptions import IgnoreRequest
except ImportError:  # pragma: no cover - tests/recipes has it
    raise ConfigError("needs Scrapy: pip install scrapy") from None

if TYPE_CHECKING:
    from tidegate.outbound._quota.exchange import SendResult

__all__ = ["RateLimitMiddleware"]

META: Final = "tidegate"


class _Exchange:
    """One request that waits for its permit, or has it: the gate sends it by waiting for its response."""

    def __init__(self, gate: AsyncGate, request: Any) -> None:  # noqa: ANN401 - types of Scrapy
        loop = asyncio.get_running_loop()
        self._permit: asyncio.Future[None] = loop.create_future()
        self._response: asyncio.Future[ProviderResponse] = loop.create_future()
        call = OutboundRequest(
            request.method,
            request.url,
            lambda name: _header(request, name),
            lambda: request.body,
            replays=False,  # Scrapy does that
            unreached=_unreached,
        )
        self._task: asyncio.Task[SendResult[Any]] = asyncio.create_task(gate.run(gate.send_flow(call, self._send)))
        self._task.add_done_callback(self._ended)

    async def _send(self, *_: object) -> ProviderResponse:
        self._permit.set_result(None)
        return await self._response

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if not self._permit.done():
            self._permit.set_exception(error or RuntimeError("the request was not sent"))

    async def wait(self) -> None:
        """Wait for the permit."""
        try:
            await self._permit
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def finish(self, response: Any) -> None:  # noqa: ANN401 - as above
        """Settle the permit."""
        if not self._response.done():
            headers = response.headers.to_tuple_list()
            self._response.set_result(ProviderResponse(response.status, headers, lambda: None, response))
            await self._task

    async def fail(self, error: BaseException) -> None:
        """Settle the permit of a request without a response: it may have arrived."""
        if not self._response.done():
            self._response.set_exception(error)
            await asyncio.gather(self._task, return_exceptions=True)


class RateLimitMiddleware:
    """Downloads requests within the quotas of their providers."""

    def __init__(self, gate: AsyncGate, timeout: float | None = None) -> None:
        """Use a gate; `timeout` bounds the wait for a permit (None: it waits as long as it takes)."""
        self._gate = gate
        self._timeout = timeout
        self._waiting: set[_Exchange] = set()  # Scrapy keeps no reference to a request that waits: it would be freed

    @classmethod
    def from_crawler(cls, crawler: Any) -> Self:  # noqa: ANN401 - as above
        """Read the settings TIDEGATE_PROVIDERS, TIDEGATE_PROVIDER_DIRS, TIDEGATE_STORE and TIDEGATE_TIMEOUT."""
        settings = crawler.settings
        providers = Providers.load(
            files=settings.getlist("TIDEGATE_PROVIDERS"), directories=settings.getlist("TIDEGATE_PROVIDER_DIRS")
        )
        gate = AsyncGate(providers, settings.get("TIDEGATE_STORE", "memory://"))
        timeout = settings.getfloat("TIDEGATE_TIMEOUT") if settings.get("TIDEGATE_TIMEOUT") is not None else None
        made = cls(gate, timeout)
        crawler.signals.connect(made.close, signals.spider_closed)
        return made

    async def process_request(self, request: Any) -> None:  # noqa: ANN401 - as above
        """Wait for the permit of a request; without one in time, the request is ignored."""
        CURRENT_OPTIONS.set({**(CURRENT_OPTIONS.get() or {}), "timeout": self._timeout})
        exchange = _Exchange(self._gate, request)
        self._waiting.add(exchange)
        try:
            await exchange.wait()
        except Denied as denied:
            raise IgnoreRequest(str(denied)) from denied
        finally:
            self._waiting.discard(exchange)
        request.meta[META] = exchange

    async def process_response(self, request: Any, response: Any) -> Any:  # noqa: ANN401 - as above
        """Settle the permit, and learn from the response."""
        exchange = request.meta.pop(META, None)
        if exchange is not None:
            await exchange.finish(response)
        return response

    async def process_exception(self, request: Any, exception: BaseException) -> None:  # noqa: ANN401 - as above
        """Settle the permit of a request without a response."""
        exchange = request.meta.pop(META, None)
        if exchange is not None:
            await exchange.fail(exception)

    async def close(self) -> None:
        """Close the store."""
        await self._gate.close()


def _header(request: Any, name: str) -> str | None:  # noqa: ANN401 - as above
    found = request.headers.get(name)
    return None if found is None else found.decode("latin-1")


def _unreached(error: BaseException) -> bool:
    return isinstance(error, ConnectionRefusedError)
