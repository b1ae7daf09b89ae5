"""Limits on single routes in Starlette: `@limit("5/1m")` above `async def endpoint(request)` or an endpoint method."""

from __future__ import annotations

import functools
import inspect
from operator import call
from typing import TYPE_CHECKING, Any, cast

from tidegate.errors import ConfigError
from tidegate.flow import run, run_async
from tidegate.inbound.client.request import Request, asgi_header, asgi_path
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_limit import F, RouteLimit, find_client, route_name

try:
    from starlette.requests import HTTPConnection
    from starlette.responses import Response
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.starlette requires Starlette: pip install starlette") from error

if TYPE_CHECKING:
    from starlette.types import Scope

    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow

__all__ = ["limit"]


class AsgiLimit(RouteLimit):
    """A limit on routes whose requests have an ASGI scope."""

    def check_flow(self, scope: Scope, route: str, *, tasks: bool = True) -> CallFlow[tuple[Request, Decision | None]]:
        """Decide about the request of a scope; yields the calls to make."""
        request_state = scope.get(STATE_KEY)
        peer = scope.get("client")
        client = find_client(
            request_state, self.request_limiter_for(request_state), peer[0] if peer else None, scope["headers"]
        )
        method = scope.get("method", "GET")
        request = Request(method, asgi_path(scope), client.address, scope, lambda name: asgi_header(scope, name))
        decision = yield from self.decide_flow(request, request_state, client, route, tasks=tasks)
        return request, decision


class limit(AsgiLimit):  # noqa: N801 - used as a decorator
    """Limits the endpoints that it decorates."""

    def __call__(self, endpoint: F) -> F:
        """Decorate an endpoint."""
        route = route_name(endpoint)
        if inspect.iscoroutinefunction(endpoint):

            @functools.wraps(endpoint)
            async def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's
                scope = scope_of(endpoint, args, kwargs)
                request, decision = await run_async(self.check_flow(scope, route), call)
                if decision is not None and not decision:
                    return self._make_denial(request, decision)
                return self._with_fields(scope, decision, await endpoint(*args, **kwargs))

        else:  # it runs in a thread, which cannot await

            @functools.wraps(endpoint)
            def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the endpoint's
                scope = scope_of(endpoint, args, kwargs)
                request, decision = run(self.check_flow(scope, route, tasks=False), call)
                if decision is not None and not decision:
                    return self._make_denial(request, decision)
                return self._with_fields(scope, decision, endpoint(*args, **kwargs))

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _make_denial(self, request: Request, decision: Decision) -> Response:
        denial = self.write_denial(request, cast("dict[str, Any]", request.raw).get(STATE_KEY), decision)
        return Response(denial.body, denial.status, dict(denial.headers))

    def _with_fields(self, scope: Any, decision: Decision | None, response: Any) -> Any:  # noqa: ANN401 - any response
        if decision is not None and hasattr(response, "headers"):
            response.headers.update(dict(self.fields(scope.get(STATE_KEY), decision)))
        return response


def scope_of(endpoint: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any function
    """Find the request among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, HTTPConnection):
            return value.scope
    message = f"{route_name(endpoint)} has no request argument: add one, as in `async def endpoint(request)`"
    raise ConfigError(message)
