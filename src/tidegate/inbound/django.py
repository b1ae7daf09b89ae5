"""Limits on single views in Django: `@limit("5/1m")` above `def view(request, …)`, or through `method_decorator`."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate.errors import ConfigError
from tidegate.inbound.client.request import Request, wsgi_header
from tidegate.inbound.limiting.flow import drive, drive_async
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_limit import RouteLimit, name_of, visitor_of
from tidegate.inbound.wsgi import forwarding

try:
    from django.http import HttpResponse  # type: ignore[import-untyped]  # Django has no types
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.django requires Django: pip install django") from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.core.decision import Decision
    from tidegate.inbound.limiting.flow import Steps

F = TypeVar("F", bound="Callable[..., Any]")


class limit(RouteLimit):  # noqa: N801 - it reads like the decorator it is
    """Limits the views that it decorates."""

    def __call__(self, view: F) -> F:
        """Decorate a view, sync or async."""
        route = name_of(view)
        if inspect.iscoroutinefunction(view):

            @functools.wraps(view)
            async def limited(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
                seen, visit, decision = await drive_async(self._looking(request, route, tasks=True))
                if decision is not None and not decision:
                    return self._denial(seen, visit, decision)
                return self._with_fields(visit, decision, await view(request, *args, **kwargs))

        else:

            @functools.wraps(view)
            def limited(request: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
                seen, visit, decision = drive(self._looking(request, route, tasks=False))
                if decision is not None and not decision:
                    return self._denial(seen, visit, decision)
                return self._with_fields(visit, decision, view(request, *args, **kwargs))

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _looking(self, request: Any, route: str, *, tasks: bool) -> Steps[tuple[Request, Any, Decision | None]]:  # noqa: ANN401 - Django has no types
        visit = getattr(request, "scope", {}).get(STATE_KEY) or request.META.get(STATE_KEY)
        meta = request.META
        visitor = visitor_of(visit, self.guard_of(visit), meta.get("REMOTE_ADDR"), forwarding(meta))
        # Django has decoded PATH_INFO, in the environ too.
        seen = Request(request.method, request.path_info, visitor.address, meta, lambda name: wsgi_header(meta, name))
        decision = yield from self.deciding(seen, visit, visitor, route, tasks=tasks)
        return seen, visit, decision

    def _denial(self, request: Request, visit: Any, decision: Decision) -> HttpResponse:  # noqa: ANN401 - a RequestState or None
        answer = self.answer(request, visit, decision)
        return HttpResponse(answer.body, status=answer.status, headers=dict(answer.headers))

    def _with_fields(self, visit: Any, decision: Decision | None, response: Any) -> Any:  # noqa: ANN401 - any response
        if decision is not None:
            for name, value in self.fields(visit, decision):
                response[name] = value
        return response
