"""Explains a request that a program sends: the provider that limits it, its quota, its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidegate._cli.explanation import Explanation, RuleVerdict, show_key
from tidegate._cli.output import counted
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate._runtime.urls import redact
from tidegate.errors import Denied
from tidegate.outbound import Providers
from tidegate.outbound._providers.hosts import host_of
from tidegate.outbound._quota.cost import cost_of, endpoint_of
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound._quota.gate import Gate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tidegate.outbound import Provider
    from tidegate.outbound._quota.account import Account

Headers = list[tuple[str, str]]
SCOPE_NAMES = {"host": "host", "path": "endpoint", "credential": "credential", "model": "model"}


def explain_sent(
    method: str,
    url: str,
    *,
    headers: Headers,
    body: bytes | None = None,
    files: Sequence[Path | str] = (),
    folders: Sequence[Path | str] = (),
) -> Explanation:
    """Explain which limits of provider files apply to a request."""
    providers = Providers.load(files, folders, permissions="ignore")
    fields = {name.lower(): value for name, value in headers}
    request = OutboundRequest(
        method, url, lambda name: fields.get(name.lower()), lambda: body, replays=False, unreached=lambda _error: False
    )
    clock = ManualClock(SystemClock.ns() / 1e9)  # it does not advance, so nothing is refilled
    gate = Gate(providers, "memory://", timeout=0, clock=clock, reload=None)
    try:
        return explain_call(gate, request)
    finally:
        gate.close()


def explain_call(gate: Gate, request: OutboundRequest) -> Explanation:
    """Ask a gate about a request."""
    host = host_of(request.url)
    found = Explanation(f"{request.method} {redact(request.url)}", "provider")
    chosen = gate.planner.find_provider(request.url)
    for provider in gate.providers:
        found.rules.append(explain_domain(provider, chosen, host))
    if chosen is None:
        found.verdict = f"Not limited: no provider has the domain {host} or a parent of it."
        return found
    found.rules += explain_costs(chosen, request)
    account = gate.planner.account(chosen, request)
    cost = cost_of(account, request, None)
    found.verdict = f"Limited by the provider {chosen.name}."
    found.key, found.key_reason = show_key(account.key), describe_scope(chosen)
    found.add_policy(account.provider.title, account.provider.policy, cost)
    for ceiling in chosen.ceilings:
        found.notes.append(f"The ceiling {ceiling.policy.name.removeprefix('spend:')} also applies: {ceiling.limit}.")
    if chosen.pool is not None:
        members = ", ".join(member.name for member in chosen.pool.members)
        found.notes.append(f"The provider is a pool of {members}. The limits are those of the first member.")
    found.sort()
    explain_denial(gate, account, found, request)
    return found


def explain_domain(provider: Provider, chosen: Provider | None, host: str) -> RuleVerdict:
    """Say whether a provider is the one of a host."""
    if provider is chosen:
        return RuleVerdict(provider.name, provider.domain, matches=True)
    below = host == provider.domain or host.endswith(f".{provider.domain}")
    reason = "another provider has a longer domain" if below else f"{host} is neither this domain nor below it"
    return RuleVerdict(provider.name, provider.domain, matches=False, reason=reason)


def explain_costs(provider: Provider, request: OutboundRequest) -> list[RuleVerdict]:
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


def describe_scope(provider: Provider) -> str:
    """Say what has a quota of its own."""
    if not provider.per:
        return "one quota for all requests to the provider"
    return f"a quota for each {' and '.join(SCOPE_NAMES[scope] for scope in provider.per)}"


def explain_denial(gate: Gate, account: Account, found: Explanation, request: OutboundRequest) -> None:
    """Use up the strictest limit, and keep what the next request would raise."""
    strictest = found.strictest
    if strictest is None or not strictest.at_once:
        return
    account.limiter.try_acquire(account.key, {strictest.unit: strictest.at_once * strictest.cost})
    when = f"after {counted(strictest.at_once, 'such request')} at once, the next one waits for {strictest.name}:"
    try:
        gate.run(gate.send_flow(request, lambda *_arguments: None))
    except Denied as denied:
        retry = denied.decision.retry_after
        says = [f"if the request may not wait that long, the client library raises: {denied}"]
        found.denial = {"when": when, "retry_after": retry, "message": str(denied), "says": says}
