"""Limits on plain functions: `@limit("5/1m", key=lambda user, …: user.id)`; a call over the limit raises Denied."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from tidegate.errors import Denied
from tidegate.inbound.limiting.route_limit import F, read_exact_limits, route_name
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.clock import Clock
    from tidegate.core.decision import Decision
    from tidegate.inbound.limiting.route_limit import Limits
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store

__all__ = ["limit"]


class limit:  # noqa: N801 - used as a decorator
    """Limits the functions that it decorates. It denies and never waits; `Limiter.limited` waits."""

    def __init__(
        self,
        limits: Limits,
        *,
        key: Key | Callable[..., Key] = "all",
        cost: Cost | Callable[..., Cost] = 1,
        scope: str | None = None,
        store: str | Store = "memory://",
        clock: Clock | None = None,
    ) -> None:
        """Take a string such as "5/1m", a Limit, or several; `key` and `cost` may be functions of the arguments."""
        self._limits = read_exact_limits(limits)
        self._key = key
        self._cost = cost
        self._scope = scope
        self._store: str | Store = store
        self._clock = clock

    def __call__(self, function: F) -> F:
        """Decorate a function, sync or async."""
        name = self._scope or route_name(function)
        policy = Policy(name, self._limits)
        if inspect.iscoroutinefunction(function):
            tasks = AsyncLimiter(policy, store=self._store, clock=self._clock)
            self._store = tasks.store  # shared by all functions that this instance decorates

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
                check(name, await tasks.try_acquire(*self._asked(args, kwargs)))
                return await function(*args, **kwargs)

        else:
            threads = Limiter(policy, store=self._store, clock=self._clock)
            self._store = threads.store

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
                check(name, threads.try_acquire(*self._asked(args, kwargs)))
                return function(*args, **kwargs)

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, Cost]:
        key = self._key(*args, **kwargs) if callable(self._key) else self._key
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        return key, cost


def check(name: str, decision: Decision) -> None:
    """Raise Denied if the decision denies the call."""
    if not decision:
        raise Denied(f"{name}: limit exceeded: {', '.join(decision.violated)}; try again later", decision)
