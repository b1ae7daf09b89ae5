"""Limits around tool calls: `with limiter.limited("search"):` and `@limiter.limited("search")`; detects a 429."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, ParamSpec, Self, TypeVar

from tidegate._limiter.limited import LimitsCalls, LimitsCoroutines
from tidegate._runtime.entered import EnteredBlocks
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.headers import parse_retry_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core._decision import Decision
    from tidegate.swarm._async_limiters import _AsyncLimiter
    from tidegate.swarm._sync_limiters import _Limiter

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="_Limiter | _AsyncLimiter")
TOO_MANY_REQUESTS: Final = 429
SERVICE_UNAVAILABLE: Final = 503


class ProviderRefusal(NamedTuple):
    """The refusal of a server, with status 429 or 503."""

    reason: str
    retry_after: float | None


def refusal_of(error: BaseException | None, now: float) -> ProviderRefusal | None:
    """Return the refusal that an exception carries: a 429, or a 503 with Retry-After; None if it is another error.

    Exceptions of HTTP clients have a response with status and headers, those of AI clients a status attribute.
    """
    response = getattr(error, "response", None)
    status = _first(error, response, ("status_code", "status", "code"))
    headers = _first(error, response, ("headers",))
    try:
        value = None if headers is None else headers.get("retry-after", headers.get("Retry-After"))
    except AttributeError:
        value = None
    wait = None if value is None else parse_retry_after(str(value), now)
    if status == TOO_MANY_REQUESTS or (status == SERVICE_UNAVAILABLE and wait is not None):
        return ProviderRefusal(f"received {status} response", wait)
    return None


def _first(error: object, response: object, names: tuple[str, ...]) -> Any:  # noqa: ANN401 - any type a client uses
    for source in (response, error):
        for name in names:
            value = getattr(source, name, None)
            if value is not None:
                return value
    return None


class _LimitedCall(Generic[S]):
    """The resource, cost and options of limited calls."""

    def __init__(
        self,
        limiter: S,
        resource: str | Callable[..., str],
        timeout: float | None,
        cost: int | Callable[..., int],
        *,
        return_token: bool,
        announce: bool,
    ) -> None:
        """Use `limited` to create one."""
        self._limiter = limiter
        self._resource = resource
        self._timeout = timeout
        self._cost = cost
        self._return_token = return_token
        self._announce = announce
        self._began: EnteredBlocks[float] = EnteredBlocks()  # when each block began, in seconds of steady time

    def _for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Compute resource and cost from the arguments of a call."""
        resource = self._resource(*args, **kwargs) if callable(self._resource) else self._resource
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        return type(self)(
            self._limiter, resource, self._timeout, cost, return_token=self._return_token, announce=self._announce
        )

    def _resource_and_cost(self) -> tuple[str, int]:
        if callable(self._resource) or callable(self._cost):
            raise ConfigError("a callable resource or cost needs call arguments: use limited() as a decorator")
        return self._resource, self._cost

    def _refusal(self, error: BaseException | None) -> ProviderRefusal | None:
        return refusal_of(error, self._limiter.clock.ns() / 1e9) if self._announce and error is not None else None


class LimitedCall(_LimitedCall["_Limiter"], LimitsCalls):
    """Limits a block, or each call of the function it decorates."""

    _for_coroutines = "use an async limiter"
    _for_generators = "use a 'with' block inside it"

    def __enter__(self) -> Decision:
        """Wait for a permit."""
        resource, cost = self._resource_and_cost()
        decision = self._limiter.acquire(resource, cost=cost, timeout=self._timeout)
        self._began.add(self._limiter.clock.steady() / SECOND)
        return decision

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the call; announce a 429."""
        began = self._began.remove() or 0.0
        resource, cost = self._resource_and_cost()
        self._limiter.release(resource, cost=cost, return_token=self._return_token)
        refusal = self._refusal(error)
        if refusal is not None:
            self._limiter.announce_reduced(resource, refusal.reason, retry_after=refusal.retry_after, began=began)


class AsyncLimitedCall(_LimitedCall["_AsyncLimiter"], LimitsCoroutines):
    """Limits an `async with` block, or each call of the coroutine function it decorates."""

    _for_functions = "use a MemoryLimiter or SwarmLimiter"

    async def __aenter__(self) -> Decision:
        """Wait for a permit."""
        resource, cost = self._resource_and_cost()
        decision = await self._limiter.acquire(resource, cost=cost, timeout=self._timeout)
        self._began.add(self._limiter.clock.steady() / SECOND)
        return decision

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the call; announce a 429."""
        began = self._began.remove() or 0.0
        resource, cost = self._resource_and_cost()
        await self._limiter.release(resource, cost=cost, return_token=self._return_token)
        refusal = self._refusal(error)
        if refusal is not None:
            await self._limiter.announce_reduced(resource, refusal.reason, retry_after=refusal.retry_after, began=began)
