"""Categories of requests, each with its policy, and which request falls into which.

The categories of the API limiting spec are what there is when nothing else is configured:

    expensive        5 an hour      /api/cluster, /api/recluster
    moderately      10 an hour      /api/refresh, /api/clear-cache
    read            60 a minute     /api/feeds, /api/clusters, /api/timeline, …, and whatever no endpoint names
    very_expensive   3 an hour      /api/cleanup-orphaned

`rules.config` reads them from a file, `rules.paths` finds the endpoint that a path matches, and `rules.path_readings`
says how else a router may read that path. A request is charged to every category that one of these readings belongs to,
and each category has to allow it. So the category of the route that the request reaches is always charged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError
from tidegate.inbound.client.address import AddressSet
from tidegate.inbound.rules.path_readings import CLEAN, Route, all_readings, fold
from tidegate.inbound.rules.paths import PATH_CONVERTER, PathTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tidegate.inbound.rules.charging import Charging
    from tidegate.inbound.rules.paths import Found
    from tidegate.policy import Cost, Policy

ADMIN_PATH: Final = "/api/admin/rate-limit-stats"  # never limited
ROOT: Final = ("", "/")  # how the path of the route is written that stands at an application's mount point
MESSAGE_METHOD: Final = "MESSAGE"  # among an endpoint's methods: each message that a client sends over a websocket


class Endpoint(NamedTuple):
    """A path (see `tidegate.inbound.rules.paths`), for some methods (none: all) and at a cost."""

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
    exempt: tuple[Endpoint, ...] = (Endpoint(ADMIN_PATH),)
    exempt_methods: frozenset[str] = frozenset()
    exempt_clients: AddressSet = field(default_factory=AddressSet)
    blocked_clients: AddressSet = field(default_factory=AddressSet)
    enabled: bool = True
    cleanup_interval: float = 300.0
    max_entries: int = 10_000
    by_method: bool = field(init=False, repr=False, compare=False)  # whether the method of a request matters
    _tree: PathTree[_EndpointTarget] = field(init=False, repr=False, compare=False)
    _messages: PathTree[_EndpointTarget] = field(init=False, repr=False, compare=False)
    _otherwise: _EndpointTarget = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the trees; the same endpoint written twice is refused."""
        tree: PathTree[_EndpointTarget] = PathTree()
        messages: PathTree[_EndpointTarget] = PathTree()
        by_method = bool(self.exempt_methods)
        for category, endpoints in ((None, self.exempt), *((known, known.endpoints) for known in self.categories)):
            for endpoint in endpoints:
                target = _EndpointTarget.of(category, endpoint.cost)
                methods = [method for method in endpoint.methods if method != MESSAGE_METHOD]
                by_method = by_method or bool(methods)
                taken = None
                if methods or not endpoint.methods:
                    taken = tree.add(endpoint.path, methods, target)
                if MESSAGE_METHOD in endpoint.methods:
                    taken = messages.add(endpoint.path, (), target) or taken
                if taken is not None:
                    raise ConfigError(f"{endpoint.path} is an endpoint of {taken} already", field="endpoints")
        object.__setattr__(self, "by_method", by_method)
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "_messages", messages)
        object.__setattr__(
            self, "_otherwise", _EndpointTarget.of(self.unmatched, self.unmatched.cost if self.unmatched else 1)
        )

    def matches(
        self, routes: Sequence[Route], methods: Iterable[str] = ("GET",), template: str | None = None
    ) -> tuple[Match, ...]:
        """Tell everything that a request is charged to; nothing: it is not limited.

        `routes` are the literal readings of its path, `methods` the request's and the one that it asks to be taken for,
        `template` the route that the framework has found, where it knows.
        """
        if not self.enabled:
            return ()
        asked = [method.upper() for method in methods if method.upper() not in self.exempt_methods]
        if len(asked) == len(routes) == 1 and not routes[0].prefixes and template is None:
            # A clean path has one reading, which most endpoints match literally if they match it at all.
            path = routes[0].path
            if CLEAN.fullmatch(path):
                known = next(self._tree.matching(path, asked[0]), None)
                if known is None or known.plain:
                    return (self._otherwise if known is None else known.target).alone
        targets: list[_EndpointTarget] = []
        for method in asked:
            for found in _named(self._tree, routes, method, template):
                targets += [endpoint.target for endpoint in found]
                if not any(endpoint.certain for endpoint in found):
                    targets.append(self._otherwise)
        return _together(targets)

    def message_matches(self, routes: Sequence[Route]) -> tuple[Match, ...]:
        """Tell what a message over a websocket is charged to: only endpoints that name MESSAGE as a method count."""
        if not self.enabled:
            return ()
        named = _named(self._messages, routes, MESSAGE_METHOD)
        return _together([endpoint.target for found in named for endpoint in found])


