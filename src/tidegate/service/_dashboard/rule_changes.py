"""Describes what a reload of the configuration changed, in one line: for the marks in the charts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.service._decisions.policies import ConfiguredPolicy, ServicePolicies

MAX_CHANGES: Final = 5  # that are named
MAX_LENGTH: Final = 300  # characters


def describe_changes(before: ServicePolicies, after: ServicePolicies) -> str:
    """Return the policies that were added, removed or changed, and how: "login: 5/1m → 10/1m"."""
    changes = [f"{name} added" for name in after.entries if name not in before.entries]
    changes += [f"{name} removed" for name in before.entries if name not in after.entries]
    changes += [
        f"{name}: {describe_change(before.entries[name], entry)}"
        for name, entry in after.entries.items()
        if name in before.entries and before.entries[name] != entry
    ]
    if before.domains != after.domains:
        changes.append("domains changed")
    text = "; ".join(changes[:MAX_CHANGES]) or "no policy changed"
    more = f"; {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
    return text[:MAX_LENGTH] + more


def describe_change(before: ConfiguredPolicy, after: ConfiguredPolicy) -> str:
    """Return how a policy changed."""
    old, new = (", ".join(map(str, each.policy.limits)) for each in (before, after))
    if old != new:
        return f"{old} → {new}"
    if before.policy.mode != after.policy.mode:
        return f"{before.policy.mode} → {after.policy.mode}"
    if before.rollout != after.rollout:
        return f"rollout {before.rollout:g} % → {after.rollout:g} %"
    return "overrides changed" if before.overrides != after.overrides else "changed"
