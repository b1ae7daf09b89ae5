"""Limits on single routes in FastAPI: `@limit("5/1m")` below `@app.get("/…")`, or `Depends(limit("5/1m"))`.

As a dependency, a limit applies to a route, a router or the whole application. As a decorator, it becomes a dependency
of the endpoint, which needs no further parameter. A denied request raises RateLimitExceeded, an HTTPException, so an
exception handler can replace the response. Requests are counted per route (`GET /items/{id}`, with its router's
prefix), not per URL. Routes with the same `scope` share a count.
"""

# No `from __future__ import annotations` here: FastAPI reads the types of a dependency's arguments.

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, Final, get_args, overload

from tidegate._runtime.flow import run_async
from tidegate.core._decision import Decision
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import is_async_callable
from tidegate.inbound._limiting.asgi_routes import limit_dependencies
from tidegate.inbound._limiting.charges import perform_async
from tidegate.inbound._limiting.limited_call import (
    FrameworkLimit,
    FrameworkLimits,
    check_flow,
    denied_before_flow,
    make_error,
    require_response,
    standalone_fields,
)
from tidegate.inbound._limiting.limited_functions import EndpointLimits, F, check_names, exempt, route_name
from tidegate.inbound._limiting.matched_route import RouteUse, has_fixed_mount, matched_route_name
from tidegate.inbound._limiting.request_state import STATE_KEY, RequestState
from tidegate.inbound._responses import exceeded
from tidegate.inbound._responses.response import BODY_HEADERS, PlainDenial, raw
from tidegate.inbound._responses.response import Response as Denial
from tidegate.inbound.starlette import AsgiFramework

try:
    from fastapi import Depends, HTTPException, Response, WebSocketException
    from fastapi.exception_handlers import http_exception_handler
    from fastapi.requests import HTTPConnection, Request
    from fastapi.websockets import WebSocket
except ImportError as _error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.fastapi requires FastAPI: pip install fastapi") from _error

__all__ = ["Limits", "RateLimitExceeded", "exempt", "limit"]

POLICY_VIOLATION = 1008
MAX_CACHED_USES: Final = 1000  # a root path may have parameters
PARAMETER_PREFIX: Final = "tidegate_limit_"  # the parameters that a decorator adds start with it
USES_KEY: Final = "tidegate_route_limits"  # in the scope: the limits of the route, once they are known


class RateLimitExceeded(exceeded.RateLimitExceeded, HTTPException):
    """Raised for a denied request; `decision` has the reason, `denial` the complete response.

    `detail` is the body: an object if it is JSON, otherwise a string. An exception handler of the application for this
    class, for HTTPException or for the status replaces the response; without one, the response is `denial`.
    """

    def __init__(self, denial: Denial, decision: Decision) -> None:
        """Keep the response and the decision that denied the request."""
        headers = {name: value for name, value in denial.headers if name.lower() not in BODY_HEADERS}
        HTTPException.__init__(self, denial.status, read_body(denial), headers)
        self.denial = denial
        self.decision = decision


def read_body(denial: Denial) -> Any:  # noqa: ANN401 - any JSON value
    """Return the body of a denial as a JSON value, or as a string."""
    kind = next((value for name, value in denial.headers if name.lower() == "content-type"), "")
    text = denial.body.decode("utf-8", "replace")
    if "json" in kind:
        try:
            return json.loads(text)
        except ValueError:  # a custom Response with a wrong content type
            return text
    return text


async def send_denial(request: Any, error: RateLimitExceeded) -> Response:  # noqa: ANN401 - FastAPI passes a Request
    """Answer a denied request: a custom body, problem details or HTML as they are; else as FastAPI's other errors."""
    denial = error.denial
    if isinstance(denial, PlainDenial):
        return await http_exception_handler(request, error)
    return Response(denial.body, denial.status, dict(denial.headers))


