"""`/readyz`: whether clients should send requests to this service.

While the store is unavailable, each policy decides by its `on_store_error`. A service whose policies allow calls then,
or decide by a local share, still decides: its clients gain nothing if a load balancer removes it. The setting
`readiness` chooses:

    policies   not ready if a policy would deny calls because the store is unavailable (the default)
    store      not ready while the store is unavailable
    process    ready while the process runs, whatever the store does

The body contains the state, and how many policies allow, deny or decide locally; their names only for clients that may
request decisions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import StoreUnavailable
from tidegate.service._api.problems import HTTPReply, ProblemError

if TYPE_CHECKING:
    from tidegate._policy import Policy
    from tidegate.service._decisions.decider import Decider
    from tidegate.service._decisions.policies import ServicePolicies

MAX_NAMES: Final = 100  # of each kind of policy
READY: Final = HTTPReply(200, b'{"ok":true,"state":"ready"}')


async def check_readiness(decider: Decider, readiness: str, *, with_names: bool) -> HTTPReply:
    """Return the response for a service that is not stopping. Raises ProblemError if it is not ready."""
    try:
        await decider.probe()
    except StoreUnavailable:
        outcomes = outcomes_without_store(decider.policies)
        details: dict[str, Any] = {"policies": {outcome: len(names) for outcome, names in outcomes.items()}}
        if with_names:
            details["names"] = {outcome: names[:MAX_NAMES] for outcome, names in outcomes.items()}
        if readiness == "store" or (readiness == "policies" and outcomes["deny"]):
            raise not_ready(outcomes, details) from None
        return HTTPReply(200, json.dumps({"ok": True, "state": "deciding_without_store", **details}).encode())
    return READY


def not_ready(outcomes: dict[str, list[str]], details: dict[str, Any]) -> ProblemError:
    """Build the response for a service that is not ready because the store is unavailable."""
    denying, total = len(outcomes["deny"]), sum(map(len, outcomes.values()))
    state = "cannot_decide" if denying == total else "denying_some_policies" if denying else "deciding_without_store"
    detail = (
        f"the store is unavailable, and {denying} of {total} policies deny calls because of it: "
        "see the logs of the service and of the store"
    )
    return ProblemError("store-unavailable", detail, more={"state": state, **details})


def outcomes_without_store(policies: ServicePolicies) -> dict[str, list[str]]:
    """Return the names of the policies that deny, allow, or decide locally while the store is unavailable."""
    found: dict[str, list[str]] = {"deny": [], "allow": [], "local": []}
    for name, entry in policies.entries.items():
        found[outcome_without_store(entry.policy, enforced=entry.rollout > 0)].append(name)
    for domain in policies.domains.values():
        for variant in domain.variants():
            found[outcome_without_store(variant.policy)].append(variant.policy.name)
    return found


def outcome_without_store(policy: Policy, *, enforced: bool = True) -> str:
    """Return what a policy does while the store is unavailable; in shadow mode, it allows every call."""
    return policy.on_store_error if enforced and policy.mode == "enforce" else "allow"
