"""The command `flask tidegate limits`, which lists the limits of each route of a Flask application."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import flask
from flask.cli import AppGroup

from tidegate.inbound._limiting.limited_functions import is_exempt
from tidegate.inbound._limiting.matched_route import wrapped_apps
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.werkzeug_routes import blueprint_uses, blueprints_of, view_stack
from tidegate.inbound._rules.extra_limits import limits_text
from tidegate.inbound._rules.model import DEFAULT_LIMITS
from tidegate.inbound._rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE: Final = re.compile(r"<(?:(?P<converter>\w+)(?:\([^)]*\))?:)?(?P<name>\w+)>")
NUMBERS: Final = {"int": "1", "float": "1.5"}
ADDED_METHODS: Final = ("HEAD", "OPTIONS")  # Flask adds them to routes

commands = AppGroup("tidegate", help="Inspect the rate limits of the application.")


class RouteRequest(NamedTuple):
    """What a request to a route has in common with all others: enough to find its limits."""

    endpoint: str
    method: str
    path: str


class ListedLimit(NamedTuple):
    """A limit of a route: where it is declared, and what it is."""

    place: str
    text: str


@commands.command("limits")
def list_limits() -> None:
    """List each route with the limits that apply to it."""
    app = flask.current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - a public method of proxies
    routes = [
        (f"{method} {rule.rule}", limits_of_route(app, RouteRequest(rule.endpoint, method, sample_path(rule.rule))))
        for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule)
        for method in sorted(set(rule.methods or ()).difference(ADDED_METHODS)) or ["OPTIONS"]
    ]
    for route, limits in routes:
        click.echo(route)
        for place, text in limits or [ListedLimit("no limit", "")]:
            click.echo(f"    {place}  {text}".rstrip())


def limits_of_route(app: Any, request: RouteRequest) -> list[ListedLimit]:  # noqa: ANN401 - a Flask application
    """Return the limits that apply to a route, found by the functions that decide about requests."""
    view = app.view_functions.get(request.endpoint)
    blueprints = blueprints_of(app, request.endpoint)
    stack = view_stack(view, request.method)
    shared = blueprint_uses(app, request.endpoint, "", stack, request.method)
    uses: list[tuple[str, Any]] = [("blueprint", use.limit) for use in shared]
    uses += [("view", use.limit) for use in (() if stack is None else stack.uses)]
    own = [
        ListedLimit(f"{place} {limit.name}", limit.text) for place, limit in uses if limit.applies_to(request.method)
    ]
    if any(map(is_exempt, (view, *blueprints))):
        return [ListedLimit("exempt from the limits of the middleware", ""), *own]
    replaced = any(limit.override_defaults and limit.applies_to(request.method) for _, limit in uses)
    return [each for each in middleware_limits(app, request) if not (replaced and each.place == DEFAULT_LIMITS)] + own


def middleware_limits(app: Any, request: RouteRequest) -> Iterator[ListedLimit]:  # noqa: ANN401 - as above
    """Yield the limits of the middlewares around an application, for one of the paths of a route."""
    for each in wrapped_apps(app.wsgi_app):
        limiter = getattr(each, "request_limiter", None)
        if not isinstance(limiter, RequestLimiter):
            continue
        routes = wsgi_routes(request.path, "", limiter.root_path)
        for category, _ in limiter.rules.matches(routes, (request.method,)):
            given = limiter.middleware_limits.get(category.name)
            if given is None or given.applies_to(request.method):
                yield ListedLimit(category.name, limits_text(category.policy.limits) if given is None else given.text)


def sample_path(rule: str) -> str:
    """Return a path that a rule of Flask matches, to find the categories of the middleware."""
    return VARIABLE.sub(lambda found: NUMBERS.get(found["converter"] or "", found["name"]), rule)
