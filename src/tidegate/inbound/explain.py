"""Explains which limits of a middleware's configuration apply to a request, with the code that limits it.

    found = explain_request("config.yaml", "POST", "/login", address="203.0.113.9")
    found.limits[0].name, found.limits[0].at_once, found.verdict

It sends nothing and reads no usage: the result is that for a new client. `tidegate explain` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.explanation import (
    ApplicableLimit,
    ExplainedDenial,
    Explanation,
    RuleVerdict,
    after_burst,
    show_key,
)
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate._runtime.flow import run
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import parse_address
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.request_targets import RequestTarget
from tidegate.inbound._responses.response import fit_to_status
from tidegate.inbound._rules.config import load_rules
from tidegate.inbound._rules.model import MESSAGE_METHOD, find_endpoints
from tidegate.inbound._rules.path_readings import wsgi_routes
from tidegate.inbound._rules.paths import PathTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.charges import RequestCharge
    from tidegate.inbound._rules.model import Endpoint, Rules
    from tidegate.inbound._rules.path_readings import Route

__all__ = ["ApplicableLimit", "ExplainedDenial", "Explanation", "RuleVerdict", "explain_request"]

EXEMPT: Final = "exempt"


def explain_request(
    config: str | Path | Mapping[str, object] | None,
    method: str,
    path: str,
    *,
    address: str | None = None,
    headers: Sequence[tuple[str, str]] = (),
    trusted_proxies: Sequence[str] = (),
    plan: str | None = None,
) -> Explanation:
    """Explain which limits apply to a request: the strictest first, the rules that match, the key, and the denial.

    `config` and `trusted_proxies` are those of the middleware; `address` is where the request comes from, and `plan`
    the client's plan.
    """
    if address is not None and parse_address(address) is None:
        raise ConfigError(f"expected an address such as 203.0.113.9 or 2001:db8::1, not {address!r}", field="address")
    clock = ManualClock(SystemClock.ns() / 1e9)  # it does not advance, so nothing is refilled
    plans = {name for category in load_rules(config).categories for name in category.plans}
    if plan is not None and plan not in plans:
        advice = did_you_mean(plan, plans) or f"the file has {', '.join(sorted(plans)) or 'no plans'}"
        raise ConfigError(f"there is no plan {plan!r}: {advice}", field="plan")
    options: dict[str, Any] = {"plan": lambda _request: plan} if plans else {}
    limiter = RequestLimiter(config, "memory://", trusted_proxies, clock=clock, **options)
    try:
        return _Explainer(limiter, method, path, address, headers).explain()
    finally:
        limiter.store.close()


class EndpointVerdict(NamedTuple):
    """An endpoint, its category (`exempt` for exempt endpoints), and whether a request matches it; if not, why not."""

    category: str
    endpoint: Endpoint
    matches: bool
    reason: str


def explain_endpoints(rules: Rules, routes: Sequence[Route], method: str) -> Iterator[EndpointVerdict]:
    """Yield the verdict on every endpoint of the rules, in their order."""
    charged = {match.category.name for match in rules.matches(routes, (method,))}
    groups = [(EXEMPT, rules.exempt), *((category.name, category.endpoints) for category in rules.categories)]
    named = [(name, endpoint) for name, endpoints in groups for endpoint in endpoints]
    found = [_matches(endpoint, routes, method) for _, endpoint in named]
    exempted = not charged and any(each for each, (name, _) in zip(found, named, strict=True) if name == EXEMPT)
    for candidate, (name, endpoint) in zip(found, named, strict=True):
        if not candidate:
            yield EndpointVerdict(name, endpoint, matches=False, reason=_difference(endpoint, routes, method))
        elif name in charged or (name == EXEMPT and exempted):
            yield EndpointVerdict(name, endpoint, matches=True, reason="")
        else:
            reason = "the rules are disabled" if not rules.enabled else "another endpoint is more specific"
            if method in rules.exempt_methods:
                reason = f"the method {method} is exempt"
            yield EndpointVerdict(name, endpoint, matches=False, reason=reason)


def _matches(endpoint: Endpoint, routes: Sequence[Route], method: str, *, any_method: bool = False) -> bool:
    """Return whether a request would match an endpoint if there were no other."""
    methods = [each for each in endpoint.methods if each != MESSAGE_METHOD]
    if endpoint.methods and not methods:
        return False
    tree: PathTree[Endpoint] = PathTree()
    tree.add(endpoint.path, () if any_method else methods, endpoint)
    return any(find_endpoints(tree, routes, method))


def _difference(endpoint: Endpoint, routes: Sequence[Route], method: str) -> str:
    if endpoint.methods and set(endpoint.methods) == {MESSAGE_METHOD}:
        return "it is for websocket messages"
    if _matches(endpoint, routes, method, any_method=True):
        return f"its methods are {', '.join(endpoint.methods)}, not {method}"
    return "the path differs"


class _Explainer:
    """Asks the request limiter of a file about one request."""

    def __init__(
        self, limiter: RequestLimiter, method: str, path: str, peer: str | None, headers: Sequence[tuple[str, str]]
    ) -> None:
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
            when = f"{after_burst(strictest.at_once, 'request')}, {strictest.name} denies the next one:"
        head = [f"HTTP {response.line}", *(f"{name}: {value}" for name, value in fields), body]
        details: dict[str, object] = {"status": response.status, "headers": dict(fields), "body": body}
        found.denial = ExplainedDenial(when, head, details)

    def _use_up(self, strictest: ApplicableLimit) -> None:
        """Charge as much as the limit allows at once."""
        for charge in self.charges:
            if charge.policy.name == strictest.owner and strictest.at_once:
                charge.limiter.try_acquire(charge.key, {strictest.unit: strictest.at_once * strictest.cost})
