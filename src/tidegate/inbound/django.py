"""Limits on single views in Django: `@limit("5/1m")` above `def view(request, …)`, or through `method_decorator`."""

from __future__ import annotations

import functools
import inspect
from operator import call
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError
from tidegate.flow import run, run_async
from tidegate.inbound.client.request import Request, wsgi_header
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_limit import F, RouteLimit, find_client, route_name
from tidegate.inbound.wsgi import forwarding_headers

try:
    from django.http import HttpResponse  # type: ignore[import-untyped]  # Django has no types
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.django requires Django: pip install django") from error

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow

__all__ = ["limit"]


class limit(RouteLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates."""

    def __call__(self, view: F) -> F:
        """Decorate a view, sync or async."""
        route = route_name(view)
        if inspect.iscoroutinefunction(view):

            @functools.wraps(view)
            async def limited(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
                seen, request_state, decision = await run_async(self._check_flow(request, route, tasks=True), call)
                if decision is not None and not decision:
                    return self._make_denial(seen, request_state, decision)
                return self._with_fields(request_state, decision, await view(request, *args, **kwargs))

        else:

            @functools.wraps(view)
            def limited(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
                seen, request_state, decision = run(self._check_flow(request, route, tasks=False), call)
                if decision is not None and not decision:
                    return self._make_denial(seen, request_state, decision)
                return self._with_fields(request_state, decision, view(request, *args, **kwargs))

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _check_flow(self, request: Any, route: str, *, tasks: bool) -> CallFlow[tuple[Request, Any, Decision | None]]:  # noqa: ANN401 - Django has no types
        request_state = getattr(request, "scope", {}).get(STATE_KEY) or request.META.get(STATE_KEY)
        meta = request.META
        client = find_client(
            request_state, self.request_limiter_for(request_state), meta.get("REMOTE_ADDR"), forwarding_headers(meta)
        )
        # Django has decoded PATH_INFO, in the environ too.
        seen = Request(request.method, request.path_info, client.address, meta, lambda name: wsgi_header(meta, name))
        decision = yield from self.decide_flow(seen, request_state, client, route, tasks=tasks)
        return seen, request_state, decision

    def _make_denial(self, request: Request, request_state: Any, decision: Decision) -> HttpResponse:  # noqa: ANN401 - a RequestState or None
        denial = self.write_denial(request, request_state, decision)
        return HttpResponse(denial.body, status=denial.status, headers=dict(denial.headers))

    def _with_fields(self, request_state: Any, decision: Decision | None, response: Any) -> Any:  # noqa: ANN401 - any response
        if decision is not None:
            for name, value in self.fields(request_state, decision):
                response[name] = value
        return response
