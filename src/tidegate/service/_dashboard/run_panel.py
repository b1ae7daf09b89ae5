"""The panel of runs: the newest open runs as trees, with what their nodes have used; and the metrics of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate.agents import AsyncRun, list_runs_async
from tidegate.core._bounds import SECOND
from tidegate.errors import RateLimitError
from tidegate.observe._text_format import MetricFamily, MetricKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tidegate.agents import NodeUsage
    from tidegate.observe._text_format import Sample
    from tidegate.stores import Store

    ReadFamilies = Callable[[], Awaitable[Sequence[MetricFamily]]]

MAX_RUNS: Final = 10
MAX_NODES: Final = 100  # of one run
METRIC_DEPTH: Final = 2  # the root, its children and theirs: deeper nodes are part of these
METRIC_AGE: Final = 86_400 * SECOND  # runs that are older have no metrics
REFRESH: Final = SECOND  # trees are read again after this time
USED: Final[tuple[str, MetricKind, str]] = ("tidegate_run_used", "gauge", "What nodes of open runs have used, by unit.")
QUOTA: Final[tuple[str, MetricKind, str]] = ("tidegate_run_quota", "gauge", "Quotas of nodes of open runs, by limit.")


class RunPanel:
    """Reads the trees, at most once a second; nothing while no run is in the store."""

    def __init__(self, store: Store) -> None:
        """Read the runs of this store."""
        self._store = store
        self._read_at: int | None = None
        self._trees: list[NodeUsage] = []

    async def trees(self) -> list[NodeUsage]:
        """Return the newest runs that are open or stopped."""
        now = self._store.clock.steady()
        if self._read_at is None or now - self._read_at >= REFRESH:
            self._trees, self._read_at = await self._read(), now
        return self._trees

    async def _read(self) -> list[NodeUsage]:
        found: list[NodeUsage] = []
        for listed in await list_runs_async(self._store):
            try:
                usage = await (await AsyncRun.find(listed.id, store=self._store)).usage()
            except RateLimitError:  # it was removed meanwhile
                continue
            if usage.status in ("open", "stopped"):
                found.append(usage)
            if len(found) == MAX_RUNS:
                break
        return found

    async def __call__(self) -> list[dict[str, Any]] | None:
        """Return a row for each limit of each node; None without runs."""
        rows = [row for tree in await self.trees() for row in self._rows(tree)]
        return rows or None

    def _rows(self, tree: NodeUsage) -> Iterator[dict[str, Any]]:
        now = self._store.clock.ns() / 1e9
        nodes = list(tree.walk())
        for depth, node in nodes[:MAX_NODES]:
            about = {"run": tree.id, "id": node.id, "name": node.name, "depth": depth, "state": node.status}
            about["ends_in"] = max(0.0, node.ends - now)
            limits = [{"limit": name, **limit._asdict()} for name, limit in node.limits.items()]
            calls = {"limit": "", "unit": "requests", "quota": 0, "used": node.used.get("requests", 0), "remaining": 0}
            for place, limit in enumerate(limits or [calls]):
                yield {**about, "first": place == 0, **limit}
        if len(nodes) > MAX_NODES:
            yield {"run": tree.id, "id": tree.id, "name": "", "depth": 1, "first": True, "more": len(nodes) - MAX_NODES}

    async def families(self) -> list[MetricFamily]:
        """Return the metrics of runs, bounded by the depth of nodes and the age of runs."""
        used: list[Sample] = []
        quotas: list[Sample] = []
        try:
            trees = await self.trees()
        except RateLimitError:  # the store is unavailable: other metrics are still shown
            return []
        for tree in trees:
            if self._store.clock.ns() // 1000 - round(tree.created * SECOND) > METRIC_AGE:
                continue
            names: list[str] = []
            for depth, node in list(tree.walk())[:MAX_NODES]:
                names[depth:] = [node.name]
                if depth > METRIC_DEPTH:
                    continue
                labels = {"run": tree.id, "node": "/".join(names), "id": node.id}
                used += [(USED[0], {**labels, "unit": unit}, number) for unit, number in node.used.items()]
                quotas += [
                    (QUOTA[0], {**labels, "limit": name, "unit": limit.unit}, limit.quota)
                    for name, limit in node.limits.items()
                ]
        return [MetricFamily(*USED, used), MetricFamily(*QUOTA, quotas)]


def add_run_panel(panels: dict[str, Any], families: list[ReadFamilies], store: Store) -> None:
    """Show the runs of a store on the dashboard and among the metrics."""
    if store.keeps_values:
        panel = RunPanel(store)
        panels["runs"] = panel
        families.append(panel.families)
