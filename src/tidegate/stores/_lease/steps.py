"""The steps of the flows of a leased store, and the jobs that run in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate._runtime.flow import Flow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Policy
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask
    from tidegate.stores._lease.key_lease import KeyLease
    from tidegate.stores._lease.policy_leases import PolicyLeases
    from tidegate.stores._values import Write


class StoreRequest(NamedTuple):
    """A request to the inner store: the arguments of `Store.apply`. With `share`, no fallback may answer it."""

    verb: str
    asks: Sequence[Ask]
    now: int | None = None
    at: int | None = None
    share: bool = False
    writes: Sequence[Write] = ()


LeaseFlow = Flow[StoreRequest, Any]  # receives a list of Decisions for each StoreRequest


class Renewal(NamedTuple):
    """A job: request the share that follows the current one."""

    leases: PolicyLeases
    key_lease: KeyLease


class DeferredCall(NamedTuple):
    """A job: a correction or reset whose task was cancelled before its request was sent (arguments of `apply_flow`)."""

    verb: str
    asks: Sequence[Ask]
    now: int | None
    at: int | None


def with_policy_limits(policy: Policy, decision: Decision) -> Decision:
    """Return a decision on the stricter limits as one on the policy's own limits."""
    if decision.policy_limits is policy.limits:
        return decision
    kind = type(decision)  # a decision without the store stays one: nothing can be refunded
    return kind.of_views(decision.at, policy.limits, decision.views, within_limits=decision.within_limits)
