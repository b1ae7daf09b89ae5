"""Which account a request is charged to, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tidegate.outbound.providers.hosts import host_of
from tidegate.outbound.providers.provider import CATCH_ALL_DOMAIN
from tidegate.outbound.quota.exchange import credential_of
from tidegate.outbound.quota.tokens import estimate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate.outbound.providers.provider import EndpointCost, Provider
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.exchange import OutboundRequest
    from tidegate.policy import Cost, Key


def key_of(provider: Provider, call: OutboundRequest) -> Key:
    """Return the key of the quota that a request is charged to."""
    if not provider.per:
        return provider.domain
    parts = [provider.domain]
    if "host" in provider.per:
        parts.append(f"host={host_of(call.url)}")
    if "path" in provider.per:
        endpoint = endpoint_of(provider, call)
        parts.append(f"path={endpoint.path if endpoint else CATCH_ALL_DOMAIN}")
    if "credential" in provider.per:
        parts.append(f"credential={credential_of(provider.key_location, call)}")
    return tuple(parts)


def endpoint_of(provider: Provider, call: OutboundRequest) -> EndpointCost | None:
    """Return the endpoint with its own cost that a request matches."""
    return provider.endpoint(urlsplit(call.url).path or "/", call.method) if provider.endpoints else None


def cost_of(account: Account, call: OutboundRequest, asked: Mapping[str, int] | None) -> Cost:
    """Return the cost of a request: what the program `asked` for, the endpoint's cost, or an estimate."""
    if account.fixed_cost is not None and not asked:
        return account.fixed_cost
    provider = account.provider
    cost = provider.cost(endpoint_of(provider, call))
    estimated = [unit for unit in account.estimated if unit not in cost]
    if estimated:
        whole = estimate(call.body())
        cost = {**cost, **{unit: whole[unit] for unit in estimated}}
    if asked:
        cost = {**cost, **asked}
    return account.fit(cost)
