"""Limits on the blueprints of Flask and Quart: decided before a view runs, together with the limits of the view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate.inbound.limiting.limited_call import answer_denied, check_flow, report_exceeded
from tidegate.inbound.limiting.limited_functions import RouteUse, route_name
from tidegate.inbound.limiting.request_state import STATE_KEY
from tidegate.inbound.limiting.view_hook import BLUEPRINT_LIMITS, blueprint_limits, current_view, view_stack

if TYPE_CHECKING:
    from tidegate.flow import CallFlow
    from tidegate.inbound.limiting.limited_call import Framework
    from tidegate.inbound.limiting.request_state import RequestState
    from tidegate.inbound.limiting.route_limit import RouteLimit


def add_limit(limit: RouteLimit, blueprint: Any) -> bool:  # noqa: ANN401 - of Flask or Quart
    """Add a limit to every route of a blueprint; returns whether it is the first one."""
    known = vars(blueprint).setdefault(BLUEPRINT_LIMITS, [])
    for other in known:
        limit.share_store(other)
    known.append(limit)
    return len(known) == 1


def check_blueprints_flow(
    app: Any,  # noqa: ANN401 - of Flask or Quart
    request: Any,  # noqa: ANN401 - as above
    framework: Framework,
    *,
    tasks: bool,
) -> CallFlow[tuple[RequestState | None, Any]]:
    """Decide the limits of all blueprints of the current route, together with those of its view.

    Returns the state of a request that no middleware has seen, and the response to a denied request.
    """
    mapping = framework.mapping(request)
    request_state = mapping.get(STATE_KEY)
    route = route_name(current_view(app, request))
    covered = ("blueprints", route)
    if request_state is not None and request_state.covered is not None and covered in request_state.covered:
        return None, None
    stack = view_stack(app, request)
    uses = [RouteUse(each, route) for each in blueprint_limits(app, request)]
    if stack is not None:
        for use in stack.uses:
            uses[0].limit.share_store(use.limit)
        uses += stack.uses
    check = yield from check_flow(uses, request, mapping, framework, tasks=tasks)
    state, result = check.request_state, check.result
    if not result.allowed:
        return None, answer_denied(check, request, framework)
    report_exceeded(check, uses, request, framework)
    state.covered = {covered, *(() if stack is None else (stack, *stack.covers))}
    if not state.standalone:
        return None, None
    state.sees_response = True
    return state, None
