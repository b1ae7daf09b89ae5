"""Finds the views of Django by the path of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.urls import Resolver404, get_resolver, resolve  # type: ignore[import-untyped]  # Django has no types

from tidegate.inbound._limiting.limited_functions import COPIED_ROUTES, is_exempt, is_limited, route_name, stack_of
from tidegate.inbound._limiting.matched_route import MatchedRoute, RouteFinder, RouteUse, class_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DjangoRoutes(RouteFinder):
    """The views of the project."""

    def __init__(self, has_defaults: Callable[[], bool]) -> None:
        """Find the views of the root URLconf; `has_defaults` returns whether there are default limits."""
        self._has_defaults = has_defaults
        self._inspected: tuple[object, ...] | None = None

    def update(self) -> bool:
        """Inspect the views, if the URLconf is another one; returns whether anything has changed."""
        patterns = get_resolver().url_patterns
        state = (self._has_defaults(), id(patterns), *map(id, patterns))
        if state == self._inspected:
            return False
        self._inspected = state
        self.limited = self._has_defaults() or any(map(is_limited_view, views_of(patterns)))
        return True

    def find(self, method: str, path: str, request: Any) -> MatchedRoute | None:  # noqa: ANN401 - a scope or environ
        """Return the view of a request; None if none matches."""
        if not self.limited:
            return None
        root = request.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        try:
            view = resolve(path).func
        except Resolver404:
            return None
        uses: list[RouteUse] = []
        covers: list[object] = []
        for function in (view, *handlers_of(view, method)):
            stack = stack_of(function)
            if stack is None:
                continue
            if stack.uses[0].route.startswith(COPIED_ROUTES):  # of method_decorator, which decorates at each call
                return MatchedRoute(route_name(view), late=stack.uses, replaces_defaults=True)
            uses += stack.uses
            covers += [stack, *stack.covers]
        exempt = is_exempt(view) or is_exempt(class_of(view))
        return MatchedRoute.of(route_name(view), uses, covers, method, exempt=exempt)


def class_of(view: Any) -> Any:  # noqa: ANN401 - any view
    """Return the class of a class-based view, of Django or of REST Framework; None for functions."""
    return getattr(view, "view_class", None) or getattr(view, "cls", None)


def handlers_of(view: Any, method: str) -> tuple[Any, ...]:  # noqa: ANN401 - as above
    """Return the methods of a class-based view that handle a request."""
    view_class = class_of(view)
    return () if view_class is None else (view_class.dispatch, class_handler(view_class, method))


def is_limited_view(view: Any) -> bool:  # noqa: ANN401 - as above
    """Return whether a view has limits, or is exempt from those of the middleware."""
    view_class = class_of(view)
    methods = () if view_class is None else [getattr(view_class, name, None) for name in dir(view_class)]
    return any(is_limited(each) or is_exempt(each) for each in (view, view_class, *methods))


def views_of(patterns: Any) -> Iterator[Any]:  # noqa: ANN401 - of Django
    """Yield all views of URL patterns."""
    for pattern in patterns:
        if hasattr(pattern, "url_patterns"):
            yield from views_of(pattern.url_patterns)
        else:
            yield pattern.callback
