"""Limits on single routes in FastAPI: `dependencies=[Depends(limit("5/1m"))]` of a route, a router or the application.

A denied request raises RateLimitExceeded, an HTTPException, so an exception handler can replace the response. Requests
are counted per route (`GET /items/{id}`, with its router's prefix), not per URL. Routes with the same `scope` share a
count.
"""

# No `from __future__ import annotations` here: FastAPI reads the types of a dependency's arguments.

from operator import call
from typing import Any

from tidegate.core.decision import Decision
from tidegate.errors import ConfigError
from tidegate.flow import run_async
from tidegate.inbound.asgi import find_template, has_fixed_mount
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.starlette import AsgiLimit

try:
    from fastapi import HTTPException, Response, WebSocketException
    from fastapi.requests import HTTPConnection
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.fastapi requires FastAPI: pip install fastapi") from error

__all__ = ["RateLimitExceeded", "limit"]

POLICY_VIOLATION = 1008


class RateLimitExceeded(HTTPException):
    """Raised for a denied request; `decision` has the reason."""

    def __init__(self, status: int, detail: str, headers: dict[str, str], decision: Decision) -> None:
        """Keep the decision that denied the request."""
        super().__init__(status, detail, headers)
        self.decision = decision


class limit(AsgiLimit):  # noqa: N801 - used like a function
    """A dependency that denies requests over the limit."""

    async def __call__(self, connection: HTTPConnection, response: Response) -> None:
        """Decide about the current request."""
        scope = connection.scope
        request, decision = await run_async(self.check_flow(scope, route_name(scope)), call)
        if decision is None:
            return
        if decision:
            response.headers.update(dict(self.fields(scope.get(STATE_KEY), decision)))
            return
        denial = self.write_denial(request, scope.get(STATE_KEY), decision)
        if scope["type"] == "websocket":
            raise WebSocketException(POLICY_VIOLATION, "Rate limit exceeded")
        kept = {name: value for name, value in denial.headers if name.lower() not in ("content-type", "content-length")}
        raise RateLimitExceeded(denial.status, denial.body.decode("utf-8", "replace"), kept, decision)


def route_name(scope: Any) -> str:  # noqa: ANN401 - a scope is any mapping
    """Name the route that FastAPI has matched: its methods, the mount point of its application, and its template."""
    methods = "|".join(sorted(getattr(scope.get("route"), "methods", None) or ["WEBSOCKET"]))
    root = scope.get("root_path") or ""
    mount = root.removeprefix(scope.get("app_root_path", root)) if has_fixed_mount(scope) else ""
    return f"{methods} {mount}{find_template(scope) or ''}"
