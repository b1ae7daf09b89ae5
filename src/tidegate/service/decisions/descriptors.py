"""Descriptors, as Envoy's rate limit service has them: a domain is a tree of keys and values, some with a limit.

A descriptor of a request is a list of (key, value). Each pair leads one level down: to the node of exactly that value,
else to one whose value ends with `*`, else to the node of the key alone. The limit is that of the node where the last
pair arrives; a descriptor that leads nowhere, or to a node without a limit, is not limited. Each combination of values
is counted apart, except at a node that shares its threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidegate.core import Limit
from tidegate.policy import Policy
from tidegate.service.decisions.policies import PolicyVariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate.policy import Key

# Envoy's units of time, by number and name; the period each is in ours, and the algorithm where that is none of ours.
ENVOY_UNITS: Final = ("unknown", "second", "minute", "hour", "day", "month", "year", "week")
UNIT_PERIODS: Final = {
    "second": "1s",
    "minute": "1m",
    "hour": "1h",
    "day": "1d",
    "week": "1w",
    "month": "month",
    "year": "year",
}
DEFAULT_ALGORITHM: Final = "fixed_window"
CALENDAR_UNITS: Final = ("month", "year")  # have no fixed length


@dataclass(frozen=True)
class DescriptorNode:
    """One key, with or without a value, of a tree of descriptors."""

    key: str
    value: str | None = None
    policy: Policy | None = None
    children: tuple[DescriptorNode, ...] = ()
    shared: bool = False  # all values that the wildcard matches are counted together
    name: str = ""  # of its limit, if the file gives one
    replaces: tuple[str, ...] = ()  # names of limits that do not count where this one does, in the same request
    exact: dict[tuple[str, str], DescriptorNode] = field(init=False, repr=False, compare=False, default_factory=dict)
    wild: tuple[DescriptorNode, ...] = field(init=False, repr=False, compare=False, default=())
    any: dict[str, DescriptorNode] = field(init=False, repr=False, compare=False, default_factory=dict)
    variant: PolicyVariant | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        """Sort the children by how they are found, the longest wildcard first."""
        wild = []
        for child in self.children:
            if child.value is None:
                self.any[child.key] = child
            elif child.value.endswith("*"):
                wild.append(child)
            else:
                self.exact[child.key, child.value] = child
        wild.sort(key=lambda child: -len(child.value or ""))
        object.__setattr__(self, "wild", tuple(wild))
        if self.policy is not None:
            object.__setattr__(self, "variant", PolicyVariant(f"domain {self.policy.name}", self.policy))

    def step(self, key: str, value: str) -> DescriptorNode | None:
        """Go one level down."""
        found = self.exact.get((key, value))
        if found is not None:
            return found
        for child in self.wild:
            if child.key == key and value.startswith((child.value or "")[:-1]):
                return child
        return self.any.get(key)


@dataclass(frozen=True)
class DescriptorDomain:
    """A tree of descriptors."""

    name: str
    root: DescriptorNode

    def find(self, descriptor: Sequence[tuple[str, str]]) -> tuple[DescriptorNode, Key] | None:
        """Find the node that a descriptor leads to, and the key that is counted there."""
        node = self.root
        key: list[str] = [self.name]
        for name, value in descriptor:
            child = node.step(name, value)
            if child is None:
                return None
            node = child
            key += (name, node.value if node.shared and node.value else value)
        return node, tuple(key)

    def match(self, descriptor: Sequence[tuple[str, str]]) -> tuple[PolicyVariant, Key] | None:
        """Find what a descriptor is decided by; None: it is not limited."""
        found = self.find(descriptor)
        if found is None or found[0].variant is None:
            return None
        return found[0].variant, found[1]

    def variants(self) -> Iterator[PolicyVariant]:
        """Go through every limited node."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children
            if node.variant is not None:
                yield node.variant


def limit_of(quota: int, unit: str, algorithm: str | None = None, name: str = "") -> Limit:
    """Make a limit of Envoy's words."""
    chosen = "calendar_window" if unit in CALENDAR_UNITS else algorithm or DEFAULT_ALGORITHM
    return Limit(quota, UNIT_PERIODS[unit], chosen, name=name or f"per-{unit}")


def by_request(domain: str, found: DescriptorNode | None, quota: int, unit: str) -> Policy:
    """Make the policy of a limit that a request brings along, in place of the configured one."""
    configured = found.policy if found is not None else None
    name = f"{domain}/by request" if configured is None else configured.name
    mode = "enforce" if configured is None else configured.mode
    on_store_error = "deny" if configured is None else configured.on_store_error
    return Policy(name, (limit_of(quota, unit),), mode, on_store_error)
