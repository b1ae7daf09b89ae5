"""The requests that Envoy and other proxies ask about with descriptors: by domain and route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._policy.limit_text import describe_limit

if TYPE_CHECKING:
    from tidegate.service._decisions.policies import ServicePolicies
    from tidegate.service._decisions.stats import Totals

MAX_ROUTES: Final = 200


def describe_routes(policies: ServicePolicies, totals: Totals) -> list[dict[str, Any]]:
    """Describe the descriptors that have been used, those with the most denied requests first."""
    found: list[dict[str, Any]] = []
    for domain in policies.domains.values():
        for variant in domain.variants():
            count = totals.counts.get(variant.policy.name)
            if count is not None:
                found.append({
                    "category": domain.name,
                    "route": variant.policy.name.removeprefix(domain.name).lstrip("/") or "all",
                    "limits": [describe_limit(limit) for limit in variant.policy.limits],
                    "admitted": count.admitted,
                    "denied": count.denied,
                })  # fmt: skip
    found.sort(key=lambda route: (-route["denied"], -route["admitted"]))
    return found[:MAX_ROUTES]