def use_denial_handler(scope: Any) -> None:  # noqa: ANN401 - a scope is any mapping
    """Use `send_denial` for RateLimitExceeded, if the application has no handler for it but FastAPI's default."""
    handlers: dict[Any, Any] = (scope.get("starlette.exception_handlers") or ({},))[0]
    found = next((handlers[kind] for kind in RateLimitExceeded.__mro__ if kind in handlers), None)
    if found is http_exception_handler:
        handlers[RateLimitExceeded] = send_denial


class FastApiFramework(AsgiFramework):
    """Requests and responses of FastAPI."""

    def make_error(self, response: Denial, decision: Decision, native: HTTPConnection) -> Exception:
        """Return the exception for a denied request."""
        use_denial_handler(native.scope)
        return RateLimitExceeded(response, decision)


FRAMEWORK: Final = FastApiFramework()


class limit(FrameworkLimit):  # noqa: N801 - used like a function
    """A dependency that denies requests over the limit; also a decorator of endpoints."""

    _framework: ClassVar = FRAMEWORK

    @overload
    def __call__(self, connection: HTTPConnection, response: Response) -> Coroutine[Any, Any, None]: ...

    @overload
    def __call__(self, connection: F) -> F: ...

    def __call__(self, connection: HTTPConnection, response: Response = None) -> object:  # type: ignore[assignment,misc]  # FastAPI reads these types
        """Decide about the current request; or decorate an endpoint, if one is given in place of the connection."""
        if isinstance(connection, HTTPConnection):
            return self._check(connection, response)
        return self._decorate(connection)

    async def _check(self, connection: HTTPConnection, response: Response) -> None:
        scope = connection.scope
        dependant = route_dependant(scope)
        mark = (self, id(dependant))
        request_state: Any = scope.get(STATE_KEY)
        taken = request_state is not None and request_state.take(mark)
        if taken:
            scope[USES_KEY] = True
        if taken and request_state.denied is None:
            return  # the middleware, or another limit of this route, has decided it
        # FastAPI passes the request itself, whose body a key function may read; the endpoint gets the same one.
        native = connection if isinstance(connection, (Request, WebSocket)) else Request(scope)
        check = None
        if taken:
            check = await run_async(denied_before_flow(request_state, native, FRAMEWORK), perform_async)
        if check is None:
            limits, more = self._limits_now(scope, dependant)
            if request_state is not None and len(limits.uses) > 1:  # some may be decided
                limits = self._undecided(limits, request_state, dependant)
            if any(use.limit.reserves for use in limits.uses):
                require_response(request_state, "a concurrency limit or count= in FastAPI")
            check = await run_async(check_flow(limits, native, scope, FRAMEWORK, more=more), perform_async)
            if len(limits.uses) > 1:
                check.request_state.cover([(use.limit, id(dependant)) for use in limits.uses if use.limit != self])
        if check.result.allowed:
            response.raw_headers += raw(standalone_fields(check.request_state))  # faster than `headers.update`
        elif scope["type"] == "websocket":
            raise WebSocketException(POLICY_VIOLATION, "Rate limit exceeded")
        else:
            raise make_error(check, native, FRAMEWORK)

    def _undecided(self, limits: EndpointLimits, request_state: RequestState, dependant: Any) -> EndpointLimits:  # noqa: ANN401 - FastAPI's
        """Return those of the limits that nobody has decided yet, and this one."""
        left = [use for use in limits.uses if use.limit == self or not request_state.take((use.limit, id(dependant)))]
        return limits if len(left) == len(limits.uses) else EndpointLimits(left, reused=False)

    def _limits_now(self, scope: Any, dependant: Any) -> tuple[EndpointLimits, bool]:  # noqa: ANN401 - a scope is any mapping
        """Return what to decide now: this limit and, for the first limit of a request, those that have no functions.

        Functions may need what other dependencies add to the request. Also returns whether limits are decided later.
        """
        root = scope.get("root_path") or ""
        is_first = USES_KEY not in scope
        scope[USES_KEY] = True
        overrides = getattr(scope.get("app"), "dependency_overrides", None)
        if overrides:  # only in tests: not cached
            return self._make_uses(scope, route_limits(dependant, overrides), is_first=is_first)
        cache_key = (id(dependant), is_first, root, has_fixed_mount(scope) if root else None)  # the name of the route
        found = self._cached.get(cache_key)
        if found is None:
            if len(self._cached) >= MAX_CACHED_USES:
                self._cached.clear()
            found = self._cached[cache_key] = (
                dependant,
                *self._make_uses(scope, route_limits(dependant), is_first=is_first),
            )
        return found[1], found[2]

    def _make_uses(self, scope: Any, limits: list["limit"], *, is_first: bool) -> tuple[EndpointLimits, bool]:  # noqa: ANN401 - as above
        route = matched_route_name(scope, scope.get("route"))
        check_names([RouteUse(each, route) for each in limits])
        others = [each for each in limits if each is not self]
        now = [each for each in others if not each.has_functions] if is_first else []
        return EndpointLimits(RouteUse(each, route) for each in (self, *now)), len(now) < len(others)

    @functools.cached_property
    def _cached(self) -> dict[Any, Any]:
        return {}

    def _decorate(self, endpoint: Any) -> Any:  # noqa: ANN401 - any function
        """Return the endpoint with one more dependency, which FastAPI resolves before it calls the endpoint."""
        signature = inspect.signature(endpoint)
        below = [each for parameter in signature.parameters.values() for each in decorated_limits(parameter)]
        check_names([RouteUse(each, route_name(endpoint)) for each in (self, *below)])
        name = f"{PARAMETER_PREFIX}{sum(each.startswith(PARAMETER_PREFIX) for each in signature.parameters)}"
        added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[None, Depends(self)])
        parameters = list(signature.parameters.values())
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
            parameters.insert(-1, added)
        else:
            parameters.append(added)
        limited = drop_parameter(endpoint, name)
        limited.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # as inspect has it
        return limited


