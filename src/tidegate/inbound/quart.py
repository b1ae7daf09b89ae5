"""Limits on single routes in Quart: `@limit("5/1m")` below `@app.get("/…")`, or `limit("5/1m")(blueprint)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import call
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, TypeVar

from tidegate.errors import ConfigError
from tidegate.flow import run_async
from tidegate.inbound.limiting.asgi_responses import ScopeRequests, make_request
from tidegate.inbound.limiting.blueprint_limits import add_limit, check_blueprints_flow
from tidegate.inbound.limiting.denials import write_result
from tidegate.inbound.limiting.fast_decision import decide_deferred
from tidegate.inbound.limiting.limited_call import FrameworkLimit, LimitedBlock, decorate, settle_standalone_flow
from tidegate.inbound.limiting.limited_functions import exempt
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.route_decisions import standalone_fields
from tidegate.inbound.limiting.view_hook import ViewHook, add_missing_headers, status_of

try:
    import quart
    from werkzeug.datastructures import Headers
    from werkzeug.exceptions import HTTPException

    from tidegate.inbound.limiting.werkzeug_denial import RequestLimitExceeded
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("tidegate.inbound.quart requires Quart: pip install quart") from error

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.inbound import responses
    from tidegate.inbound.limiting.request_state import RequestState

__all__ = ["RequestLimitExceeded", "exempt", "limit"]

V = TypeVar("V", bound=Callable[..., object] | quart.Blueprint)  # what is limited
SWITCHING_PROTOCOLS: Final = 101  # the status of a websocket


class QuartFramework(ScopeRequests):
    """Requests and responses of Quart."""

    request_type: Final = ()  # the request is not an argument

    def find_request(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any function
        """Return the current request, or the current websocket."""
        del function, args, kwargs
        proxy: Any = quart.request if quart.has_request_context() else quart.websocket
        return proxy._get_current_object()  # noqa: SLF001 - a public method of proxies

    def make_response(self, response: responses.response.Response) -> quart.Response:
        """Return the response to a denied request."""
        return quart.Response(response.body, response.status, headers=Headers(response.headers))

    def add_fields(self, response: Any, fields: list[tuple[str, str]]) -> Any:  # noqa: ANN401 - any response
        """Add header fields to the response that Quart makes of the result of a view."""
        if fields:

            @quart.after_this_request
            def add(made: Any) -> Any:  # noqa: ANN401 - any response
                made.headers.update(dict(fields))
                return made

        return response

    def error_response(self, error: Exception) -> HTTPException | None:
        """Return the exception if it is one that Quart sends as a response."""
        return error if isinstance(error, HTTPException) else None

    def status(self, response: Any) -> int:  # noqa: ANN401 - as above
        """Return the status of the result of a view."""
        return status_of(response)

    def make_error(self, response: responses.response.Response, decision: Decision, native: object) -> Exception:
        """Return the exception for a denied request."""
        del native
        denial: Any = self.make_response(response)
        if response.status != RequestLimitExceeded.code:
            return HTTPException(response=denial)
        if quart.has_request_context():

            @quart.after_this_request
            def add_headers(sent: Any) -> Any:  # noqa: ANN401 - any response
                add_missing_headers(sent, response)
                return sent

        return RequestLimitExceeded(response.body.decode("utf-8", "replace"), denial, decision)

    def deny_call(self, response: responses.response.Response, decision: Decision, native: object) -> NoReturn:
        """Raise the exception, which the error handlers of the application see."""
        raise self.make_error(response, decision, native)

    def report(self, native: object, *, exceeded: bool) -> None:
        """Set `quart.g.limited`."""
        del native
        quart.g.limited = exceeded


FRAMEWORK: Final = QuartFramework()


class limit(FrameworkLimit):  # noqa: N801 - used as a decorator
    """Limits the views that it decorates, or each route of a blueprint."""

    _framework: ClassVar = FRAMEWORK

    def __call__(self, view: V) -> V:
        """Decorate a view, sync or async, or add the limit to every route of a blueprint."""
        if isinstance(view, quart.Blueprint):
            if add_limit(self, view):
                view.before_request(check_blueprints)
                view.before_websocket(check_blueprints)
            return view
        return decorate(self, view, FRAMEWORK)  # type: ignore[no-any-return]  # the same type of function

    def check(self, request: quart.Request | quart.Websocket) -> LimitedBlock:
        """Limit a block: `async with limit.check(request):`; a denial raises RequestLimitExceeded."""
        return LimitedBlock(self, request, FRAMEWORK)


async def check_blueprints() -> Any:  # noqa: ANN401 - a response, or None
    """Decide the limits of all blueprints of the current route, together with those of its view."""
    request = FRAMEWORK.find_request(None, (), {})
    standalone, denial = await run_async(check_blueprints_flow(quart.current_app, request, FRAMEWORK, tasks=True), call)
    if standalone is not None:
        after = quart.after_this_request if quart.has_request_context() else quart.ctx.after_this_websocket
        after(functools.partial(finish_standalone, standalone))
    return denial


async def finish_standalone(request_state: RequestState, response: Any) -> Any:  # noqa: ANN401 - None for a websocket
    """Settle what depends on the response and add the header fields: no middleware does."""
    status = SWITCHING_PROTOCOLS if response is None else response.status_code
    await run_async(settle_standalone_flow(request_state, status), call)
    if response is not None:
        response.headers.update(dict(standalone_fields(request_state)))
    return response


class QuartViewHook(ViewHook):
    """Decides what the middleware left pending, before the view of a route without limits runs."""

    def install(self) -> None:
        """Decide before the functions that the application has registered with `before_request`."""
        preprocess = self.app.preprocess_request

        async def preprocess_request(*args: Any) -> Any:  # noqa: ANN401 - as Quart has it
            denial = await self._decide_before_view()
            return await preprocess(*args) if denial is None else denial

        self.app.preprocess_request = preprocess_request

    async def _decide_before_view(self) -> quart.Response | None:
        request = FRAMEWORK.find_request(None, (), {})
        scope = request.scope
        request_state = scope.get(STATE_KEY)
        if request_state is None or not request_state.is_pending or not self.decides(request, request_state):
            return None
        if decide_deferred(request_state):
            return None
        seen = make_request(scope, request_state.client)
        result = await run_async(request_state.charge_flow((), seen, tasks=True), call)
        return None if result.allowed else FRAMEWORK.make_response(write_result(result, seen, seen))
