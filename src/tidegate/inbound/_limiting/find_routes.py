"""Finds out which framework an application is made with, and so how its routes are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.inbound._limiting.asgi_routes import AsgiRoutes, has_known_routes
from tidegate.inbound._limiting.matched_route import MatchedRoute, RouteFinder, wrapped_apps
from tidegate.inbound._limiting.werkzeug_routes import WerkzeugRoutes

if TYPE_CHECKING:
    from collections.abc import Callable


class AppRoutes(RouteFinder):
    """The routes of an application; the first request finds out what it is made with."""

    def __init__(self, app: Any, has_defaults: Callable[[], bool]) -> None:  # noqa: ANN401 - any application
        """Look for routes in this application; `has_defaults` returns whether there are default limits."""
        self._app = app
        self._has_defaults = has_defaults
        self._found: RouteFinder | None = None
        self.provider: Any = None  # the FastAPI application, whose tests may override dependencies

    def update(self) -> bool:
        """Inspect routes that were added or replaced meanwhile; returns whether anything has changed."""
        if self._found is None:
            self._found = find_routes(self._app, self._has_defaults)
            self.provider = find_provider(self._app)
        changed = self._found.update()
        self.limited = self._found.limited
        return changed

    def find(self, method: str, path: str, request: Any) -> MatchedRoute | None:  # noqa: ANN401 - a scope or environ
        """Return the route of a request; None if none matches, or if it cannot be known before it runs."""
        return None if self._found is None else self._found.find(method, path, request)

    @property
    def overrides(self) -> object:
        """Whether a test replaces dependencies, so that no route is known before it runs."""
        return None if self.provider is None else self.provider.dependency_overrides


def find_provider(app: Any) -> Any:  # noqa: ANN401 - any application
    """Return the FastAPI application among those that an application wraps; None if there is none."""
    for wrapped in wrapped_apps(app):
        provider = wrapped if hasattr(wrapped, "dependency_overrides") else None
        provider = provider or getattr(wrapped, "dependency_overrides_provider", None)
        if provider is not None:
            return provider
    return None


def find_routes(app: Any, has_defaults: Callable[[], bool]) -> RouteFinder:  # noqa: ANN401 - any application
    """Return what finds the routes of an application."""
    for wrapped in wrapped_apps(app):
        if hasattr(wrapped, "view_functions") and hasattr(wrapped, "url_map"):  # Flask and Quart
            return WerkzeugRoutes(wrapped, has_defaults)
        if type(wrapped).__module__.startswith("django.core.handlers."):
            from tidegate.inbound._limiting.django_routes import DjangoRoutes  # noqa: PLC0415 - only Django needs it

            return DjangoRoutes(has_defaults)
        router = getattr(wrapped, "router", wrapped)
        if has_known_routes(router):
            return AsgiRoutes(router, has_defaults)
    return RouteFinder()
