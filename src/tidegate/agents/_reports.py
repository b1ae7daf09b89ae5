"""Reports: what was used at each node, and there for each tool and model, as rows that add up.

A node has a row for all its own calls that have no label, and one for each label. What its children used is in their
rows. So the sum of a column is what the tree has used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.waiting import ApplyStep, ReadStep
from tidegate.agents._node import CLOSED, labels_of
from tidegate.agents._usage import in_batches, nodes_flow, usage_flow
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidegate._runtime.flow import Flow
    from tidegate.agents._node import Node, Path
    from tidegate.agents._tree import Tree
    from tidegate.agents._usage import NodeUsage
    from tidegate.stores._values import Value

TOOL: Final = "tool"
MODEL: Final = "model"
COLUMNS: Final = ("node", TOOL, MODEL)


class ReportRow(NamedTuple):
    """What the calls of one node used, without its children, for one tool or model; both empty: for all other calls."""

    id: str
    node: str
    tool: str
    model: str
    used: Mapping[str, int]


def report_flow(tree: Tree, path: Path) -> Flow[Any, list[ReportRow]]:
    """Read what was used at a node and those below it, for each tool and model."""
    nodes: Mapping[Path, Node] = yield from nodes_flow(tree, path)
    usage: NodeUsage = yield from usage_flow(tree, path)
    listed: Mapping[str, Value] = yield ReadStep(tree.store, labels_of(tree.root), None, tree.now())
    places: list[tuple[Node, str]] = []
    for name in sorted(listed):
        found, _, label = name.partition("=")
        node = nodes.get(tuple(found.split("/")))
        if node is not None:
            places.append((node, label))
    labelled: dict[str, list[tuple[str, dict[str, int]]]] = {}
    for group in in_batches(places):
        asks = [
            (node.labels.policy, node.label_key(label), (0,) * len(node.labels.policy.limits)) for node, label in group
        ]
        decisions = yield ApplyStep(tree.store, "peek", asks, tree.now())
        for (node, label), decision in zip(group, decisions, strict=True):
            pairs = zip(decision.policy_limits, decision.views, strict=True)
            used = {limit.unit: limit.burst - view.remaining for limit, view in pairs}
            labelled.setdefault(node.value_name, []).append((label, {unit: n for unit, n in used.items() if n}))
    titles = {node.value_name: node.title for node in nodes.values()}
    return [
        ReportRow(each.id, titles[each.id], *split_label(label), used)
        for _, each in usage.walk()
        for label, used in _rows_of(each, labelled.get(each.id, []))
    ]


def _rows_of(node: NodeUsage, labelled: list[tuple[str, dict[str, int]]]) -> list[tuple[str, dict[str, int]]]:
    """Return what the calls of a node used by label, and those without one."""
    left = dict(node.used)
    for child in node.children:
        returned = child.status in (CLOSED, "ended")
        for unit, amount in child.used.items():
            left[unit] = left.get(unit, 0) - (amount if returned else child.carved.get(unit, amount))
    for _, used in labelled:
        for unit, amount in used.items():
            left[unit] = left.get(unit, 0) - amount
    own = {unit: amount for unit, amount in left.items() if amount > 0}
    return [*labelled, ("", own)] if own or not labelled else labelled


def split_label(label: str) -> tuple[str, str]:
    """Return the tool and the model of a label: `model:NAME` is a model, all else a tool."""
    kind, _, name = label.partition(":")
    if not label:
        return "", ""
    if kind == MODEL and name:
        return "", name
    return (name if kind == TOOL and name else label), ""


def sum_rows(rows: Iterable[ReportRow], by: Sequence[str]) -> list[dict[str, str | int]]:
    """Sum rows by some of the columns node, tool and model: one mapping for each, with a field for each unit."""
    for column in by:
        if column not in COLUMNS:
            raise ConfigError(f"must be some of {', '.join(COLUMNS)}, not {column!r}", field="by")
    rows = list(rows)
    units = list(dict.fromkeys(unit for row in rows for unit in row.used))
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for row in rows:
        sums = found.setdefault(tuple(getattr(row, column) for column in by), dict.fromkeys(units, 0))
        for unit, amount in row.used.items():
            sums[unit] += amount
    return [{**dict(zip(by, key, strict=True)), **sums} for key, sums in found.items()]
