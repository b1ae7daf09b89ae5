"""The gateway's own endpoints: health, metrics, the overview, and what a call would cost."""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from tidegate.core._bounds import SECOND
from tidegate.egress._bodies import RequestBody
from tidegate.egress._messages import EgressError, describe_cost, json_response, refusal
from tidegate.errors import RateLimitError, StoreUnavailable
from tidegate.observe._text_format import CONTENT_TYPE, write_families
from tidegate.outbound._quota.account_report import describe_members
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound._quota.money_metrics import read_money_metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tidegate.core import Decision
    from tidegate.egress._gateway import EgressGateway

ESTIMATE_PATH: Final = "/v1/egress/estimate"


class Endpoints:
    """Answers the requests that are for the gateway itself."""

    def __init__(self, gateway: EgressGateway) -> None:
        """Answer for a gateway."""
        self._gateway = gateway
        self._endpoints: dict[tuple[str, str], Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            ("GET", "/healthz"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/overview"): self._overview,
            ("POST", ESTIMATE_PATH): self._estimate,
        }

    def find(self, method: str, path: str) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]] | None:
        """Return what answers a path; None: the request is for a provider."""
        return self._endpoints.get((method, path))

    @staticmethod
    async def _health(_request: web.BaseRequest) -> web.StreamResponse:
        return json_response(200, {"status": "ok"})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_reader(request)
        families = [*self._gateway.families(), *await read_money_metrics(self._gateway.gate)]
        body = write_families(families)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _overview(self, request: web.BaseRequest) -> web.StreamResponse:
        self._check_reader(request)
        panels: dict[str, object] = {"egress": self._gateway.describe()}
        gate = self._gateway.gate
        if any(provider.pool is not None for provider in gate.providers):
            try:
                panels["pools"] = await describe_members(gate)
            except StoreUnavailable as error:
                panels["pools"] = {"error": str(error)}
        return json_response(200, {"panels": panels})

    def _check_reader(self, request: web.BaseRequest) -> None:
        """Refuse a client that may not read metrics: if callers are configured, it needs the metrics token."""
        settings = self._gateway.settings
        if not settings.callers:
            return
        if settings.metrics_token is None:
            raise EgressError(
                403, "forbidden", "set metrics_token: with callers, the metrics and the overview need a token"
            )
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token if scheme.lower() == "bearer" else request.headers.get("X-Tidegate-Token", "")
        if not hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), settings.metrics_token.encode()):
            raise EgressError(401, "unauthorized", "this needs the metrics token, as 'Authorization: Bearer TOKEN'")

    async def _estimate(self, request: web.BaseRequest) -> web.StreamResponse:
        """Estimate the cost and the wait of a call, from its URL or path, method and body."""
        gateway = self._gateway
        identity = gateway.identify(request)
        sent = RequestBody(request, gateway.settings, gateway.held, identity.caller.name)
        try:
            await sent.read_whole()
            sent.check_complexity()
            asked = read_estimate_request(sent.whole or b"")
        finally:
            sent.release()
        url, method = asked["url"], str(asked.get("method", "POST"))
        target = gateway.routes.find_reverse(url) if url.startswith("/") else gateway.routes.find_forward(url)
        if not identity.caller.may_use(target.provider.name):
            message = f"caller {identity.caller.name} may not use provider {target.provider.name}"
            raise EgressError(403, "provider-not-allowed", message)
        body = asked.get("body")
        text = body if isinstance(body, str) else json.dumps(body)
        content = None if body is None else text.encode("utf-8", "surrogatepass")
        call = OutboundRequest(
            method, target.quota_url, lambda _name: None, lambda: content, replays=True, unreached=lambda _error: False
        )
        try:
            estimate = await gateway.gate.estimate(call)
            own = await gateway.limits.peek(identity.caller, target.provider, call)
        except RateLimitError as error:
            raise refusal(error, target.provider) from None
        if estimate is None:
            raise EgressError(404, "unknown-provider", "no provider limits this URL")
        decision = estimate.decision
        decisions = [decision] if own is None else [decision, own]
        return json_response(
            200,
            {
                "provider": estimate.provider,
                "quota": estimate.quota,
                "cost": estimate.cost if not isinstance(estimate.cost, int) else {"requests": estimate.cost},
                "cost_text": describe_cost(estimate.cost),
                "allowed": all(each.allowed for each in decisions) and not estimate.waiting,
                "wait": longest_wait(decisions),
                "waiting": estimate.waiting,
                "remaining": remaining_of(decision),
                **({} if own is None else {"caller_remaining": remaining_of(own)}),
            },
        )


def longest_wait(decisions: Iterable[Decision]) -> float | None:
    """Return the seconds until all of these decisions would allow a call; None: one of them never will."""
    waits = [0 if decision.allowed else decision.retry for decision in decisions]
    return None if min(waits) < 0 else max(waits) / SECOND


def remaining_of(decision: Decision) -> dict[str, int]:
    """Return what is left of each limit, by its name."""
    return {
        limit.name: max(0, view.remaining) for limit, view in zip(decision.policy_limits, decision.views, strict=False)
    }


def read_estimate_request(body: bytes) -> dict[str, Any]:
    """Read the body of a request for an estimate."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or not isinstance(asked.get("url"), str) or not asked["url"]:
        message = 'expected JSON such as {"url": "/openai/v1/chat/completions", "method": "POST", "body": {}}'
        raise EgressError(400, "bad-request", message)
    return asked
