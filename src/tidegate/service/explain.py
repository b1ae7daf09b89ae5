"""Explains which limits of a service apply to a call: the policy, its overrides and rollout, the limits of a key.

    found = explain_call(load_settings("service.yaml"), "api", "partner:acme")
    found.limits[0].name, found.limits[0].at_once, found.verdict

It reads no usage: the result is that for a new key. `tidegate explain` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate._limiter.limiter import Limiter
from tidegate._policy import normal_key
from tidegate._policy.durations import format_duration
from tidegate._policy.explanation import (
    ApplicableLimit,
    ExplainedDenial,
    Explanation,
    RuleVerdict,
    after_burst,
    show_key,
)
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate.service._decisions.policies import FULL_ROLLOUT, rollout_percent

if TYPE_CHECKING:
    from tidegate._policy import Cost, Key, Policy
    from tidegate.service._config.settings import Settings

__all__ = ["ApplicableLimit", "ExplainedDenial", "Explanation", "RuleVerdict", "explain_call"]


def explain_call(settings: Settings, policy: str, key: Key, cost: Cost = 1) -> Explanation:
    """Explain which limits apply to a call: the strictest first, the overrides that match, and the denial."""
    key = normal_key(key)
    found = Explanation(f"policy {policy}, key {show_key(key)}", "service", show_key(key))
    chosen_policy = settings.policies.choose(policy, key).policy
    entry = settings.policies.entries[policy]
    chosen = next(
        (number for number, pair in enumerate(entry.variants) if chosen_policy in (pair[0].policy, pair[1].policy)), 0
    )
    for number, override in enumerate(entry.overrides, start=1):
        reason = "the key differs" if not override.matches(key) else "an exact or earlier override matches"
        limits = f"{show_key(override.key)}: {', '.join(map(str, override.limits))}"
        found.rules.append(RuleVerdict("override", limits, number == chosen, "" if number == chosen else reason))
    found.rules.append(
        RuleVerdict(
            "policy", ", ".join(map(str, entry.policy.limits)), not chosen, "an override matches" if chosen else ""
        )
    )
    found.verdict = f"Limited by {'an override of ' if chosen else ''}the policy {policy}."
    if entry.rollout < FULL_ROLLOUT:
        place = rollout_percent(policy, key)
        enforced = "enforced" if chosen_policy.mode == "enforce" else "in shadow mode"
        found.notes.append(
            f"The rollout is {entry.rollout:g} %. This key is at {place:.2f} %, so the policy is {enforced} for it."
        )
    found.add_policy(policy, chosen_policy, cost)
    found.sort()
    _explain_denial(found, chosen_policy, key, cost)
    return found


def _explain_denial(found: Explanation, policy: Policy, key: Key, cost: Cost) -> None:
    """Use up the strictest limit, and keep what the next call would get."""
    strictest = found.strictest
    if strictest is None:
        found.notes.append("Nothing is denied: the policy is in shadow mode, which only counts.")
        return
    with Limiter(policy, clock=ManualClock(SystemClock.ns() / 1e9)) as limiter:
        if strictest.at_once:
            limiter.try_acquire(key, {strictest.unit: strictest.at_once * strictest.cost})
        decision = limiter.try_acquire(key, cost)
    retry = decision.retry_after
    wait = "never: it costs more than the limit can ever allow" if retry is None else f"in {format_duration(retry)}"
    when = f"{after_burst(strictest.at_once, 'call')}, {strictest.name} denies the next one:"
    says = [f"denied by {', '.join(decision.violated)}, allowed again {wait}"]
    found.denial = ExplainedDenial(when, says, {"violated": list(decision.violated), "retry_after": retry})
