"""Explains which endpoints a request matches and which it does not, with the functions that match requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.inbound._rules.model import MESSAGE_METHOD, find_endpoints
from tidegate.inbound._rules.paths import PathTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tidegate.inbound._rules.model import Endpoint, Rules
    from tidegate.inbound._rules.path_readings import Route

EXEMPT: Final = "exempt"


class EndpointVerdict(NamedTuple):
    """An endpoint, its category (`exempt` for exempt endpoints), and whether a request matches it; if not, why not."""

    category: str
    endpoint: Endpoint
    matches: bool
    reason: str


def explain_endpoints(rules: Rules, routes: Sequence[Route], method: str) -> Iterator[EndpointVerdict]:
    """Yield the verdict on every endpoint of the rules, in their order."""
    charged = {match.category.name for match in rules.matches(routes, (method,))}
    groups = [(EXEMPT, rules.exempt), *((category.name, category.endpoints) for category in rules.categories)]
    named = [(name, endpoint) for name, endpoints in groups for endpoint in endpoints]
    found = [_matches(endpoint, routes, method) for _, endpoint in named]
    exempted = not charged and any(each for each, (name, _) in zip(found, named, strict=True) if name == EXEMPT)
    for candidate, (name, endpoint) in zip(found, named, strict=True):
        if not candidate:
            yield EndpointVerdict(name, endpoint, matches=False, reason=_difference(endpoint, routes, method))
        elif name in charged or (name == EXEMPT and exempted):
            yield EndpointVerdict(name, endpoint, matches=True, reason="")
        else:
            reason = "the rules are disabled" if not rules.enabled else "another endpoint is more specific"
            if method in rules.exempt_methods:
                reason = f"the method {method} is exempt"
            yield EndpointVerdict(name, endpoint, matches=False, reason=reason)


def _matches(endpoint: Endpoint, routes: Sequence[Route], method: str, *, any_method: bool = False) -> bool:
    """Return whether a request would match an endpoint if there were no other."""
    methods = [each for each in endpoint.methods if each != MESSAGE_METHOD]
    if endpoint.methods and not methods:
        return False
    tree: PathTree[Endpoint] = PathTree()
    tree.add(endpoint.path, () if any_method else methods, endpoint)
    return any(find_endpoints(tree, routes, method))


def _difference(endpoint: Endpoint, routes: Sequence[Route], method: str) -> str:
    if endpoint.methods and set(endpoint.methods) == {MESSAGE_METHOD}:
        return "it is for websocket messages"
    if _matches(endpoint, routes, method, any_method=True):
        return f"its methods are {', '.join(endpoint.methods)}, not {method}"
    return "the path differs"
