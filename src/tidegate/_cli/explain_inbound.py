"""Explains a request that an application receives, with the request limiter of the middlewares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidegate._cli.explanation import Explanation, RuleVerdict, show_key
from tidegate._cli.output import counted
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate._runtime.flow import run
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_targets import RequestTarget
from tidegate.inbound._responses.response import fit_to_status
from tidegate.inbound._rules.config import load_rules
from tidegate.inbound._rules.explain import explain_endpoints
from tidegate.inbound._rules.path_readings import wsgi_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._cli.explanation import ApplicableLimit
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.charges import RequestCharge
    from tidegate.inbound._rules.model import Rules
    from tidegate.inbound._rules.path_readings import Route

Headers = list[tuple[str, str]]


def explain_received(
    file: str,
    method: str,
    path: str,
    *,
    peer: str | None,
    headers: Headers,
    trusted: Sequence[str] = (),
    plan: str | None = None,
) -> Explanation:
    """Explain which limits of a middleware's file apply to a request."""
    clock = ManualClock(SystemClock.ns() / 1e9)  # it does not advance, so nothing is refilled
    plans = {name for category in load_rules(file).categories for name in category.plans}
    if plan is not None and plan not in plans:
        advice = did_you_mean(plan, plans) or f"the file has {', '.join(sorted(plans)) or 'no plans'}"
        raise ConfigError(f"there is no plan {plan!r}: {advice}", field="--plan")
    options: dict[str, Any] = {"plan": lambda _request: plan} if plans else {}
    limiter = RequestLimiter(file, "memory://", trusted, clock=clock, **options)
    try:
        return Explainer(limiter, method, path, peer, headers).explain()
    finally:
        limiter.store.close()


class Explainer:
    """Asks the request limiter of a file about one request."""

    def __init__(self, limiter: RequestLimiter, method: str, path: str, peer: str | None, headers: Headers) -> None:
        """Identify the client, and find the categories."""
        self.limiter = limiter
        self.method = method
        self.path, _, _ = path.partition("?")
        self.routes: tuple[Route, ...] = wsgi_routes(self.path, "")
        fields = {name.lower(): value for name, value in headers}
        self.client: RequestClient = limiter.client_identifier.find(peer, headers)
        self.peer = peer
        self.request = Request(method, self.path, self.client.address, None, lambda name: fields.get(name.lower()))
        target = limiter.targets.find((method, self.path), (method,), self.routes, None)
        self.target: RequestTarget = target or RequestTarget(())
        self.charges: list[RequestCharge] = []
        if self.client.key is not None:
            categories = limiter.plan_limiters.choose(self.request, self.target.categories)
            self.charges = limiter.make_charges(categories, self.client.key)

    def explain(self) -> Explanation:
        """Explain the request."""
        rules = self.limiter.rules
        found = Explanation(f"{self.method} {self.path} from {self.peer or 'an unknown address'}", "inbound")
        for verdict in explain_endpoints(rules, self.routes, self.method):
            pattern = " ".join((",".join(verdict.endpoint.methods), verdict.endpoint.path)).strip()
            found.rules.append(RuleVerdict(verdict.category, pattern, verdict.matches, verdict.reason))
        self._explain_key(found)
        found.verdict = self._verdict(rules, found)
        for charge in self.charges:
            found.add_policy(charge.policy.name, charge.policy, charge.cost)
        found.sort()
        if self.charges:
            self._explain_denial(found)
        return found

    def _explain_key(self, found: Explanation) -> None:
        address, key = self.client.address, self.client.key
        if key is None:
            found.key_reason = "exempt"
            return
        found.key = show_key(key)
        if address is None:
            found.key_reason = "the request has no address: set one with --from"
        elif found.key != address:
            found.key_reason = f"the network of {address}"
        elif address != self.peer:
            found.key_reason = f"the client that the trusted proxy {self.peer} names"
        else:
            found.key_reason = "the address of the client"

    def _verdict(self, rules: Rules, found: Explanation) -> str:  # noqa: PLR0911 - one for each reason
        """Say in one sentence why the limits apply, or why none does."""
        matched = [verdict for verdict in found.rules if verdict.matches]
        if not rules.enabled:
            return "Not limited: the rules are disabled (enabled: false)."
        if self.client.key is None:
            return f"Not limited: {self.client.address} is one of exempt_clients."
        if self.client.blocked:
            return f"Always denied: {self.client.address} is one of blocked_clients."
        if self.method in rules.exempt_methods:
            return f"Not limited: the method {self.method} is one of exempt_methods."
        if not self.charges and any(verdict.rule == "exempt" for verdict in matched):
            return "Not limited: the path is exempt."
        if not self.charges:
            return "Not limited: no endpoint matches, and there is no category for other requests (unmatched)."
        if not matched and rules.unmatched is not None:
            return (
                f"No endpoint matches, so the category for other requests applies: unmatched: {rules.unmatched.name}."
            )
        names = dict.fromkeys(verdict.rule for verdict in matched)
        return f"Limited by the category {', '.join(names)}." if names else "Limited by limits for every request."

    def _explain_denial(self, found: Explanation) -> None:
        """Use up the strictest limit, ask once more, and keep what the middleware would respond."""
        strictest = found.strictest
        if strictest is None and not self.client.blocked:
            found.notes.append("Nothing is denied: all limits are in shadow mode, which only counts and logs.")
            return
        if strictest is not None and not self.client.blocked:
            self._use_up(strictest)
        result = run(self.limiter.check_flow(self.request, self.target, self.client), perform)
        decision = result.decision
        if result.allowed or decision is None:
            return
        writer = self.limiter.response_writer
        response = result.write_denial(self.request, self.request)
        fields = fit_to_status(writer.fields(decision), response.status)
        body = response.body.decode()
        when = "every request is denied:"
        if strictest is not None and strictest.at_once and not self.client.blocked:
            when = f"after {counted(strictest.at_once, 'such request')} at once, {strictest.name} denies the next one:"
        head = [f"HTTP {response.line}", *(f"{name}: {value}" for name, value in fields), body]
        found.denial = {"when": when, "status": response.status, "headers": dict(fields), "body": body, "says": head}

    def _use_up(self, strictest: ApplicableLimit) -> None:
        """Charge as much as the limit allows at once."""
        for charge in self.charges:
            if charge.policy.name == strictest.owner and strictest.at_once:
                charge.limiter.try_acquire(charge.key, {strictest.unit: strictest.at_once * strictest.cost})
