"""Limits on single routes in Flask: `@limit("5/1m")` below `@app.get("/…")`."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate.errors import ConfigError
from tidegate.inbound.limiting.flow import drive
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_limit import RouteLimit, name_of, visitor_of
from tidegate.inbound.wsgi import forwarding, request_of

try:
    import flask
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.flask requires Flask: pip install flask") from error

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


class limit(RouteLimit):  # noqa: N801 - it reads like the decorator it is
    """Limits the views that it decorates."""

    def __call__(self, view: F) -> F:
        """Decorate a view."""
        route = name_of(view)

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
            denial, fields = self._look(route)
            if denial is not None:
                return denial
            called = flask.current_app.ensure_sync(view) if inspect.iscoroutinefunction(view) else view
            response = called(*args, **kwargs)
            if fields:
                response = flask.make_response(response)
                response.headers.update(dict(fields))
            return response

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _look(self, route: str) -> tuple[flask.Response | None, list[tuple[str, str]]]:
        environ = flask.request.environ
        visit = environ.get(STATE_KEY)
        visitor = visitor_of(visit, self.guard_of(visit), environ.get("REMOTE_ADDR"), forwarding(environ))
        request = request_of(environ, visitor)
        decision = drive(self.deciding(request, visit, visitor, route))
        if decision is None:
            return None, []
        if decision:
            return None, self.fields(visit, decision)
        answer = self.answer(request, visit, decision)
        return flask.Response(answer.body, answer.status, list(answer.headers)), []
