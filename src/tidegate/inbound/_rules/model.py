"""Categories of requests, each with its policy, and the categories that a request is charged to.

The default categories are those of the API limiting spec:

    expensive        5 per hour     /api/cluster, /api/recluster
    moderately      10 per hour     /api/refresh, /api/clear-cache
    read            60 per minute   /api/feeds, /api/clusters, /api/timeline, …, and paths that no endpoint matches
    very_expensive   3 per hour     /api/cleanup-orphaned

`rules.config` reads them from a file, `rules.paths` finds the endpoint that a path matches, and `rules.path_readings`
lists the ways in which routers may read that path. A request is charged to every category that one of these readings
matches, and each category has to allow it. So the category of the route that the request reaches is always charged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar, get_args

from tidegate.errors import ConfigError
from tidegate.inbound._client.address import AddressSet
from tidegate.inbound._rules.path_readings import CLEAN, Route, all_readings, fold
from tidegate.inbound._rules.paths import PATH_CONVERTER, PathTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tidegate._policy import Cost, Policy
    from tidegate.inbound._rules.block_rule import BlockRules
    from tidegate.inbound._rules.charging import Charging
    from tidegate.inbound._rules.paths import FoundEndpoint

T = TypeVar("T")

ResetTime = Literal["full", "next"]  # what headers show as reset: when all permits are available, or the next one
RESET_TIMES: Final[tuple[str, ...]] = get_args(ResetTime)
ADMIN_PATH: Final = "/api/admin/rate-limit-stats"  # never limited
ROOT: Final = ("", "/")  # two spellings of the path of a mounted application's root
APPLICATION_LIMITS: Final = "application_limits"  # names of categories that every request matches
DEFAULT_LIMITS: Final = "default_limits"
MESSAGE_METHOD: Final = "MESSAGE"  # the method name for websocket messages in an endpoint


class Endpoint(NamedTuple):
    """A path (see `tidegate.inbound._rules.paths`), its methods (none: all) and the cost of a request."""

    path: str
    methods: tuple[str, ...] = ()
    cost: Cost = 1


@dataclass(frozen=True, slots=True)
class Category:
    """A group of endpoints with one policy and a default cost.

    `charging` corrects the cost by the status of the response. `plans` has policies that replace `policy`, by plan.
    """

    name: str
    policy: Policy
    endpoints: tuple[Endpoint, ...] = ()
    cost: Cost = 1
    charging: Charging | None = None
    plans: Mapping[str, Policy] = field(default_factory=dict, hash=False)


class Match(NamedTuple):
    """A category and the cost that a request is charged there."""

    category: Category
    cost: Cost


@dataclass(frozen=True, slots=True)
class Rules:
    """The inbound configuration. Immutable: a changed configuration is a new Rules.

    `unmatched` is the category of requests that no endpoint matches; None: they are not limited. `exempt` endpoints,
    `exempt_methods` and `exempt_clients` are never limited, `blocked_clients` always denied. `cleanup_interval` is in
    seconds. `block` blocks clients that are denied too often. `reset_time` is what the headers show as reset.
    `defaulted` names the default categories that apply although the configuration does not name them.
    `application_limits` and `default_limits` are categories that every request matches, unless it is exempt: see
    `extra_limits`.
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
    ipv4_prefix: int = 32
    ipv6_prefix: int = 64
    block: BlockRules | None = None
    reset_time: ResetTime = "full"
    application_limits: Category | None = None
    default_limits: Category | None = None
    defaulted: tuple[str, ...] = field(default=(), compare=False)
    by_method: bool = field(init=False, repr=False, compare=False)  # whether categories depend on the method
    _tree: PathTree[_EndpointTarget] = field(init=False, repr=False, compare=False)
    _messages: PathTree[_EndpointTarget] = field(init=False, repr=False, compare=False)
    _unmatched_target: _EndpointTarget = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the trees; raises ConfigError for duplicate endpoints."""
        tree: PathTree[_EndpointTarget] = PathTree()
        messages: PathTree[_EndpointTarget] = PathTree()
        by_method = bool(self.exempt_methods)
        always = tuple(Match(category, 1) for category in self.extra_categories)
        for category, endpoints in ((None, self.exempt), *((known, known.endpoints) for known in self.categories)):
            for endpoint in endpoints:
                target = _EndpointTarget.of(category, endpoint.cost, always if category is not None else ())
                methods = [method for method in endpoint.methods if method != MESSAGE_METHOD]
                by_method = by_method or bool(methods)
                taken = None
                if methods or not endpoint.methods:
                    taken = tree.add(endpoint.path, methods, target)
                if MESSAGE_METHOD in endpoint.methods:
                    taken = messages.add(endpoint.path, (), _EndpointTarget.of(category, endpoint.cost)) or taken
                if taken is not None:
                    raise ConfigError(f"{endpoint.path} is already {taken}", field="endpoints")
        object.__setattr__(self, "by_method", by_method)
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "_messages", messages)
        cost = self.unmatched.cost if self.unmatched else 1
        object.__setattr__(self, "_unmatched_target", _EndpointTarget.of(self.unmatched, cost, always))
        for category in self.categories:
            if always and category.name in (APPLICATION_LIMITS, DEFAULT_LIMITS):
                raise ConfigError(f"the name {category.name!r} is reserved: rename the category", field="categories")

    @property
    def extra_categories(self) -> tuple[Category, ...]:
        """The categories that every request matches."""
        return tuple(each for each in (self.application_limits, self.default_limits) if each is not None)

    def matches(
        self, routes: Sequence[Route], methods: Iterable[str] = ("GET",), template: str | None = None
    ) -> tuple[Match, ...]:
        """Return the categories and costs that a request is charged to; empty if it is not limited.

        `routes` are the literal readings of its path, `methods` its method and those of method-override headers,
        `template` the template of the route, if the framework has already matched it.
        """
        if not self.enabled:
            return ()
        considered = [method.upper() for method in methods if method.upper() not in self.exempt_methods]
        if len(considered) == len(routes) == 1 and not routes[0].prefixes and template is None:
            # Fast path: a clean path has one reading, and most endpoints that match it match it literally.
            path = routes[0].path
            if CLEAN.fullmatch(path):
                known = next(self._tree.find_all(path, considered[0]), None)
                if known is None or known.is_plain:
                    return (self._unmatched_target if known is None else known.target).matches
        targets: list[_EndpointTarget] = []
        for method in considered:
            for found in find_endpoints(self._tree, routes, method, template):
                targets += [endpoint.target for endpoint in found]
                if not any(endpoint.certain for endpoint in found):
                    targets.append(self._unmatched_target)
        return _combine(targets)

    def message_matches(self, routes: Sequence[Route]) -> tuple[Match, ...]:
        """Return what a websocket message is charged to: only endpoints with the method MESSAGE count."""
        if not self.enabled:
            return ()
        named = find_endpoints(self._messages, routes, MESSAGE_METHOD)
        return _combine([endpoint.target for found in named for endpoint in found])


class _EndpointTarget(NamedTuple):
    """The category of an endpoint (None: exempt, or unmatched) and its cost."""

    category: Category | None
    cost: Cost
    matches: tuple[Match, ...]  # the result of `Rules.matches` if this is the only target

    @classmethod
    def of(cls, category: Category | None, cost: Cost, always: tuple[Match, ...] = ()) -> _EndpointTarget:
        return cls(category, cost, always if category is None else (Match(category, cost), *always))

    def __str__(self) -> str:
        return f"an endpoint of category {self.category.name!r}" if self.category else "exempt"


class _EndpointCandidate(NamedTuple, Generic[T]):
    """An endpoint that may match a route: its rank (smaller is more specific), and whether the match is certain."""

    rank: tuple[int, ...]
    certain: bool
    target: T


def find_endpoints(
    tree: PathTree[T], routes: Sequence[Route], method: str, template: str | None = None
) -> Iterator[list[_EndpointCandidate[T]]]:
    """Yield the most specific endpoints for each reading of a path."""
    for route in routes:
        yield _most_specific(_find_route_endpoints(tree, route, method, template, literal=True))
    for route in all_readings(routes):
        yield _most_specific(_find_route_endpoints(tree, route, method, template, literal=False))


def _most_specific(candidates: Iterable[_EndpointCandidate[T]]) -> list[_EndpointCandidate[T]]:
    """Keep the most specific endpoints, and less specific ones until one is certain."""
    chosen: list[_EndpointCandidate[T]] = []
    for _, group in groupby(sorted(candidates, key=itemgetter(0)), key=itemgetter(0)):
        chosen += group
        if any(candidate.certain for candidate in chosen):
            break
    return chosen


def _find_route_endpoints(
    tree: PathTree[T], route: Route, method: str, template: str | None, *, literal: bool
) -> Iterable[_EndpointCandidate[T]]:
    """Return all endpoints that match the route of a reading: without a prefix, or with one of its prefixes.

    Only segments after the prefix decide how specific an endpoint is. If an application is mounted under `/v1`,
    `/v1/items` certainly matches its route `/items`, not `/v1/items`; and `/{a}/{b}` certainly matches `/x/y`, not
    `/y`. If the client chooses the mount point, only endpoints without the prefix are certain.
    """
    known: dict[int, _EndpointCandidate[T]] = {}
    starts = tuple(f"{fold(prefix)}/" for prefix in route.prefixes)
    for prefix in ("", *route.prefixes):
        depth = prefix.count("/")
        spellings = (prefix + route.path,) if route.path not in ROOT else tuple(prefix + path for path in ROOT)
        written = prefix + template if template else ""
        for found in _find_matching(tree, spellings, written, method, literal=literal):
            rank = found.kinds[depth:] or (PATH_CONVERTER + 1 + depth - len(found.kinds),)
            certain = f"{found.path}/".startswith(starts) == bool(prefix) and (route.fixed or not prefix)
            earlier = known.get(id(found))
            if earlier is not None:  # use the least specific rank
                rank, certain = max(rank, earlier.rank), certain or earlier.certain
            known[id(found)] = _EndpointCandidate(rank, certain, found.target)
    return known.values()


def _find_matching(
    tree: PathTree[T], spellings: tuple[str, ...], template: str, method: str, *, literal: bool
) -> Iterator[FoundEndpoint[T]]:
    """Yield all endpoints that match one of the spellings of a path, or that are written like the route's template."""
    for found in tree.find_all(fold(spellings[0]), method):
        if not literal or any(map(found.literal_pattern.fullmatch, spellings)):
            yield found
    named = tree.find_template(template, method) if template else None
    if named is not None and (not literal or named.covers(template)):
        yield named


def _combine(targets: Iterable[_EndpointTarget]) -> tuple[Match, ...]:
    """Charge each category once, with the larger cost if its endpoints differ."""
    found: dict[str, Match] = {}
    for category, cost in (match for target in targets for match in target.matches):
        earlier = found.get(category.name)
        if earlier is not None and earlier.cost != cost:
            cost = _larger_cost(category.policy, earlier.cost, cost)  # noqa: PLW2901 - the larger cost
        found[category.name] = Match(category, cost)
    return tuple(found.values())


def _larger_cost(policy: Policy, one: Cost, other: Cost) -> Cost:
    """Return the larger of two costs, by unit."""
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    pairs = zip(policy.limits, policy.costs(one), policy.costs(other), strict=True)
    return {limit.unit: max(costs) for limit, *costs in pairs}
