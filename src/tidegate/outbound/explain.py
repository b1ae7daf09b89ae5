"""Explains which limits of a provider apply to a request that is sent, with the code that limits it.

    found = explain_request(Providers.load(["models.yaml"]), "POST", "https://api.example.com/v1/chat")
    found.limits[0].name, found.limits[0].at_once, found.verdict

It sends nothing and reads no usage: the result is that for an unused quota. `tidegate explain` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from tidegate._policy.explanation import (
    ApplicableLimit,
    ExplainedDenial,
    Explanation,
    RuleVerdict,
    after_burst,
    show_key,
)
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate._runtime.urls import redact
from tidegate.errors import Denied
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._quota.cost import cost_of, endpoint_of
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound._quota.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._providers.registry import Providers
    from tidegate.outbound._quota.account import Account

__all__ = ["ApplicableLimit", "ExplainedDenial", "Explanation", "RuleVerdict", "explain_request"]

SCOPE_NAMES: Final = {"host": "host", "path": "endpoint", "credential": "credential", "model": "model"}


def explain_request(
    providers: Providers, method: str, url: str, *, headers: Sequence[tuple[str, str]] = (), body: bytes | None = None
) -> Explanation:
    """Explain which limits apply to a request: the strictest first, the provider, its key and cost, and the denial."""
    fields = {name.lower(): value for name, value in headers}
    request = OutboundRequest(
        method, url, lambda name: fields.get(name.lower()), lambda: body, replays=False, unreached=lambda _error: False
    )
    clock = ManualClock(SystemClock.ns() / 1e9)  # it does not advance, so nothing is refilled
    gate = Gate(providers, "memory://", timeout=0, clock=clock, reload=None)
    try:
        return _explain_call(gate, request)
    finally:
        gate.close()


def _explain_call(gate: Gate, request: OutboundRequest) -> Explanation:
    """Ask a gate about a request."""
    host = host_of(request.url)
    found = Explanation(f"{request.method} {redact(request.url)}", "provider")
    chosen = gate.planner.find_provider(request.url)
    for provider in gate.providers:
        found.rules.append(_explain_domain(provider, chosen, host))
    if chosen is None:
        found.verdict = f"Not limited: no provider has the domain {host} or a parent of it."
        return found
    found.rules += _explain_costs(chosen, request)
    account = gate.planner.account(chosen, request)
    cost = cost_of(account, request, None)
    found.verdict = f"Limited by the provider {chosen.name}."
    found.key, found.key_reason = show_key(account.key), _describe_scope(chosen)
    found.add_policy(account.provider.title, account.provider.policy, cost)
    for ceiling in chosen.ceilings:
        found.notes.append(f"The ceiling {ceiling.policy.name.removeprefix('spend:')} also applies: {ceiling.limit}.")
    if chosen.pool is not None:
        members = ", ".join(member.name for member in chosen.pool.members)
        found.notes.append(f"The provider is a pool of {members}. The limits are those of the first member.")
    found.sort()
    _explain_denial(gate, account, found, request)
    return found


def _explain_domain(provider: Provider, chosen: Provider | None, host: str) -> RuleVerdict:
    """Say whether a provider is the one of a host."""
    if provider is chosen:
        return RuleVerdict(provider.name, provider.domain, matches=True)
    below = host == provider.domain or host.endswith(f".{provider.domain}")
    reason = "another provider has a longer domain" if below else f"{host} is neither this domain nor below it"
    return RuleVerdict(provider.name, provider.domain, matches=False, reason=reason)


def _explain_costs(provider: Provider, request: OutboundRequest) -> list[RuleVerdict]:
    """Say which endpoint sets the cost."""
    found, chosen = [], endpoint_of(provider, request)
    path = urlsplit(request.url).path or "/"
    for endpoint in provider.endpoints:
        pattern = " ".join((",".join(endpoint.methods), endpoint.path, f"(cost {endpoint.cost})")).strip()
        reason = "the path differs"
        if endpoint.pattern.fullmatch(path):
            others = bool(endpoint.methods) and request.method not in endpoint.methods
            reason = f"its methods do not include {request.method}" if others else "an earlier endpoint matches"
        found.append(RuleVerdict("endpoint", pattern, endpoint is chosen, "" if endpoint is chosen else reason))
    return found


def _describe_scope(provider: Provider) -> str:
    """Say what has a quota of its own."""
    if not provider.per:
        return "one quota for all requests to the provider"
    return f"a quota for each {' and '.join(SCOPE_NAMES[scope] for scope in provider.per)}"


def _explain_denial(gate: Gate, account: Account, found: Explanation, request: OutboundRequest) -> None:
    """Use up the strictest limit, and keep what the next request would raise."""
    strictest = found.strictest
    if strictest is None or not strictest.at_once:
        return
    account.limiter.try_acquire(account.key, {strictest.unit: strictest.at_once * strictest.cost})
    when = f"{after_burst(strictest.at_once, 'request')}, the next one waits for {strictest.name}:"
    try:
        gate.run(gate.send_flow(request, lambda *_arguments: None))
    except Denied as denied:
        retry = denied.decision.retry_after
        says = [f"if the request may not wait that long, the client library raises: {denied}"]
        found.denial = ExplainedDenial(when, says, {"retry_after": retry, "message": str(denied)})
