"""Describes accounts and members of pools: usage, state, refusals and cost.

For the dashboard, for the overview of the egress gateway, and so for `tidegate top`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.limiter import usage_of
from tidegate._policy.limit_text import describe_limit, describe_period
from tidegate._policy.units import is_money
from tidegate.core._bounds import SECOND
from tidegate.spending._report import format_amount

if TYPE_CHECKING:
    from tidegate.core import Limit
    from tidegate.outbound._providers.pool import Member
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.account import Account
    from tidegate.outbound._quota.gate import AsyncGate

MAX_MEMBERS: Final = 200  # of all pools
MAX_MEMBER_ACCOUNTS: Final = 200  # of one member


async def describe_members(gate: AsyncGate) -> list[dict[str, Any]]:
    """Describe the members of pools: what is left of their limits, and refusals and cost in this process."""
    return [await _describe_member(gate, provider, member) for provider, member in list_members(gate)]


def list_members(gate: AsyncGate) -> list[tuple[Provider, Member]]:
    """Return the members of pools, each with the provider that has the pool."""
    pools = [(provider, provider.pool) for provider in gate.providers if provider.pool is not None]
    return [(provider, member) for provider, pool in pools for member in pool.members][:MAX_MEMBERS]


def member_key(member: Member) -> tuple[str, str]:
    """Return how the keys of a member's accounts begin."""
    return member.provider.domain, f"member={member.name}"


async def _describe_member(gate: AsyncGate, provider: Provider, member: Member) -> dict[str, Any]:
    accounts = _accounts_of(gate, member)
    described = [await describe_account(gate, account) for account in accounts]
    rejected = any(account.key_rejected for account in accounts)
    paused = max(each["frozen_for"] for each in described)
    state = "drained" if member.drained else "key rejected" if rejected else "paused" if paused else "ready"
    return {
        "pool": provider.name,
        "member": member.name,
        "state": state,
        "refused": sum(account.refused for account in accounts),
        "cost_micros": sum(account.spent for account in accounts),
        "currency": currency_of(member.provider),
        "frozen_for": paused,
        "limits": [limit for each in described for limit in each["limits"]],
    }


def _accounts_of(gate: AsyncGate, member: Member) -> list[Account]:
    """Return the accounts of a member: one, or one for each model, path or credential that had calls."""
    own = member.provider
    key = member_key(member)
    found = [account for account in gate.accounts if account.key[:2] == key]
    if own.models or own.per:  # then no call is charged to the account of the member itself, unless it has no model
        found = [account for account in found if account.key != key or account.spent or account.refused] or found
    return found[:MAX_MEMBER_ACCOUNTS] or [gate.planner.open_account(own, key)]


async def describe_account(gate: AsyncGate, account: Account) -> dict[str, Any]:
    """Describe an account: what is left of its limits, its capacity, and refusals and cost in this process."""
    policy = account.limiter.policy
    (peeked,) = await gate.store.apply_async("peek", ((policy, account.key, (0,) * len(policy.limits)),))
    usage = usage_of(peeked)
    limits = [
        {"name": name, "text": format_limit(limit), "period": format_period(limit), **amount._asdict()}
        for limit, (name, amount) in zip(account.provider.limits, usage.items(), strict=True)
    ]
    return {
        "name": account.provider.name,
        "account": account.resource if account.resource != account.provider.domain else "",
        "capacity": account.capacity,
        "frozen_for": account.paused_for() / SECOND,
        "waiting": account.limiter.waiting,
        "refused": account.refused,
        "cost_micros": account.spent,
        "currency": currency_of(account.provider),
        "limits": limits,
    }


def currency_of(provider: Provider) -> str:
    """Return the currency of a provider's prices; empty: it has none, so what calls cost is unknown."""
    return "" if provider.prices is None else provider.prices.currency


def format_limit(limit: Limit) -> str:
    """Return a limit in words: "60 per minute", "5.00 usd per calendar day"."""
    if is_money(limit.unit):
        return f"{format_amount(limit.quota, limit.unit)} per {describe_period(limit)}"
    return describe_limit(limit)


def format_period(limit: Limit) -> str:
    """Format the period of a limit: "1m", "day"."""
    return str(limit).partition(" ")[0].partition("/")[2]