class Limits(FrameworkLimits["limit"]):
    """One limiter for an application without a middleware: `limits = Limits(store=…)`, then `@limits.limit("5/1m")`."""

    _limit: ClassVar = limit


def decorated_limits(parameter: inspect.Parameter) -> list[limit]:
    """Return the limits that a decorator below has added as a parameter of the endpoint."""
    if not parameter.name.startswith(PARAMETER_PREFIX):
        return []
    return [each.dependency for each in get_args(parameter.annotation)[1:]]


def drop_parameter(endpoint: Any, name: str) -> Callable[..., Any]:  # noqa: ANN401 - any function
    """Wrap an endpoint so that it does not receive a parameter; sync or async, as the endpoint is."""
    if is_async_callable(endpoint):

        @functools.wraps(endpoint)
        async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's
            kwargs.pop(name, None)
            return await endpoint(*args, **kwargs)

    else:

        @functools.wraps(endpoint)
        def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's
            kwargs.pop(name, None)
            return endpoint(*args, **kwargs)

    return limited


def route_dependant(scope: Any) -> Any:  # noqa: ANN401 - FastAPI's
    """Return the dependencies of the matched route; None if it has none."""
    route = scope.get("route")
    included = scope.get("fastapi", {}).get("effective_route_context")
    return getattr(included if getattr(included, "original_route", None) is route else route, "dependant", None)


def route_limits(dependant: Any, overrides: Mapping[Any, Any] | None = None) -> list[limit]:  # noqa: ANN401 - FastAPI's
    """Return all limits among the dependencies of a route; `overrides` replace dependencies, as in tests."""
    return [] if dependant is None else list(dict.fromkeys(limit_dependencies(dependant, overrides)))


# A limit returns a coroutine to FastAPI and a function to a decorated endpoint. FastAPI awaits only what is marked.
if hasattr(inspect, "markcoroutinefunction"):
    inspect.markcoroutinefunction(limit.__call__)
else:  # Python 3.11
    limit.__call__._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - as asyncio does
