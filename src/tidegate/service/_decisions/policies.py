"""The configured policies of the service, with overrides, rollouts and descriptors. Immutable, without side effects.

`ServicePolicies` selects the Policy for a key. Every policy that it can select is a `PolicyVariant` with a `slot`, a
name that stays the same when the file is reloaded, so that waiting calls keep waiting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from tidegate._policy import Policy, join_key, normal_key
from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ResourceUnknown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate._policy import Key
    from tidegate.core import Limit
    from tidegate.service._decisions.descriptors import DescriptorDomain

FULL_ROLLOUT: Final = 100.0  # percent
ROLLOUT_STEPS: Final = 10_000  # a rollout is exact to 0.01 percent
MAX_NAMES_LISTED: Final = 10  # names that an error message lists, or that are compared with an unknown name


class PolicyVariant(NamedTuple):
    """A policy that can be selected for a key."""

    slot: str
    policy: Policy


@dataclass(frozen=True)
class KeyOverride:
    """Other limits for the keys that match; `*` matches any characters within a part."""

    key: Key
    limits: tuple[Limit, ...]

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """The parts of the key as patterns."""
        return tuple(re.compile(glob(part), re.DOTALL) for part in key_parts(self.key))

    @property
    def exact(self) -> bool:
        """Whether it matches one key only."""
        return not any("*" in part for part in key_parts(self.key))

    def matches(self, key: Key) -> bool:
        """Return whether it applies to this key."""
        parts = key_parts(key)
        if len(parts) != len(self.patterns):
            return False
        return all(pattern.fullmatch(part) for pattern, part in zip(self.patterns, parts, strict=True))


@dataclass(frozen=True)
class ConfiguredPolicy:
    """A policy of the file, with its overrides.

    `rollout` is the percentage of keys for which the policy is enforced; for the others it is in shadow mode. The
    selection is deterministic, and a key stays enforced when the percentage grows.
    """

    policy: Policy
    rollout: float = FULL_ROLLOUT
    overrides: tuple[KeyOverride, ...] = ()
    only_variant: PolicyVariant | None = field(init=False, repr=False, compare=False, default=None)
    variants: tuple[tuple[PolicyVariant, PolicyVariant], ...] = field(init=False, repr=False, compare=False, default=())
    exact: dict[Key, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Build all variants: of the policy and of each override, in the configured mode and in shadow mode."""
        name = self.policy.name
        pairs = []
        for key, limits in ((None, self.policy.limits), *((each.key, each.limits) for each in self.overrides)):
            policy = replace(self.policy, limits=limits)
            shadow = replace(policy, mode="shadow")
            pairs.append((PolicyVariant(repr((name, key)), policy), PolicyVariant(repr((name, key, "shadow")), shadow)))
        object.__setattr__(self, "variants", tuple(pairs))
        for number, each in enumerate(self.overrides, start=1):
            if each.exact:
                self.exact.setdefault(normal_key(each.key), number)
        if not self.overrides and self.rollout >= FULL_ROLLOUT:
            object.__setattr__(self, "only_variant", pairs[0][0])

    def choose(self, key: Key) -> PolicyVariant:
        """Return the variant for a key: an exact override, else the first matching override, else the policy."""
        if self.only_variant is not None:
            return self.only_variant
        number = self.exact.get(key, 0)
        if not number:
            number = next((n for n, each in enumerate(self.overrides, start=1) if each.matches(key)), 0)
        enforced, shadow = self.variants[number]
        return (
            enforced
            if self.rollout >= FULL_ROLLOUT or rollout_percent(self.policy.name, key) < self.rollout
            else shadow
        )


@dataclass(frozen=True)
class ServicePolicies:
    """All policies by name, and the domains of descriptors."""

    entries: dict[str, ConfiguredPolicy] = field(default_factory=dict)
    domains: dict[str, DescriptorDomain] = field(default_factory=dict)

    def choose(self, name: str, key: Key) -> PolicyVariant:
        """Return the variant for a key of a policy."""
        entry = self.entries.get(name)
        if entry is None:
            raise ResourceUnknown(f"there is no policy {name!r}: {describe_names(self.entries, name)}")
        return entry.only_variant or entry.choose(key)

    def match_descriptor(self, domain: str, descriptor: Sequence[tuple[str, str]]) -> tuple[PolicyVariant, Key] | None:
        """Return the variant and the key for a descriptor; None if it is not limited."""
        found = self.domains.get(domain)
        if found is None:
            raise ResourceUnknown(f"there is no domain {domain!r}: {describe_names(self.domains, domain)}")
        return found.match(descriptor)

    def variants(self) -> Iterator[PolicyVariant]:
        """Iterate over every policy that can be selected."""
        for entry in self.entries.values():
            for pair in entry.variants:
                yield from pair
        for domain in self.domains.values():
            yield from domain.variants()

    @cached_property
    def slots(self) -> dict[str, PolicyVariant]:
        """Every variant by its slot."""
        return {variant.slot: variant for variant in self.variants()}


def key_parts(key: Key) -> tuple[str, ...]:
    """Return the parts of a key."""
    return (key,) if isinstance(key, str) else key


def glob(text: str) -> str:
    """Translate a pattern with stars to a regular expression."""
    return ".*".join(map(re.escape, text.split("*")))


def rollout_percent(name: str, key: Key) -> float:
    """Map a key of a policy to a fixed number from 0 to below 100."""
    return (
        crc32(f"{name}\n{join_key(key)}".encode("utf-8", "surrogatepass"))
        % ROLLOUT_STEPS
        * FULL_ROLLOUT
        / ROLLOUT_STEPS
    )


def describe_names(
    names: dict[str, object] | dict[str, ConfiguredPolicy] | dict[str, DescriptorDomain], unknown: str
) -> str:
    """Return advice for an unknown name: the closest configured name, or all of them."""
    if not names:
        return "none is configured"
    if len(names) <= MAX_NAMES_LISTED and (near := did_you_mean(unknown, names)):
        return near
    shown = ", ".join(sorted(names)[:MAX_NAMES_LISTED])
    return f"known names are {shown}" + (
        f" and {len(names) - MAX_NAMES_LISTED} more" if len(names) > MAX_NAMES_LISTED else ""
    )
