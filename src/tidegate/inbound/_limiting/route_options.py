"""Checks the options of route limits when they are created, not when the first request arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from tidegate._policy import Policy
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import describe_function_problem, is_async_callable
from tidegate.inbound._rules.charging import statuses_of

if TYPE_CHECKING:
    from tidegate._policy import Cost
    from tidegate.core import Limit
    from tidegate.inbound._client.request import FrameworkRequest

Count = Collection[int | str] | Callable[["FrameworkRequest", int], bool]


def take_request(function: Any, scope: str | None) -> Any:  # noqa: ANN401 - any function, or a value
    """Return a function of the request; functions that other limiters call without it, or with a group, are wrapped.

    Flask-Limiter calls functions without arguments, which read `flask.request`; django-ratelimit calls them with the
    group of the limit (here its scope) and the request.
    """
    if not callable(function) or describe_function_problem(function, "request", coroutines=True) is None:
        return function
    if describe_function_problem(function, coroutines=True) is None:
        call = function

        def without_request(request: object) -> Any:  # noqa: ANN401 - the function's
            del request
            return call()

        return _as_named(without_request, function)
    if describe_function_problem(function, "group", "request", coroutines=True) is None:

        def with_group(request: object) -> Any:  # noqa: ANN401 - as above
            return function(scope, request)

        return _as_named(with_group, function)
    return function


def _as_named(wrapper: Any, function: Any) -> Any:  # noqa: ANN401 - any function
    """Return a wrapper with the name of its function; a coroutine function, if that is one."""
    name = getattr(function, "__name__", type(function).__name__)
    if is_async_callable(function):

        async def awaited(request: object) -> Any:  # noqa: ANN401 - the function's
            return await wrapper(request)

        awaited.__name__ = name
        return awaited
    wrapper.__name__ = name
    return wrapper


def check_functions(functions: dict[str, object], *arguments: str, coroutines: bool = False) -> None:
    """Raise ConfigError unless each is None or a function that takes these arguments; some may be `coroutines`."""
    for field, function in functions.items():
        problem = describe_function_problem(function, *arguments, coroutines=coroutines)
        if problem is not None:
            example = " such as by_header('x-tenant')" if field == "key" and not callable(function) else ""
            raise ConfigError(f"{problem}{example}, not {function!r}", field=field)


def check_texts(**values: object) -> None:
    """Raise ConfigError unless each is None or a string that is not empty."""
    for field, value in values.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"must be a string such as 'uploads', not {value!r}", field=field)


def check_fixed_cost(cost: Cost | Callable[..., object], limits: tuple[Limit, ...] | None) -> None:
    """Raise ConfigError if limits that are known cannot be charged a cost that is known, or can never allow it."""
    if limits is None or callable(cost):
        return
    for limit, each in zip(limits, Policy("route", limits).costs(cost), strict=True):
        if each > limit.burst and limit.quota:  # a limit of 0 is closed on purpose
            raise ConfigError(f"{each} is more than the limit {limit} can ever allow", field="cost")


def check_combinations(
    mode: str, given: dict[str, object], methods: frozenset[str] | None, *, per_method: bool
) -> None:
    """Raise ConfigError for options of which one makes the other useless; `given`: those for denials."""
    for field, value in given.items():
        if value is not None and mode == "shadow":
            raise ConfigError("cannot be combined with mode='shadow', which denies nothing", field=field)
    if per_method and methods is not None and len(methods - {"HEAD"}) == 1:
        raise ConfigError("cannot be combined with `methods` of one method: remove it", field="per_method")


def read_methods(methods: Collection[str] | None) -> frozenset[str] | None:
    """Return the methods that are limited: one as a string, or several; `HEAD` counts as `GET`."""
    if methods is None:
        return None
    several = [methods] if isinstance(methods, str) else methods
    if not isinstance(several, Iterable) or not all(isinstance(each, str) for each in several):
        raise ConfigError(f"must be methods such as ['GET', 'POST'], not {methods!r}", field="methods")
    found = frozenset(each.strip().upper() for each in several)
    if not found:
        raise ConfigError("must be methods such as ['GET', 'POST'], not empty", field="methods")
    return found | {"HEAD"} if "GET" in found else found


def read_count(count: Count | int | str | None) -> Callable[[Any, int], bool] | None:
    """Return the function of request and status that decides whether a response counts; None: every response does."""
    if count is None:
        return None
    if callable(count):
        check_functions({"count": count}, "request", "status")
        return count
    several = [count] if isinstance(count, (int, str)) else count
    statuses: set[int] = set()
    for each in several if isinstance(several, Iterable) else [several]:
        found = None if isinstance(each, bool) else statuses_of(str(each))
        if found is None:
            expected = "statuses such as [401, '5xx'], or a function of request and status"
            raise ConfigError(f"must be {expected}, not {count!r}", field="count")
        statuses |= found
    if not statuses:
        raise ConfigError("must be statuses such as [401, '5xx'], not empty", field="count")
    return lambda _, status: status in statuses
