"""What the nodes of a run have used: a tree of records, for people, reports and commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidegate._limiter.waiting import ApplyStep
from tidegate.agents._limits import COUNTED
from tidegate.agents._node import OPEN, Details, Node, Path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tidegate._runtime.flow import Flow
    from tidegate.agents._tree import Tree

T = TypeVar("T")
BATCH: Final = 32  # nodes whose usage is read in one step


class LimitUsage(NamedTuple):
    """How much of one limit a node has used."""

    unit: str
    quota: int
    used: int
    remaining: int


class NodeUsage(NamedTuple):
    """What a node and those below it have used; children are in the order of their creation.

    `used` has all units, `limits` only those with a quota, by name. `status` is open, stopped, closed or ended. Times
    are seconds since 1970 by the clock of the store.
    """

    id: str
    name: str
    status: str
    ends: float
    used: Mapping[str, int]
    limits: Mapping[str, LimitUsage]
    carved: Mapping[str, int]
    children: tuple[NodeUsage, ...]
    created: float = 0.0

    def walk(self, depth: int = 0) -> Iterator[tuple[int, NodeUsage]]:
        """Yield all nodes with their depth, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def nodes_flow(tree: Tree, path: Path) -> Flow[Any, dict[Path, Node]]:
    """Read a node and those below it."""
    details = yield from tree.list_flow(path)
    above = yield from tree.node_flow(path)
    nodes: dict[Path, Node] = {}
    for own, found in details.items():
        parent = nodes.get(own[:-1]) if own != path else above.parent
        if parent is not None or len(own) == 1 or own == path:
            nodes[own] = tree.build(own, parent, found.dump())
    return nodes


def usage_flow(tree: Tree, path: Path) -> Flow[Any, NodeUsage]:
    """Read what a node and those below it have used. Other calls may be charged in between."""
    nodes = yield from nodes_flow(tree, path)
    decisions: dict[Path, Any] = {}
    for group in in_batches(list(nodes.values())):
        asks = [(node.limiter.policy, node.key, (0,) * len(node.limiter.policy.limits)) for node in group]
        found_here = yield ApplyStep(tree.store, "peek", asks, tree.now())
        decisions.update(zip([node.path for node in group], found_here, strict=True))
    below: dict[Path, list[Path]] = {}
    for other in sorted(nodes, key=lambda other: nodes[other].details.created):
        below.setdefault(other[:-1], []).append(other)
    return _build(path, nodes, decisions, below)


def in_batches(items: list[T]) -> Iterator[list[T]]:
    """Yield groups whose usage is read in one step."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def _build(
    path: Path, nodes: Mapping[Path, Node], decisions: Mapping[Path, Any], below: Mapping[Path, list[Path]]
) -> NodeUsage:
    node, decision = nodes[path], decisions[path]
    details: Details = node.details
    used: dict[str, int] = {}
    limits: dict[str, LimitUsage] = {}
    for limit, view in zip(decision.policy_limits, decision.views, strict=True):
        amount = limit.burst - view.remaining
        if limit.quota != COUNTED:
            limits[limit.name] = LimitUsage(limit.unit, limit.quota, amount, max(0, view.remaining))
        if limit.name == f"{limit.unit}-run":
            used[limit.unit] = amount
    status = details.status if details.status != OPEN or decision.at < details.ends else "ended"
    children = tuple(_build(other, nodes, decisions, below) for other in below.get(path, ()))
    ends, created = details.ends / 1e6, details.created / 1e6
    return NodeUsage("/".join(path), details.name, status, ends, used, limits, details.carved or {}, children, created)
