"""WHO is limited by WHAT in the service: policies, their overrides and roll-outs, and descriptors. Immutable, pure.

A Rulebook answers one question: by which Policy is this key decided? Every policy that may be the answer is a Variant
with a `slot`, a name that stays the same when the file is read again, so that whoever waits keeps waiting.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

from tidegate.errors import ResourceUnknown
from tidegate.policy import Policy, join_key, normal_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate.core import Limit
    from tidegate.policy import Key
    from tidegate.service.decisions.descriptors import DescriptorDomain

FULL_ROLLOUT: Final = 100.0  # percent
ROLLOUT_STEPS: Final = 10_000  # a roll-out is exact to a hundredth of a percent
MAX_NAMES_LISTED: Final = 10  # names that an error lists


class PolicyVariant(NamedTuple):
    """One policy that keys may be decided by."""

    slot: str
    policy: Policy


@dataclass(frozen=True)
class KeyOverride:
    """Other limits for keys like this one; `*` stands for anything within a part."""

    key: Key
    limits: tuple[Limit, ...]

    @cached_property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """The parts of the key as patterns."""
        return tuple(re.compile(glob(part), re.DOTALL) for part in parts_of(self.key))

    @property
    def exact(self) -> bool:
        """Whether it is for one key only."""
        return not any("*" in part for part in parts_of(self.key))

    def matches(self, key: Key) -> bool:
        """Tell whether it is for this key."""
        parts = parts_of(key)
        if len(parts) != len(self.patterns):
            return False
        return all(pattern.fullmatch(part) for pattern, part in zip(self.patterns, parts, strict=True))


@dataclass(frozen=True)
class ConfiguredPolicy:
    """A policy of the file, and what it says of some of its keys.

    `rollout` is the share of keys, in percent, that the policy is enforced for; for the others it is in shadow mode.
    The same keys are among them each time, and stay so while the share grows.
    """

    policy: Policy
    rollout: float = FULL_ROLLOUT
    overrides: tuple[KeyOverride, ...] = ()
    plain: PolicyVariant | None = field(init=False, repr=False, compare=False, default=None)
    variants: tuple[tuple[PolicyVariant, PolicyVariant], ...] = field(init=False, repr=False, compare=False, default=())
    exact: dict[Key, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Make every variant once: as it is and in shadow mode, of the policy itself and of each override."""
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
            object.__setattr__(self, "plain", pairs[0][0])

    def choose(self, key: Key) -> PolicyVariant:
        """Find what a key is decided by: an override for exactly it, else the first that matches, else the policy."""
        if self.plain is not None:
            return self.plain
        number = self.exact.get(key, 0)
        if not number:
            number = next((n for n, each in enumerate(self.overrides, start=1) if each.matches(key)), 0)
        enforced, shadow = self.variants[number]
        return enforced if self.rollout >= FULL_ROLLOUT or share_of(self.policy.name, key) < self.rollout else shadow


@dataclass(frozen=True)
class ServicePolicies:
    """All policies by name, and the domains of descriptors."""

    entries: dict[str, ConfiguredPolicy] = field(default_factory=dict)
    domains: dict[str, DescriptorDomain] = field(default_factory=dict)

    def choose(self, name: str, key: Key) -> PolicyVariant:
        """Find what a key of a policy is decided by."""
        entry = self.entries.get(name)
        if entry is None:
            raise ResourceUnknown(f"there is no policy {name!r}: {known(self.entries)}")
        return entry.plain or entry.choose(key)

    def describe(self, domain: str, descriptor: Sequence[tuple[str, str]]) -> tuple[PolicyVariant, Key] | None:
        """Find what a descriptor is decided by, and as which key; None: it is not limited."""
        found = self.domains.get(domain)
        if found is None:
            raise ResourceUnknown(f"there is no domain {domain!r}: {known(self.domains)}")
        return found.match(descriptor)

    def variants(self) -> Iterator[PolicyVariant]:
        """Go through every policy that may be an answer."""
        for entry in self.entries.values():
            for pair in entry.variants:
                yield from pair
        for domain in self.domains.values():
            yield from domain.variants()

    @cached_property
    def slots(self) -> dict[str, PolicyVariant]:
        """Every variant by its slot."""
        return {variant.slot: variant for variant in self.variants()}


def parts_of(key: Key) -> tuple[str, ...]:
    """Give a key as its parts."""
    return (key,) if isinstance(key, str) else key


def glob(text: str) -> str:
    """Write a text with stars as a regular expression."""
    return ".*".join(map(re.escape, text.split("*")))


def share_of(name: str, key: Key) -> float:
    """Place a key of a policy somewhere from 0 to below 100, for ever the same."""
    return (
        crc32(f"{name}\n{join_key(key)}".encode("utf-8", "surrogatepass"))
        % ROLLOUT_STEPS
        * FULL_ROLLOUT
        / ROLLOUT_STEPS
    )


def known(names: dict[str, object] | dict[str, ConfiguredPolicy] | dict[str, DescriptorDomain]) -> str:
    """List what there is."""
    if not names:
        return "none is configured"
    shown = ", ".join(sorted(names)[:MAX_NAMES_LISTED])
    return f"known are {shown}" + (
        f" and {len(names) - MAX_NAMES_LISTED} more" if len(names) > MAX_NAMES_LISTED else ""
    )
