"""Limits for blocks and functions: `with limiter.limited(key):` and `@limiter.limited(key)`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from tidegate._limiter.joint import async_performer, performer
from tidegate._runtime.ambient import CURRENT_RUN, charge_run_flow
from tidegate._runtime.entered import EnteredBlocks
from tidegate._runtime.flow import run, run_async
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from tidegate._limiter.limiter import AsyncLimiter, Limiter
    from tidegate._limiter.waiting import Step
    from tidegate._policy import Cost, Key
    from tidegate._runtime.ambient import AmbientCharge
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision

P = ParamSpec("P")
R = TypeVar("R")
L = TypeVar("L", bound="Limiter | AsyncLimiter")


class LimitsCalls:
    """Decorates functions: each call runs in the `with` block that `_for_call` returns for its arguments."""

    _for_coroutines = "limit it with an AsyncLimiter"  # what to do instead
    _for_generators = "use `with limiter.limited(...)` inside it"

    def _for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function."""
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{function.__qualname__} is a coroutine function: {self._for_coroutines}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{function.__qualname__} is a generator function: {self._for_generators}")

        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._for_call(args, kwargs):
                return function(*args, **kwargs)

        return limited


class LimitsCoroutines:
    """Decorates coroutine functions: each call runs in the `async with` block that `_for_call` returns."""

    _for_functions = "limit it with a Limiter"  # what to do instead

    def _for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        """Decorate a coroutine function."""
        if not inspect.iscoroutinefunction(function):
            name = getattr(function, "__qualname__", repr(function))
            raise ConfigError(f"{name} is not a coroutine function: {self._for_functions}")

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            async with self._for_call(args, kwargs):
                return await function(*args, **kwargs)

        return limited


class _Limited(Generic[L]):
    """The arguments of `limited`, and the decisions of blocks that are entered."""

    def __init__(
        self,
        limiter: L,
        key: Key | Callable[..., Key],
        cost: Cost | Callable[..., Cost],
        timeout: float | None,
        priority: float,
    ) -> None:
        """Keep the arguments of `limited`."""
        self._limiter = limiter
        self._key = key
        self._cost = cost
        self._timeout = timeout
        self._priority = priority
        self._decisions: EnteredBlocks[Decision] = EnteredBlocks()

    def _for_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Self:
        """Compute key and cost from the arguments of a call."""
        key = self._key(*args, **kwargs) if callable(self._key) else self._key
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        return type(self)(self._limiter, key, cost, self._timeout, self._priority)

    def _acquire_arguments(self) -> tuple[Key, Cost, float | None, float]:
        if callable(self._key) or callable(self._cost):
            raise ConfigError(
                "a callable key or cost needs the arguments of a call: use limited() as a decorator", field="key"
            )
        return self._key, self._cost, self._timeout, self._priority

    def _charge_run_flow(self, cost: Cost) -> Flow[Step, AmbientCharge | None]:
        """Charge the current run for one call, and the units of a cost by unit; it stays charged."""
        if CURRENT_RUN.get() is None:
            return None
        return (yield from charge_run_flow(cost if isinstance(cost, Mapping) else {}))

    def _holds_slots(self, decision: Decision | None) -> bool:
        """Return whether a block holds slots; one that only shadow mode allowed has none."""
        if decision is None or not decision.within_limits:
            return False
        return any(limit.rules.holds_slots for limit in self._limiter.policy.limits)


class Limited(_Limited["Limiter"], LimitsCalls):
    """Limits a block, or every call of the function it decorates."""

    def __enter__(self) -> Decision:
        """Wait for a permit; the call is charged to the current run as well."""
        arguments = self._acquire_arguments()
        held = run(self._charge_run_flow(arguments[1]), performer(self._limiter.clock))
        try:
            decision = self._limiter.acquire(*arguments)
        except BaseException:
            if held is not None:
                run(held.cancel_flow(), performer(self._limiter.clock))
            raise
        return self._decisions.add(decision)

    def __exit__(self, *_: object) -> None:
        """Release slots."""
        decision = self._decisions.remove()
        if self._holds_slots(decision):
            self._limiter.release(self._acquire_arguments()[0], self._acquire_arguments()[1], decision)


class AsyncLimited(_Limited["AsyncLimiter"], LimitsCoroutines):
    """Limits an `async with` block, or every call of the coroutine function it decorates."""

    async def __aenter__(self) -> Decision:
        """Wait for a permit; the call is charged to the current run as well."""
        arguments = self._acquire_arguments()
        held = await run_async(self._charge_run_flow(arguments[1]), async_performer(self._limiter.clock))
        try:
            decision = await self._limiter.acquire(*arguments)
        except BaseException:
            if held is not None:
                await run_async(held.cancel_flow(), async_performer(self._limiter.clock))
            raise
        return self._decisions.add(decision)

    async def __aexit__(self, *_: object) -> None:
        """Release slots."""
        decision = self._decisions.remove()
        if self._holds_slots(decision):
            await self._limiter.release(self._acquire_arguments()[0], self._acquire_arguments()[1], decision)
