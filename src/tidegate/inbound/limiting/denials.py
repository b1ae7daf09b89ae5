"""The response to a request that was denied by several limits together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.charges import ChargeResult
    from tidegate.inbound.responses.response import DenialHandler, Response


def write_result(result: ChargeResult, request: Request, native: object) -> Response:
    """Build the response to a denied request; `native` is the framework's request, for functions of route limits.

    The first denying limit that has a function `denied` chooses the response, otherwise the middleware does.
    """
    charge = result.denials[0].charge
    writer = charge.request_limiter.response_writer
    for each in result.denials:
        route_limit = each.charge.route_limit
        if route_limit is not None and route_limit.denied is not None:
            writer = writer.with_denied(partial(_call_with_native, route_limit.denied, native))
            break
    decision = result.decision
    assert decision is not None  # noqa: S101 - a denial has a decision
    return writer.write_denial(request, decision.with_views(), charge.policy)


def _call_with_native(denied: DenialHandler, native: object, request: Request, decision: Decision) -> Any:  # noqa: ANN401 - see DenialHandler
    """Call the function of a route limit, which receives the framework's own request."""
    del request
    return denied(native, decision)
