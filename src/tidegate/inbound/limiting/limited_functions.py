"""The limits that decorators attach to functions, so that all limits of a function are decided together.

Stacked decorators become one wrapper, which holds the limits of all. If another decorator is between two of ours,
the outer wrapper decides for both and tells the inner one through `RequestState.covered`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.limiting.route_limit import F, RouteLimit

STACK_ATTRIBUTE: Final = "__tidegate_limits__"
COPIED_ROUTES: Final = "django.utils.decorators."  # method_decorator shows the attributes of a function that never runs
EXEMPT_ATTRIBUTE: Final = "__tidegate_exempt__"


class NamedLimit(Protocol):
    """A limit on functions: its scope, and its name among the limits of a function."""

    scope: str | None
    name: str


class RouteUse(NamedTuple):
    """A limit at a route; the route is the name of its count, unless the limit has a scope."""

    limit: RouteLimit
    route: str

    @property
    def policy_name(self) -> str:
        """The name under which the store keeps the count."""
        return policy_name(self.limit, self.route)


class LimitStack:
    """All limits of one function, the outermost first."""

    __slots__ = ("covers", "framework", "function", "is_plain", "plans", "uses", "wrapper")

    def __init__(self, function: Any, uses: Sequence[RouteUse], covers: frozenset[object]) -> None:  # noqa: ANN401 - any function
        """Hold the function to call when its limits allow it; `covers`: the inner stacks that need not decide again."""
        self.function: Any = function
        self.uses: tuple[RouteUse, ...] = tuple(uses)
        self.covers: frozenset[object] = covers
        self.wrapper: object = None
        self.framework: Any = None  # a Framework, for the fast path
        check_names(self.uses)
        # For the fast path: whether no limit needs more than a key, and what is charged together without a category.
        self.is_plain: bool = not covers and all(use.limit.is_plain for use in self.uses)
        self.plans: dict[object, Any] = {}

    def is_covered(self, request_state: RequestState | None) -> bool:
        """Return whether an outer wrapper has already decided these limits; valid for one call."""
        if request_state is None or request_state.covered is None or self not in request_state.covered:
            return False
        request_state.covered.discard(self)
        return True

    def cover(self, request_state: RequestState) -> None:
        """Mark the limits of inner wrappers as decided."""
        if self.covers:
            request_state.covered = {*(request_state.covered or ()), *self.covers}


def stack_on(limit: RouteLimit, function: Any) -> LimitStack:  # noqa: ANN401 - any function
    """Return the limits of a function after one more decorator."""
    use = RouteUse(limit, route_name(function))
    inner: LimitStack | None = getattr(function, STACK_ATTRIBUTE, None)
    if inner is None or inner.uses[0].route.startswith(COPIED_ROUTES):
        return LimitStack(function, (use,), frozenset())
    for other in inner.uses:
        limit.share_store(other.limit)
    if inner.wrapper is function:  # no other decorator is between them
        return LimitStack(inner.function, (use, *inner.uses), inner.covers)
    return LimitStack(function, (use, *inner.uses), inner.covers | {inner})


def attach(stack: LimitStack, wrapper: Callable[..., object]) -> None:
    """Leave the limits on the wrapper that decides them."""
    stack.wrapper = wrapper
    setattr(wrapper, STACK_ATTRIBUTE, stack)


def policy_name(limit: NamedLimit, route: str) -> str:
    """Return the name under which the store keeps the count of a limit."""
    return f"{limit.scope or route}:{limit.name}"


def check_names(uses: Sequence[tuple[NamedLimit, str]]) -> None:
    """Raise ConfigError if two limits of a route would share a count."""
    names = [policy_name(limit, route) for limit, route in uses]
    for limit, route in uses:
        if names.count(policy_name(limit, route)) > 1:
            raise ConfigError(
                f"two limits of {route} have the name {limit.name!r} and would share a count: "
                "give one of them another name, as in limit('10/1m', name='burst')",
                field="name",
            )


def is_limited(function: object) -> bool:
    """Return whether a function has limits."""
    return getattr(function, STACK_ATTRIBUTE, None) is not None


def is_exempt(function: object) -> bool:
    """Return whether a function is exempt from the limits of the middleware."""
    return getattr(function, EXEMPT_ATTRIBUTE, False) is True


def exempt(function: F) -> F:
    """Exempt an endpoint from the limits of the middleware: `@exempt` below the decorator of the route.

    `exempt(blueprint)` exempts all routes of a blueprint of Flask or Quart.
    """
    if hasattr(function, "routes"):
        raise ConfigError(
            f"exempt takes an endpoint or a blueprint, not {type(function).__name__}, which has several routes: "
            "add their paths to `exempt` in the configuration of the middleware"
        )
    setattr(function, EXEMPT_ATTRIBUTE, True)
    return function


def route_name(function: Any) -> str:  # noqa: ANN401 - any function
    """Name a route after its function or, if frameworks have made the function, after its class or endpoint."""
    while isinstance(function, functools.partial):
        function = function.func
    named = getattr(function, "view_class", function)
    if not hasattr(named, "__qualname__"):  # an object with a method `__call__`
        named = type(named)
    short, full = getattr(named, "__name__", ""), named.__qualname__
    return f"{named.__module__}.{full if full.rpartition('.')[2] == short else short}"
