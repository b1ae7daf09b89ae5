"""Limits on plain functions: `@limit("5/1m", key=lambda user, …: user.id)`; a call over the limit raises Denied.

All limits of a function are decided together: a call that one of them denies is charged to none. They count in memory,
or in the store of a `Limits`: `limits = Limits(store="redis://…")`, then `@limits.limit("5/1m")`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, Unpack

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy
from tidegate._policy.key import normal_key
from tidegate._runtime.flow import run, run_async
from tidegate.errors import Denied
from tidegate.inbound._client.identify import key_text
from tidegate.inbound._limiting.charges import UNRECORDED, RequestCharge, perform, perform_async
from tidegate.inbound._limiting.decide import decide_flow
from tidegate.inbound._limiting.limited_functions import F, check_names, policy_name, route_name
from tidegate.inbound._limiting.route_limit import default_name, named_limits
from tidegate.inbound._rules.extra_limits import read_exact_limits
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy import Cost, Key
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.inbound._rules import extra_limits
    from tidegate.stores import Store

__all__ = ["FunctionOptions", "Limits", "limit"]

FUNCTION_STACK: Final = "__tidegate_function_limits__"


class FunctionOptions(TypedDict, total=False):
    """The options of `limit(…)`."""

    key: Key | Callable[..., Key]
    cost: Cost | Callable[..., Cost]
    scope: str | None
    name: str | None


class Limits:
    """The store that limits on functions share; `limits.limit(…)` decorates functions."""

    shows_next_permit: bool = False  # no headers do

    def __init__(self, *, store: str | Store = "memory://", clock: Clock | None = None) -> None:
        """Open the store."""
        self._opened = OpenedStore.open(store, clock=clock, lease=None)
        self.store: Store = self._opened.store
        self.clock: Clock | None = clock

    def limit(self, limits: extra_limits.OneOrMoreLimits, **options: Unpack[FunctionOptions]) -> limit:
        """Return a limit that counts here; the options are those of `limit(…)`."""
        made = limit(limits, **options)
        made.owner = self
        return made

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return (self.clock or self.store.clock).ns() // 1000

    def deny_without_store(self, policy: Policy, error: Exception) -> Decision | None:
        """Raise the error: the caller of a function handles it."""
        del policy
        raise error

    def close(self) -> None:
        """Close the store, if it was opened from a URL."""
        self._opened.close()


@functools.cache
def shared_limits() -> Limits:
    """Return what all limits share that no `Limits` has made."""
    return Limits()


class limit:  # noqa: N801 - used as a decorator
    """Limits the functions that it decorates. It denies and never waits; `Limiter.limited` waits."""

    owner: Limits | None = None  # None: it counts in memory, with all others

    def __init__(
        self,
        limits: extra_limits.OneOrMoreLimits,
        *,
        key: Key | Callable[..., Key] = "all",
        cost: Cost | Callable[..., Cost] = 1,
        scope: str | None = None,
        name: str | None = None,
    ) -> None:
        """Take a string such as "5/1m", a Limit, or several; `key` and `cost` may be functions of the arguments.

        Functions with the same `scope` share a count. The `name` separates the limits of a function;
        by default it is made of the key and the periods.
        """
        self._limits = named_limits(read_exact_limits(limits), name)
        self._key = key
        self._cost = cost
        self.scope = scope
        self.name: str = name or default_name(key if callable(key) else None, self._limits, "all")

    def __call__(self, function: F) -> F:
        """Decorate a function, sync or async."""
        stack = _stack_on(self, function)
        inner = stack.function
        if inspect.iscoroutinefunction(inner):

            @functools.wraps(inner)
            async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
                await run_async(stack.decide_flow(args, kwargs), perform_async)
                return await inner(*args, **kwargs)

        else:

            @functools.wraps(inner)
            def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's
                run(stack.decide_flow(args, kwargs), perform)
                return inner(*args, **kwargs)

        setattr(limited, FUNCTION_STACK, (stack, limited))
        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def make_limiter(self, count_name: str) -> Limiter:
        """Return the limiter of one function."""
        owner = self.owner or shared_limits()
        return Limiter(Policy(count_name, self._limits), store=owner.store, clock=owner.clock)

    def key_and_cost(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Key, Cost]:
        """Return the key and the cost of a call; a number or UUID becomes a string, as in limits on routes."""
        key = normal_key(key_text(self._key(*args, **kwargs) if callable(self._key) else self._key))
        cost = self._cost(*args, **kwargs) if callable(self._cost) else self._cost
        return key, cost


class FunctionUse(NamedTuple):
    """A limit of a function, and its limiter."""

    limit: limit
    limiter: Limiter


class FunctionStack(NamedTuple):
    """All limits of one function, the outermost first."""

    function: Any
    route: str
    uses: tuple[FunctionUse, ...]

    def decide_flow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flow[Any, None]:
        """Charge all limits of a call, or raise Denied and charge none. Store errors are raised, too."""
        charges = []
        for limit, limiter in self.uses:
            key, cost = limit.key_and_cost(args, kwargs)
            reporter: Any = limit.owner or shared_limits()  # it has what `decide_flow` reads
            charges.append(RequestCharge(limiter, key, cost, UNRECORDED, reporter))
        result = yield from decide_flow(charges)
        if not result.allowed:
            decision = result.decision
            assert decision is not None  # noqa: S101 - a denial has a decision
            message = f"{self.route}: limit exceeded: {', '.join(decision.violated)}; try again later"
            raise Denied(message, decision)


def _stack_on(outer: limit, function: Any) -> FunctionStack:  # noqa: ANN401 - any function
    """Return the limits of a function after one more decorator. No other decorator may be between them."""
    inner: FunctionStack | None
    inner, wrapper = getattr(function, FUNCTION_STACK, (None, None))
    route = route_name(function)
    below: tuple[FunctionUse, ...] = ()
    if inner is not None and wrapper is function:
        function, below = inner.function, inner.uses
    check_names([(each, route) for each in (outer, *(use.limit for use in below))])
    uses = (FunctionUse(outer, outer.make_limiter(policy_name(outer, route))), *below)
    return FunctionStack(function, outer.scope or route, uses)
