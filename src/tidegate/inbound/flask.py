"""Limits on single routes in Flask: `@limit("5/1m")` below `@app.get("/…")`."""

from __future__ import annotations

import functools
import inspect
from operator import call
from typing import Any

from tidegate.errors import ConfigError
from tidegate.flow import run
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_limit import F, RouteLimit, find_client, route_name
from tidegate.inbound.wsgi import forwarding_headers, make_request

try:
    import flask
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.flask requires Flask: pip install flask") from error

__all__ = ["limit"]


class limit(RouteLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates."""

    def __call__(self, view: F) -> F:
        """Decorate a view."""
        route = route_name(view)

        @functools.wraps(view)
        def limited(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the view's
            denial, fields = self._check(route)
            if denial is not None:
                return denial
            called = flask.current_app.ensure_sync(view) if inspect.iscoroutinefunction(view) else view
            response = called(*args, **kwargs)
            if fields:
                response = flask.make_response(response)
                response.headers.update(dict(fields))
            return response

        return limited  # type: ignore[return-value]  # wraps keeps what callers see

    def _check(self, route: str) -> tuple[flask.Response | None, list[tuple[str, str]]]:
        environ = flask.request.environ
        request_state = environ.get(STATE_KEY)
        client = find_client(
            request_state,
            self.request_limiter_for(request_state),
            environ.get("REMOTE_ADDR"),
            forwarding_headers(environ),
        )
        request = make_request(environ, client)
        decision = run(self.decide_flow(request, request_state, client, route), call)
        if decision is None:
            return None, []
        if decision:
            return None, self.fields(request_state, decision)
        denial = self.write_denial(request, request_state, decision)
        return flask.Response(denial.body, denial.status, list(denial.headers)), []
