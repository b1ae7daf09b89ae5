"""How the command line reaches runs: in a store, with all rights, or by a running service, as an operator."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tidegate._cli.service_args import open_client
from tidegate._limiter.joint import performer
from tidegate._runtime.flow import run
from tidegate.agents import Run, list_runs
from tidegate.agents._node import CLOSED
from tidegate.agents._reports import ReportRow
from tidegate.stores import open_store

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from tidegate.agents import LimitUsage, NodeUsage
    from tidegate.service._api.run_requests import RunLimitResponse, RunReadResponse
    from tidegate.service.client._client import Client
    from tidegate.stores import Store


class RunTree(NamedTuple):
    """A node and those below it."""

    id: str
    name: str
    status: str
    ends: float
    used: Mapping[str, int]
    limits: Mapping[str, LimitUsage | RunLimitResponse]
    children: tuple[RunTree, ...]

    @classmethod
    def of(cls, usage: NodeUsage | RunReadResponse) -> RunTree:
        """Read what a store or a service said."""
        children = tuple(cls.of(child) for child in usage.children)
        return cls(usage.id, usage.name, usage.status, usage.ends, usage.used, usage.limits, children)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, RunTree]]:
        """Yield all nodes with their depth, parents first."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def describe(self) -> dict[str, Any]:
        """Return it as JSON."""
        names = ("unit", "quota", "used", "remaining")
        return {
            "id": self.id,
            "name": self.name,
            "status": self.status,
            "ends": self.ends,
            "used": dict(self.used),
            "limits": {name: {field: getattr(limit, field) for field in names} for name, limit in self.limits.items()},
            "children": [child.describe() for child in self.children],
        }


class RunAccess(Protocol):
    """What the command needs."""

    def identifiers(self) -> list[str]:
        """Return the ids of all runs, the newest first."""

    def read(self, identifier: str) -> RunTree:
        """Return what a node and those below it have used."""

    def report(self, identifier: str) -> list[ReportRow]:
        """Return what was used for each node, tool and model."""

    def stop(self, identifier: str, *, end_streams: bool) -> None:
        """Stop a node."""

    def extend(self, identifier: str, more: Mapping[str, str], ttl: float | None) -> None:
        """Extend a node."""

    def close(self, identifier: str) -> None:
        """Close a node."""


class StoredRuns:
    """The runs of a store."""

    def __init__(self, store: Store) -> None:
        """Use this store."""
        self._store = store

    def _find(self, identifier: str) -> Run:
        return Run.find(identifier, store=self._store)

    def identifiers(self) -> list[str]:
        """Return the ids of all runs, the newest first."""
        return [each.id for each in list_runs(self._store)]

    def read(self, identifier: str) -> RunTree:
        """Return what a node and those below it have used."""
        return RunTree.of(self._find(identifier).usage())

    def report(self, identifier: str) -> list[ReportRow]:
        """Return what was used for each node, tool and model."""
        return self._find(identifier).report()

    def stop(self, identifier: str, *, end_streams: bool) -> None:
        """Stop a node."""
        self._find(identifier).stop(end_streams=end_streams)

    def extend(self, identifier: str, more: Mapping[str, str], ttl: float | None) -> None:
        """Extend a node."""
        self._find(identifier).extend(more, ttl=ttl)

    def close(self, identifier: str) -> None:
        """Close a node."""
        found = self._find(identifier)
        run(found.end_flow(CLOSED), performer(found.clock))


class ServedRuns:
    """The runs of a service."""

    def __init__(self, client: Client) -> None:
        """Ask this client."""
        self._client = client

    def identifiers(self) -> list[str]:
        """Return the ids of all runs, the newest first."""
        return [each.id for each in self._client.runs().runs]

    def read(self, identifier: str) -> RunTree:
        """Return what a node and those below it have used."""
        return RunTree.of(self._client.runs_read(id=identifier))

    def report(self, identifier: str) -> list[ReportRow]:
        """Return what was used for each node, tool and model."""
        rows = self._client.runs_report(id=identifier).rows
        return [ReportRow(row.id, row.node, row.tool, row.model, row.used) for row in rows]

    def stop(self, identifier: str, *, end_streams: bool) -> None:
        """Stop a node."""
        self._client.runs_stop(id=identifier, end_streams=end_streams)

    def extend(self, identifier: str, more: Mapping[str, str], ttl: float | None) -> None:
        """Extend a node."""
        self._client.runs_extend(id=identifier, more=more, ttl=ttl)

    def close(self, identifier: str) -> None:
        """Close a node."""
        self._client.runs_close(id=identifier)


@contextmanager
def open_runs(args: argparse.Namespace) -> Iterator[RunAccess]:
    """Open the runs that the arguments name."""
    if args.store:
        store = open_store(args.store)
        try:
            yield StoredRuns(store)
        finally:
            store.close()
        return
    with open_client(args) as client:
        yield ServedRuns(client)
