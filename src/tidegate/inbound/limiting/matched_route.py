"""What an ASGI framework has matched: the template of the route, its name, and whether its mount point is constant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Scope = Any  # a mutable mapping; frameworks have different types for it


def find_template(scope: Scope) -> str | None:
    """Return the template of the route that the framework has already matched, or None."""
    route = scope.get("route")
    if route is None or not hasattr(route, "endpoint"):
        return None  # no route, or a mount, whose route is not matched yet
    # For included routers, FastAPI keeps the path with its prefix in another object.
    included = scope.get("fastapi", {}).get("effective_route_context")
    if getattr(included, "original_route", None) is route:
        route = getattr(included, "starlette_route", None) or included
    template = getattr(route, "path", None)
    return template if isinstance(template, str) else None


def has_fixed_mount(scope: Scope) -> bool:
    """Return whether the mount point is constant, unlike Starlette's Mount("/{tenant}"), which the client chooses."""
    root, parts = scope.get("root_path"), scope.get("path_params")
    return not root or not parts or not any(str(part) in root for part in parts.values())


def matched_route_name(scope: Scope, route: Any) -> str:  # noqa: ANN401 - any route
    """Name the route that was matched: its methods, the mount point of its application, and its template."""
    methods = "|".join(sorted(getattr(route, "methods", None) or ["WEBSOCKET"]))
    root = scope.get("root_path") or ""
    mount = root.removeprefix(scope.get("app_root_path", root)) if has_fixed_mount(scope) else ""
    return f"{methods} {mount}{find_template(scope) or getattr(route, 'path', '')}"
