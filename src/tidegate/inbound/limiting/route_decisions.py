"""Decides the limits of a route for one request, with and without a middleware in front."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tidegate.inbound.limiting.denials import write_result
from tidegate.inbound.limiting.request_state import RequestState, make_state
from tidegate.inbound.responses.response import fit_to_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.charges import ChargeResult
    from tidegate.inbound.limiting.limited_functions import RouteUse
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.inbound.responses.response import Response

log: logging.Logger = logging.getLogger("tidegate.inbound")


def decide_uses_flow(
    uses: Sequence[RouteUse],
    request_state: RequestState,
    request: Request,
    native: object,
    client: RequestClient,
    *,
    tasks: bool,
    more: bool = False,
) -> CallFlow[ChargeResult]:
    """Decide the limits of a route together with what is pending. `more`: other limits may be decided later."""
    request_state.override_defaults(uses, request.method)
    chosen = request_state.chosen_client
    if chosen is None:
        identifier = request_state.request_limiter.client_identifier
        chosen = request_state.chosen_client = identifier.choose_client(request, client)
    charges = []
    for use in uses:
        request_limiter = use.limit.request_limiter_for(request_state)
        sender = client if use.limit.by_address else chosen
        charge = yield from use.limit.make_charge_flow(
            request, native, request_limiter, sender, use.policy_name, tasks=tasks
        )
        if charge is not None:
            charges.append(charge)
    result = yield from request_state.charge_flow(charges, request, tasks=tasks, more=more, client=client)
    if not result.allowed:
        for each in result.denials:
            limit = each.charge.route_limit
            if limit is not None and limit.on_denied is not None:
                call_on_denied(limit, native, each.decision)
    return result


def call_on_denied(limit: RouteLimit, native: object, decision: Decision) -> None:
    """Call the function `on_denied` of a limit. The client gets its 429 even if the function fails."""
    assert limit.on_denied is not None  # noqa: S101 - the caller checks it
    try:
        limit.on_denied(native, decision)
    except Exception:
        log.exception("%s: the function on_denied failed", limit.name)


def standalone_state(limit: RouteLimit, client: RequestClient) -> RequestState:
    """Return the state of a request that no middleware has seen; nothing handles its response yet."""
    request_state = make_state(limit.own_request_limiter(), client)
    request_state.standalone, request_state.sees_response = True, False
    return request_state


def deny(result: ChargeResult, request: Request, native: object, request_state: RequestState) -> Response:
    """Build the response to a denied request; without a middleware in front, with the header fields."""
    response = write_result(result, request, native)
    fields = fit_to_status(standalone_fields(request_state), response.status)
    return response._replace(headers=(*response.headers, *fields))


def standalone_fields(request_state: RequestState) -> list[tuple[str, str]]:
    """Return the header fields of a request that no middleware has seen; a middleware adds them itself."""
    decision = request_state.combined_decision if request_state.standalone else None
    return [] if decision is None else request_state.request_limiter.response_writer.fields(decision)


def find_client(
    request_state: RequestState | None,
    request_limiter: RequestLimiter,
    peer: str | None,
    headers: Any,  # noqa: ANN401 - of any framework
) -> RequestClient:
    """Return the client as identified by the middleware in front, or identify it."""
    known = request_state.client if request_state is not None else None
    return request_limiter.client_identifier.find(peer, headers) if known is None else known
