"""The limits that decorators attach to functions, so that all limits of a function are decided together.

Stacked decorators become one wrapper, which holds the limits of all. If another decorator is between two of ours,
the outer wrapper decides for both and tells the inner one through `RequestState.cover`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tidegate.errors import ConfigError
from tidegate.inbound._client.request import METHOD_COUNTS
from tidegate.inbound._limiting.decide import ChargeSet
from tidegate.inbound._limiting.matched_route import RouteUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.inbound._limiting.request_limiter import RequestLimiter
    from tidegate.inbound._limiting.request_targets import RequestTargets
    from tidegate.inbound._limiting.route_limit import RouteLimit

F = TypeVar("F", bound=Callable[..., object])  # a function that is decorated
STACK_ATTRIBUTE: Final = "__tidegate_limits__"
COPIED_ROUTES: Final = "django.utils.decorators."  # method_decorator shows the attributes of a function that never runs
MAX_PREPARED: Final = 32  # by request limiter and method; the cache is cleared when it is full
EXEMPT_ATTRIBUTE: Final = "__tidegate_exempt__"


class NamedLimit(Protocol):
    """A limit on functions: its scope, and its name among the limits of a function."""

    scope: str | None
    name: str


class EndpointLimits:
    """Limits that an endpoint decides together, and what requests are charged by them, prepared."""

    __slots__ = ("_fixed", "_prepared", "uses")

    def __init__(self, uses: Iterable[RouteUse], *, reused: bool = True) -> None:
        """Decide these limits. `reused`: for many requests, so that it is worth preparing what they are charged."""
        self.uses: tuple[RouteUse, ...] = tuple(uses)
        self._fixed = reused and bool(self.uses) and all(use.limit.is_fixed for use in self.uses)
        self._prepared: dict[tuple[int, str, bool], tuple[RequestTargets, ChargeSet | None]] = {}

    def prepare(
        self, request_limiter: RequestLimiter, middleware: RequestLimiter | None, method: str, *, more: bool
    ) -> ChargeSet | None:
        """Return what requests with a method are charged; None if it differs between requests.

        `more`: limits that are decided later may deny the request.
        """
        if not self._fixed or method not in METHOD_COUNTS or not request_limiter.rules.enabled:
            return None
        targets = request_limiter.targets  # another object after each change of the rules
        cache_key = id(targets), method, more
        found = self._prepared.get(cache_key)
        if found is None:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            charges, key_limits = [], []
            for use in self.uses:
                charge = use.limit.prepare_charge(use.limit.request_limiter_for(middleware), use.policy_name, method)
                if charge is not None:
                    charges.append(charge)
                    key_limits.append(use.limit if use.limit.has_key else None)
            made = ChargeSet(charges, key_limits, more=more, raw=request_limiter.raw) if charges else None
            found = self._prepared[cache_key] = (targets, made)  # kept, so that no other object gets its id
        return found[1]


class LimitStack:
    """All limits of one function, the outermost first."""

    __slots__ = ("all", "covers", "early", "function", "late", "uses", "wrapper")

    def __init__(self, function: Any, uses: Sequence[RouteUse], covers: frozenset[LimitStack]) -> None:  # noqa: ANN401 - any function
        """Hold the function to call when its limits allow it; `covers`: the inner stacks that need not decide again."""
        self.function: Any = function
        self.uses: tuple[RouteUse, ...] = tuple(uses)
        self.covers: frozenset[LimitStack] = covers
        self.wrapper: object = None
        check_names(self.uses)
        # A middleware charges the early ones, if it finds the route; the function charges the others.
        self.early: tuple[RouteUse, ...] = tuple(use for use in self.uses if not use.limit.has_functions)
        self.late: EndpointLimits = EndpointLimits(use for use in self.uses if use.limit.has_functions)
        self.all: EndpointLimits = EndpointLimits(self.uses)

    @property
    def marks(self) -> tuple[object, ...]:
        """What says that all limits of the function are decided: the early ones, and the others."""
        return self, ("late", self)


def stack_on(limit: RouteLimit, function: Any) -> LimitStack:  # noqa: ANN401 - any function
    """Return the limits of a function after one more decorator."""
    use = RouteUse(limit, route_name(function))
    if limit.as_default:
        raise ConfigError("only limits of blueprints can be defaults", field="as_default")
    inner: LimitStack | None = getattr(function, STACK_ATTRIBUTE, None)
    if inner is None or inner.uses[0].route.startswith(COPIED_ROUTES):
        return LimitStack(function, (use,), frozenset())
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


def stack_of(function: object) -> LimitStack | None:
    """Return the limits of a function."""
    return getattr(function, STACK_ATTRIBUTE, None)


def is_limited(function: object) -> bool:
    """Return whether a function has limits."""
    return stack_of(function) is not None


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
