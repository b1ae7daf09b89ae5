"""Descriptors of Envoy's rate limit service: a domain is a tree of keys and values, some of them with a limit.

A descriptor of a request is a list of (key, value) pairs. Each pair selects a child of the current node: the child with
exactly that value, else a child whose value ends with `*`, else the child for the key alone. The node of the last pair
has the limit. A descriptor that matches no node, or a node without a limit, is not limited. Each combination of values
is counted separately, except at a node with `share_threshold`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate.core import Limit
from tidegate.service._decisions.policies import PolicyVariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate._policy import Key

# Envoy's units of time, in the order of its enum, and the period that each is here.
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
    """A node of a tree of descriptors: a key, with or without a value."""

    key: str
    value: str | None = None
    policy: Policy | None = None
    children: tuple[DescriptorNode, ...] = ()
    shared: bool = False  # all values that the wildcard matches share one count
    name: str = ""  # the name of its limit, if the file has one
    replaces: tuple[str, ...] = ()  # names of limits that are skipped if this one applies to the same request
    exact: dict[tuple[str, str], DescriptorNode] = field(init=False, repr=False, compare=False, default_factory=dict)
    wild: tuple[DescriptorNode, ...] = field(init=False, repr=False, compare=False, default=())
    any: dict[str, DescriptorNode] = field(init=False, repr=False, compare=False, default_factory=dict)
    variant: PolicyVariant | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        """Index the children by how they match, the longest wildcard first."""
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

    def child_for(self, key: str, value: str) -> DescriptorNode | None:
        """Return the child that matches a pair."""
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
        """Return the node that a descriptor matches, and the key that it is counted by."""
        node = self.root
        key: list[str] = [self.name]
        for name, value in descriptor:
            child = node.child_for(name, value)
            if child is None:
                return None
            node = child
            key += (name, node.value if node.shared and node.value else value)
        return node, tuple(key)

    def match(self, descriptor: Sequence[tuple[str, str]]) -> tuple[PolicyVariant, Key] | None:
        """Return the policy variant and the key for a descriptor; None if it is not limited."""
        found = self.find(descriptor)
        if found is None or found[0].variant is None:
            return None
        return found[0].variant, found[1]

    def variants(self) -> Iterator[PolicyVariant]:
        """Iterate over the variants of all nodes with a limit."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack += node.children
            if node.variant is not None:
                yield node.variant


def envoy_limit(quota: int, unit: str, algorithm: str | None = None, name: str = "") -> Limit:
    """Build a limit from Envoy's unit and requests_per_unit."""
    chosen = "calendar_window" if unit in CALENDAR_UNITS else algorithm or DEFAULT_ALGORITHM
    return Limit(quota, UNIT_PERIODS[unit], chosen, name=name or f"per-{unit}")


def request_policy(domain: str, found: DescriptorNode | None, quota: int, unit: str) -> Policy:
    """Build the policy for a limit that the request itself carries; it replaces the configured limit."""
    configured = found.policy if found is not None else None
    name = f"{domain}/by request" if configured is None else configured.name
    mode = "enforce" if configured is None else configured.mode
    on_store_error = "deny" if configured is None else configured.on_store_error
    return Policy(name, (envoy_limit(quota, unit),), mode, on_store_error)
