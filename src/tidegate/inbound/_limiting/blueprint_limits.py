"""Limits on the blueprints of Flask and Quart: decided before a view runs, together with the limits of the view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.inbound._limiting.limited_call import answer_denied, check_flow, denied_before_flow
from tidegate.inbound._limiting.limited_functions import EndpointLimits, route_name
from tidegate.inbound._limiting.request_state import STATE_KEY
from tidegate.inbound._limiting.werkzeug_routes import blueprint_uses, view_stack

if TYPE_CHECKING:
    from tidegate._runtime.flow import Flow
    from tidegate.inbound._limiting.limited_call import Framework
    from tidegate.inbound._limiting.limited_functions import LimitStack
    from tidegate.inbound._limiting.matched_route import RouteUse
    from tidegate.inbound._limiting.request_state import RequestState


def check_blueprints_flow(app: Any, request: Any, framework: Framework) -> Flow[Any, tuple[RequestState | None, Any]]:  # noqa: ANN401 - of Flask or Quart
    """Decide the limits of all blueprints of the current route, together with those of its view.

    Returns the state of a request that no middleware has seen, and the response to a denied request.
    """
    mapping = framework.mapping(request)
    request_state: RequestState | None = mapping.get(STATE_KEY)
    view = app.view_functions.get(request.endpoint or "")
    route = route_name(view)
    done = ("all blueprints", route)  # they were decided before an outer blueprint of the route
    if request_state is not None and done in request_state.covers:
        return None, None
    taken = request_state is not None and request_state.take(("blueprints", route))
    check = (yield from denied_before_flow(request_state, request, framework)) if taken else None
    stack = view_stack(view, request.method)
    if check is None:
        uses = _uses_now(app, request, route, stack, taken=taken)
        if not uses:
            if request_state is not None:
                request_state.cover([done])
            return None, None
        check = yield from check_flow(EndpointLimits(uses, reused=False), request, mapping, framework)
    state = check.request_state
    if not check.result.allowed:
        return None, answer_denied(check, request, framework)
    state.cover([done])
    for each in () if stack is None else (stack, *stack.covers):
        state.cover(each.marks)
    if not state.standalone or request_state is not None:
        return None, None
    state.sees_response = True
    return state, None


def _uses_now(app: Any, request: Any, route: str, stack: LimitStack | None, *, taken: bool) -> list[RouteUse]:  # noqa: ANN401 - as above
    """Return the limits that are decided now: of the blueprints and of the view; none if only the view has some.

    `taken`: the middleware has decided those without functions.
    """
    if request.method == "OPTIONS" and getattr(request.url_rule, "provide_automatic_options", False):
        return []  # the framework answers the request itself
    uses = blueprint_uses(app, request.endpoint, route, stack, request.method)
    if uses and stack is not None:
        uses += stack.uses
    return [use for use in uses if use.limit.has_functions] if taken else uses
