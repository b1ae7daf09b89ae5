"""Categories of requests, each with its policy, and which request falls into which.

The categories of the API limiting spec are what there is when nothing else is configured:

    expensive        5 an hour      /api/cluster, /api/recluster
    moderately      10 an hour      /api/refresh, /api/clear-cache
    read            60 a minute     /api/feeds, /api/clusters, /api/timeline, …, and whatever no endpoint names
    very_expensive   3 an hour      /api/cleanup-orphaned

`tidegate.inbound.config` reads them from a file; `tidegate.inbound.paths` says what a path can be and how it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError
from tidegate.inbound.identity import AddressSet
from tidegate.inbound.paths import Tree, readings

if TYPE_CHECKING:
    from tidegate.inbound.charging import Charging
    from tidegate.policy import Cost, Policy

ADMIN: Final = "/api/admin/rate-limit-stats"  # never limited
MESSAGE: Final = "MESSAGE"  # among an endpoint's methods: each message that a client sends over a websocket


class Endpoint(NamedTuple):
    """A path (see `tidegate.inbound.paths`), for some methods (none: all) and at a cost."""

    path: str
    methods: tuple[str, ...] = ()
    cost: Cost = 1


@dataclass(frozen=True, slots=True)
class Category:
    """A group of endpoints under one policy, and what a request costs whose endpoint says nothing else.

    `charging` corrects that by the status of the response.
    """

    name: str
    policy: Policy
    endpoints: tuple[Endpoint, ...] = ()
    cost: Cost = 1
    charging: Charging | None = None


class Match(NamedTuple):
    """What a request is charged to."""

    category: Category
    cost: Cost


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that is configured about requests we receive. Immutable: a changed configuration is another Rules.

    `unmatched` is the category of requests that no endpoint names; None: they are not limited. `exempt` endpoints,
    `exempt_methods` and `exempt_clients` are never limited, `blocked_clients` always denied. `cleanup_interval` is in
    seconds.
    """

    categories: tuple[Category, ...]
    unmatched: Category | None = None
    exempt: tuple[Endpoint, ...] = (Endpoint(ADMIN),)
    exempt_methods: frozenset[str] = frozenset()
    exempt_clients: AddressSet = field(default_factory=AddressSet)
    blocked_clients: AddressSet = field(default_factory=AddressSet)
    enabled: bool = True
    cleanup_interval: float = 300.0
    max_entries: int = 10_000
    _tree: Tree[_Target] = field(init=False, repr=False, compare=False)
    _messages: Tree[_Target] = field(init=False, repr=False, compare=False)
    _otherwise: _Target = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the trees; the same endpoint written twice is refused."""
        tree: Tree[_Target] = Tree()
        messages: Tree[_Target] = Tree()
        for category, endpoints in ((None, self.exempt), *((known, known.endpoints) for known in self.categories)):
            for endpoint in endpoints:
                target = _Target.of(category, endpoint.cost)
                taken = tree.add(endpoint.path, endpoint.methods, target)
                if taken is not None:
                    raise ConfigError(f"{endpoint.path} is an endpoint of {taken} already", field="endpoints")
                if MESSAGE in endpoint.methods:
                    messages.add(endpoint.path, (), target)
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "_messages", messages)
        object.__setattr__(self, "_otherwise", _Target.of(self.unmatched, self.unmatched.cost if self.unmatched else 1))

    def match(self, path: str, method: str = "GET", template: str | None = None, root: str = "") -> Match | None:
        """Tell the category and cost of a request; None: it is not limited.

        `path` is the request's whole path, decoded, without the query; `template` the route that the framework has
        found, where it knows; `root` the part of the path under which the application is mounted. Endpoints may be
        written with or without that. A path that can be read in several ways is charged to the strictest category.
        """
        if not self.enabled:
            return None
        if not method.isupper():
            method = method.upper()
        if method in self.exempt_methods:
            return None
        paths = readings(path)
        inner = readings(beneath(path, root)) if root else paths
        if len(paths) == len(inner) == 1:
            found = self._tree.exact(inner[0], method)
            if found is None and template is not None:
                found = self._tree.template(template, method)
            return (
                found or self._tree.find(inner[0], method) or self._tree.find(paths[0], method) or self._otherwise
            ).match
        found_as = [self._tree.find(reading, method) for reading in dict.fromkeys((*inner, *paths))]
        targets = [found or self._otherwise for found in found_as]
        if template is not None and (known := self._tree.template(template, method)):
            targets.append(known)
        return min(targets, key=_Target.allowance).match

    def match_message(self, path: str, root: str = "") -> Match | None:
        """Tell what a message over a websocket is charged to: only endpoints that name MESSAGE as a method count."""
        if not self.enabled:
            return None
        paths = dict.fromkeys((*readings(beneath(path, root)), *readings(path)))
        targets = [found for found in (self._messages.find(reading, MESSAGE) for reading in paths) if found]
        return min(targets, key=_Target.allowance).match if targets else None


def beneath(path: str, root: str) -> str:
    """Take the part under which an application is mounted off a path."""
    root = root.rstrip("/")
    if path == root:
        return "/"
    return path[len(root) :] if root and path.startswith(root + "/") else path


class _Target(NamedTuple):
    """Where an endpoint leads: to a match, or (None) to no limit at all."""

    match: Match | None
    rate: Fraction

    @classmethod
    def of(cls, category: Category | None, cost: Cost) -> _Target:
        if category is None:
            return cls(None, Fraction(0))
        most = cost if isinstance(cost, int) else max(cost.values(), default=1)
        rate = min(Fraction(limit.quota, limit.length) for limit in category.policy.limits)
        return cls(Match(category, cost), rate / max(1, most))

    def allowance(self) -> tuple[bool, Fraction]:
        """Compare strictness: how many such requests are allowed in the long run, exempt ones without end."""
        return self.match is None, self.rate

    def __str__(self) -> str:
        return f"category {self.match.category.name!r}" if self.match else "exempt"
