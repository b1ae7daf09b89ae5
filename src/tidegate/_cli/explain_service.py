"""Explains a call of a running service: the policy, its overrides and rollout, and the limits for a key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate._cli.explanation import Explanation, RuleVerdict, show_key
from tidegate._limiter.limiter import Limiter
from tidegate._policy import normal_key
from tidegate._policy.durations import format_duration
from tidegate._runtime.clock import ManualClock, SystemClock
from tidegate.service._decisions.policies import FULL_ROLLOUT, rollout_percent

if TYPE_CHECKING:
    from tidegate._policy import Cost, Key, Policy
    from tidegate.service._config.settings import Settings


def explain_policy(settings: Settings, name: str, key: Key, cost: Cost = 1) -> Explanation:
    """Explain which limits apply to a call with a key."""
    key = normal_key(key)
    found = Explanation(f"policy {name}, key {show_key(key)}", "service", show_key(key))
    policy = settings.policies.choose(name, key).policy
    entry = settings.policies.entries[name]
    chosen = next(
        (number for number, pair in enumerate(entry.variants) if policy in (pair[0].policy, pair[1].policy)), 0
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
    found.verdict = f"Limited by {'an override of ' if chosen else ''}the policy {name}."
    if entry.rollout < FULL_ROLLOUT:
        place = rollout_percent(name, key)
        enforced = "enforced" if policy.mode == "enforce" else "in shadow mode"
        found.notes.append(
            f"The rollout is {entry.rollout:g} %. This key is at {place:.2f} %, so the policy is {enforced} for it."
        )
    found.add_policy(name, policy, cost)
    found.sort()
    explain_denial(found, policy, key, cost)
    return found


def explain_denial(found: Explanation, policy: Policy, key: Key, cost: Cost) -> None:
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
    when = f"after {strictest.at_once:,} such calls at once, {strictest.name} denies the next one:"
    says = [f"denied by {', '.join(decision.violated)}, allowed again {wait}"]
    found.denial = {"when": when, "violated": list(decision.violated), "retry_after": retry, "says": says}
