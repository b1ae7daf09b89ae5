"""The runs of a store: the roots of all trees that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate._limiter.joint import async_performer, performer
from tidegate._limiter.waiting import ReadStep
from tidegate._runtime.flow import run, run_async
from tidegate.agents._tree import ROOTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._runtime.flow import Flow
    from tidegate.stores import Store
    from tidegate.stores._values import Value


class RunListing(NamedTuple):
    """One run: its id and its name."""

    id: str
    name: str


def _list_flow(store: Store) -> Flow[Any, list[RunListing]]:
    values: Mapping[str, Value] = yield ReadStep(store.unleased, ROOTS, None)
    newest = sorted(values.items(), key=lambda item: (-item[1].written, item[0]))
    return [RunListing(name, value.data.decode()) for name, value in newest]


def list_runs(store: Store) -> list[RunListing]:
    """Return the runs of a store, the newest first; those that ended more than seven days ago are forgotten."""
    return run(_list_flow(store), performer(store.clock))


async def list_runs_async(store: Store) -> list[RunListing]:
    """Return the runs of a store, the newest first."""
    return await run_async(_list_flow(store), async_performer(store.clock))
