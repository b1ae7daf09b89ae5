"""Replays calls against the policies of a service, or limits given on the command line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy, join_key, normal_key
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import UNKNOWN, address_key, client_address, parse_address
from tidegate.plan._rules.base import Outcome, PolicyDecision
from tidegate.plan._rules.endpoints import endpoint_name
from tidegate.plan._uncertainty import shift_policy
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.policies import ConfiguredPolicy, ServicePolicies
from tidegate.stores._memory.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidegate._policy import Cost, Key
    from tidegate.core._limit import Limit
    from tidegate.plan._clock import ReplayClock
    from tidegate.plan._logs.batch import LogSender, LogSubject

MAX_KEYS: Final = 50_000_000


class ServiceRules:
    """The policies of a service. A call names its policy; if there is only one, it applies to every request."""

    due: int | None = None  # nothing is settled later

    def __init__(
        self,
        policies: ServicePolicies,
        clock: ReplayClock,
        *,
        trusted_proxies: Iterable[str] = (),
        has_durations: bool = True,
        shift: int = 0,
    ) -> None:
        """Replay against these policies; `shift`: see `plan.uncertainty`."""
        self.clock: ReplayClock = clock
        self.policies: ServicePolicies = policies
        if not policies.entries:
            raise ConfigError("has no policies, so there is nothing to replay", field="policies")
        self.limits: Mapping[str, tuple[Limit, ...]] = {
            name: entry.policy.limits for name, entry in policies.entries.items()
        }
        if any(limit.rules.holds_slots for limits in self.limits.values() for limit in limits):
            what = "only slots that are released are" if has_durations else "the log has no durations, which are"
            raise ConfigError(f"a limit of concurrent requests cannot be replayed here: {what} needed for it")
        self.patterns: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self._store = MemoryStore(clock=clock, max_entries=MAX_KEYS)
        self._shift = shift
        self._trusted = list(trusted_proxies)
        self._limiters: dict[str, Limiter] = {}  # by the slot of a variant
        self._keys: dict[LogSender, Key] = {}

    @classmethod
    def load(
        cls, file: str, clock: ReplayClock, trusted_proxies: Iterable[str], *, has_durations: bool, shift: int = 0
    ) -> ServiceRules:
        """Read a service file."""
        policies = load_settings(file, environment=os.environ).policies
        return cls(policies, clock, trusted_proxies=trusted_proxies, has_durations=has_durations, shift=shift)

    @classmethod
    def of_limits(
        cls,
        limits: Mapping[str, Iterable[str | Limit]],
        clock: ReplayClock,
        trusted_proxies: Iterable[str] = (),
        *,
        has_durations: bool = True,
        shift: int = 0,
    ) -> ServiceRules:
        """Replay against policies that are given as limits."""
        entries = {name: ConfiguredPolicy(Policy(name, own)) for name, own in limits.items()}
        policies = ServicePolicies(entries)
        return cls(policies, clock, trusted_proxies=trusted_proxies, has_durations=has_durations, shift=shift)

    def settle(self) -> None:
        """Settle nothing."""

    def find_key(self, sender: LogSender) -> Key:
        """Return the key of a call: the client's address, as the middleware reads it, or the key in the log."""
        found = self._keys.get(sender)
        if found is None:
            if len(self._keys) > MAX_KEYS:
                self._keys.clear()
            headers = [("x-forwarded-for", sender.forwarded)] if sender.forwarded else []
            key = sender.name or UNKNOWN
            if parse_address(sender.name) is not None:
                key = address_key(client_address(sender.name, headers, self._trusted))
            found = self._keys[sender] = normal_key(key)
        return found

    def name_of(self, key: object) -> str:
        """Return a key for people."""
        return join_key(key)  # type: ignore[arg-type]  # as `find_key` returns it

    def find(self, subject: LogSubject) -> ServiceSubject:
        """Return the policy of a call."""
        return ServiceSubject(self, subject)

    def limiter_of(self, policy: str, key: Key) -> Limiter:
        """Return the limiter of a policy for a key, which may have an override."""
        variant = self.policies.choose(policy, key)
        found = self._limiters.get(variant.slot)
        if found is None:
            found = self._limiters[variant.slot] = Limiter(shift_policy(variant.policy, self._shift), store=self._store)
        return found

    def close(self) -> None:
        """Close the store."""
        self._store.close()


class ServiceSubject:
    """Calls of one policy."""

    limited = True

    def __init__(self, rules: ServiceRules, subject: LogSubject) -> None:
        """Find the policy: the one that is named, or the only one."""
        self._rules = rules
        names = list(rules.policies.entries)
        named = subject.path if not subject.method and subject.path in names else ""
        if not named and not subject.method and len(names) > 1:
            rules.policies.choose(subject.path, "")  # raises ResourceUnknown, with advice
        if not named and len(names) > 1:
            raise ConfigError(
                f"the log does not say which of the policies {', '.join(names)} a request is charged to: it needs a "
                "column 'policy'"
            )
        self._name = named or names[0]
        self.policies: tuple[str, ...] = (self._name,)
        self.endpoint: str = endpoint_name(*subject, ()) if subject.method else subject.path or self._name
        self._one = rules.policies.entries[self._name].only_variant

    def decide(self, key: object, status: int, duration: int, cost: Cost) -> Outcome:
        """Decide about a call, as the service does."""
        del status, duration
        limiter = self._rules.limiter_of(self._name, key)  # type: ignore[arg-type]  # as `find_key` returns it
        policy = limiter.policy
        if not isinstance(cost, int):
            cost = {unit: amount for unit, amount in cost.items() if unit in policy.units}
        decision = limiter.try_acquire(key, cost)  # type: ignore[arg-type]  # as above
        charged = (PolicyDecision(self._name, decision),)
        allowed = decision.within_limits or policy.mode == "shadow"
        return Outcome(allowed, charged, () if allowed else charged)
