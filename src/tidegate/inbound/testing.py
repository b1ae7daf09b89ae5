"""For the tests of an application: disable its limits, or reset them.

with limits_disabled(app):      # a Starlette, FastAPI or Flask application, a middleware, or a limit(…)
    …
reset_limits(app)               # deletes the usage of every client, for example before each test
with limits_replaced(clock=…):  # what bare limits share, `@limit(…)` without a `Limits` and without a middleware
    …
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Unpack

from tidegate.errors import ConfigError
from tidegate.inbound._limiting.limited_call import own_request_limiter
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.route_limit import RouteLimit
from tidegate.inbound._limiting.standalone import SHARED_LIMITS, BaseLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidegate._runtime.clock import Clock
    from tidegate.inbound._limiting.options import LimitsOptions
    from tidegate.stores import Store

__all__ = ["limits_disabled", "limits_replaced", "reset_limits"]

MAX_WRAPPED_APPS: Final = 64  # wrapped applications that are inspected
WRAPPED_ATTRIBUTES: Final = (
    "middleware_stack",
    "wsgi_app",
    "asgi_app",
    "app",
    "application",
)  # attributes that hold an inner application


@contextmanager
def limits_disabled(*targets: object) -> Iterator[None]:
    """Disable all limits of the targets while the block runs: nothing is counted, denied or written into headers.

    A target is an application, a RateLimitMiddleware, or a `limit(…)` that is used without a middleware.
    """
    found = [each for each in _find_all(targets) if not each.disabled]
    for request_limiter in found:
        request_limiter.disable()
    try:
        yield
    finally:
        for request_limiter in found:
            request_limiter.disable(disabled=False)


@contextmanager
def limits_replaced(
    *, store: str | Store = "memory://", clock: Clock | None = None, **options: Unpack[LimitsOptions]
) -> Iterator[BaseLimits]:
    """Let bare limits use a new object while the block runs: they start without counts, by the given clock."""
    limits = BaseLimits(store=store, clock=clock, **options)
    before = SHARED_LIMITS.replace(limits)
    try:
        yield limits
    finally:
        SHARED_LIMITS.replace(before)
        limits.close()


def reset_limits(*targets: object) -> None:
    """Reset the usage of all clients of the targets; see `RequestLimiter.reset_all`. It blocks, also under ASGI."""
    for request_limiter in _find_all(targets):
        request_limiter.reset_all()


def _find_all(targets: tuple[object, ...]) -> list[RequestLimiter]:
    found = [request_limiter for target in targets for request_limiter in _find(target)]
    return list(dict.fromkeys(found))


def _find(target: object) -> list[RequestLimiter]:
    """Find the middlewares that an application is wrapped in, or wraps, as far as attributes show them."""
    if isinstance(target, RouteLimit):
        return [own_request_limiter(target)]
    found: list[RequestLimiter] = []
    waiting: list[Any] = [target]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_WRAPPED_APPS:
        app = waiting.pop()
        app = getattr(app, "__self__", app)  # the instance of a bound method
        if id(app) in seen:
            continue
        seen.add(id(app))
        request_limiter = app if isinstance(app, RequestLimiter) else getattr(app, "request_limiter", None)
        if isinstance(request_limiter, RequestLimiter):
            found.append(request_limiter)
        if hasattr(app, "build_middleware_stack") and app.middleware_stack is None:
            app.middleware_stack = app.build_middleware_stack()  # Starlette builds it at the first request
        waiting += [inner for name in WRAPPED_ATTRIBUTES if (inner := getattr(app, name, None)) is not None]
        waiting += getattr(app, "middlewares", ())
    if not found:
        raise ConfigError(
            f"{target!r} has no RateLimitMiddleware: pass the application, the middleware or the limit", field="targets"
        )
    return found