class _EndpointTarget(NamedTuple):
    """Where an endpoint leads: to a category, or (None) to no limit at all."""

    category: Category | None
    cost: Cost
    alone: tuple[Match, ...]  # what a request is charged to that leads nowhere else

    @classmethod
    def of(cls, category: Category | None, cost: Cost) -> _EndpointTarget:
        return cls(category, cost, () if category is None else (Match(category, cost),))

    def __str__(self) -> str:
        return f"category {self.category.name!r}" if self.category else "exempt"


class _Named(NamedTuple):
    """An endpoint that names a route: how specific it is (the smaller, the more), and whether it surely means it."""

    rank: tuple[int, ...]
    certain: bool
    target: _EndpointTarget


def _named(
    tree: PathTree[_EndpointTarget], routes: Sequence[Route], method: str, template: str | None = None
) -> Iterator[list[_Named]]:
    """Give, for each reading of a path, the endpoints that name its route: the most specific ones."""
    for route in routes:
        yield _most_specific(_naming(tree, route, method, template, literal=True))
    for route in all_readings(routes):
        yield _most_specific(_naming(tree, route, method, template, literal=False))


def _most_specific(naming: Iterable[_Named]) -> list[_Named]:
    """Keep the most specific endpoints, and less specific ones until one of them is certain."""
    chosen: list[_Named] = []
    for _, group in groupby(sorted(naming, key=itemgetter(0)), key=itemgetter(0)):
        chosen += group
        if any(named.certain for named in chosen):
            break
    return chosen


def _naming(
    tree: PathTree[_EndpointTarget], route: Route, method: str, template: str | None, *, literal: bool
) -> Iterable[_Named]:
    """Give all endpoints that name the route of a reading: without a prefix, or with one of its prefixes.

    Only segments behind the prefix tell how specific an endpoint is. Where an application is mounted under `/v1`,
    `/v1/items` surely means its route `/items`, not `/v1/items`; and `/{a}/{b}` surely means `/x/y`, not `/y`. Where
    the client chooses the mount point, only endpoints without it are sure.
    """
    known: dict[int, _Named] = {}
    starts = tuple(f"{fold(prefix)}/" for prefix in route.prefixes)
    for prefix in ("", *route.prefixes):
        depth = prefix.count("/")
        spellings = (prefix + route.path,) if route.path not in ROOT else tuple(prefix + path for path in ROOT)
        written = prefix + template if template else ""
        for found in _found(tree, spellings, written, method, literal=literal):
            rank = found.kinds[depth:] or (PATH_CONVERTER + 1 + depth - len(found.kinds),)
            certain = f"{found.path}/".startswith(starts) == bool(prefix) and (route.fixed or not prefix)
            earlier = known.get(id(found))
            if earlier is not None:  # it is as specific as it is in its widest meaning
                rank, certain = max(rank, earlier.rank), certain or earlier.certain
            known[id(found)] = _Named(rank, certain, found.target)
    return known.values()


def _found(
    tree: PathTree[_EndpointTarget], spellings: tuple[str, ...], template: str, method: str, *, literal: bool
) -> Iterator[Found[_EndpointTarget]]:
    """Give all endpoints that a path matches, however it is spelled, or that are written like a route's template."""
    for found in tree.matching(fold(spellings[0]), method):
        if not literal or any(map(found.literally.fullmatch, spellings)):
            yield found
    named = tree.template(template, method) if template else None
    if named is not None and (not literal or named.covers(template)):
        yield named


def _together(targets: Iterable[_EndpointTarget]) -> tuple[Match, ...]:
    """Charge each category once: where endpoints of one category cost differently, what is more."""
    found: dict[str, Match] = {}
    for category, cost, _ in targets:
        if category is None:
            continue
        earlier = found.get(category.name)
        if earlier is not None and earlier.cost != cost:
            cost = _more(category.policy, earlier.cost, cost)  # noqa: PLW2901 - what is charged after all
        found[category.name] = Match(category, cost)
    return tuple(found.values())


def _more(policy: Policy, one: Cost, other: Cost) -> Cost:
    """Give the larger of two costs, of each unit."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    pairs = zip(policy.limits, policy.costs(one), policy.costs(other), strict=True)
    return {limit.unit: max(costs) for limit, *costs in pairs}
