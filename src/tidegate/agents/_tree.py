"""The tree of a run in the store: creates, reads, changes and ends nodes, as flows.

Each change is a compare-and-set of the value of one node, so that none is lost; what it charges or refunds is in the
same step.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.waiting import ApplyStep, ReadStep
from tidegate._policy import Policy
from tidegate.agents._errors import RunEndedError
from tidegate.agents._node import (
    CLOSED,
    MAX_DEPTH,
    OPEN,
    POLICY,
    STOPPED,
    UNRETURNED,
    Details,
    Node,
    Path,
    collection_of,
    entries_of,
    labels_of,
    unreturned,
)
from tidegate.agents._usage import in_batches
from tidegate.core._bounds import SECOND
from tidegate.core._decision import LocalDecision
from tidegate.core._limit import Limit
from tidegate.errors import (
    CollectionFull,
    ConfigError,
    StoreUnavailable,
    ValueConflict,
)
from tidegate.stores._values import ANYTHING, Collection, Write

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Value

NAME: Final = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]{1,200}")
MAX_ATTEMPTS: Final = 64  # how often a change is tried while other processes change the same node
CLOCK_ASK: Final[Ask] = (
    Policy("tidegate._runtime.clock", (Limit(1, "1s", "fixed_window"),), on_store_error="allow"),
    "clock",
    (0,),
)
ROOTS: Final = Collection("tidegate.run-roots")


class Tree:
    """The nodes of one root in a store, as this process knows them."""

    def __init__(self, store: Store, root: str, clock: Clock | None) -> None:
        """Know none of them yet; `clock` replaces the store's clock."""
        if not store.keeps_values:
            message = f"{type(store).__name__} keeps no values, which runs need: use one of tidegate's own stores"
            raise ConfigError(message, field="store")
        self.store: Store = store.unleased  # a permit of a lease would survive a stop
        self.root: str = root
        self.collection: Collection = collection_of(root)
        self._clock = clock
        self._nodes: dict[Path, Node] = {}

    def now(self) -> int | None:
        """Return the time to decide at; None: that of the store's clock."""
        return None if self._clock is None or self._clock is self.store.clock else self._clock.ns() // 1000

    def time_flow(self) -> Flow[ApplyStep, int]:
        """Return the time of the store."""
        (decision,) = yield ApplyStep(self.store, "peek", (CLOCK_ASK,), self.now())
        if isinstance(decision, LocalDecision):
            raise StoreUnavailable("could not read the time: the store is unavailable; try again later")
        return int(decision.at)

    # ---- read --------------------------------------------------------------------------------------------------------

    def node_flow(self, path: Path) -> Flow[Any, Node]:
        """Return a node, reading it and its ancestors if this process does not know them."""
        node = self._nodes.get(path)
        if node is None:
            parent = (yield from self.node_flow(path[:-1])) if len(path) > 1 else None
            value = yield from self._read_flow(path)
            node = self.add(path, parent, value.data)
        return node

    def _read_flow(self, path: Path) -> Flow[Any, Value]:
        value: Value | None = yield ReadStep(self.store, self.collection, "/".join(path), self.now())
        if value is None:
            raise RunEndedError(f"the run {'/'.join(path)} is unknown: it ended, or the store has lost it")
        return value

    def refresh_flow(self, path: Path) -> Flow[Any, Node]:
        """Read a node again; nodes below it count the units that it counts."""
        node = yield from self.node_flow(path)
        value = yield from self._read_flow(path)
        if value.data != node.data:
            node.update(value.data)
            for other in list(self._nodes.values()):
                if other.path[: len(path)] == path and other is not node:
                    other.update(other.data)
        return node

    def list_flow(self, path: Path = ()) -> Flow[Any, dict[Path, Details]]:
        """Return all nodes below and at a path, parents first."""
        values: Mapping[str, Value] = yield ReadStep(self.store, self.collection, None, self.now())
        found = {tuple(name.split("/")): Details.load(value.data) for name, value in values.items()}
        return {key: found[key] for key in sorted(found) if key[: len(path)] == path}

    # ---- create ------------------------------------------------------------------------------------------------------

    def create_flow(self, parent: Node | None, details: Details) -> Flow[Any, Node]:
        """Create a node, on condition that no node of its line has changed."""
        path = self.new_path(parent)
        data = details.dump()
        write = Write(self.collection, "/".join(path), data, details.ttl, None)
        conditions = () if parent is None else tuple(node.condition for node in parent.line)
        try:
            yield from self._write_flow(write, *conditions)
        except CollectionFull:
            yield from self._remove_ended_flow()
            yield from self._write_flow(write, *conditions)
        if parent is None:
            yield from self._enter_root_flow(details)
        return self.add(path, parent, data)

    def new_path(self, parent: Node | None) -> Path:
        """Return the path of a new node."""
        path = (self.root,) if parent is None else (*parent.path, secrets.token_hex(5))
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"a tree of runs has at most {MAX_DEPTH} levels", field="parent")
        return path

    def build(self, path: Path, parent: Node | None, data: bytes) -> Node:
        """Return a node from what the store keeps of it."""
        return Node(path, parent, data, self.store, self._clock)

    def add(self, path: Path, parent: Node | None, data: bytes) -> Node:
        """Know a node that was written."""
        node = self._nodes[path] = self.build(path, parent, data)
        return node

    def _write_flow(self, *writes: Write) -> Flow[Any, None]:
        yield ApplyStep(self.store, "acquire", (), self.now(), None, writes)

    def _enter_root_flow(self, details: Details) -> Flow[Any, None]:
        """List the root among all runs; if the list is full, the run is not listed."""
        try:
            yield from self._write_flow(Write(ROOTS, self.root, details.name.encode(), details.ttl, ANYTHING))
        except CollectionFull:
            return

    def _remove_ended_flow(self) -> Flow[Any, None]:
        """Remove nodes that have ended, to make room for others; not those whose carve-outs have a rest to return."""
        now = yield from self.time_flow()
        nodes = yield from self.list_flow()
        entries: Mapping[str, Value] = yield ReadStep(self.store, entries_of(self.root), None, self.now())
        kept = {path[:length] for path in (tuple(name.split("/")) for name in entries) for length in range(len(path))}
        ended = [path for path, details in nodes.items() if details.status == CLOSED or details.ends <= now]
        for path in ended:
            if nodes[path].carved is None and len(path) > 1 and path not in kept:
                yield from self._write_flow(Write(self.collection, "/".join(path), None))

    # ---- change ------------------------------------------------------------------------------------------------------

    def change_flow(
        self,
        path: Path,
        change: Callable[[Details], Details],
        verb: str = "acquire",
        asks: Callable[[Details], Sequence[Ask]] = lambda _: (),
        writes: Callable[[Details], Sequence[Write]] = lambda _: (),
    ) -> Flow[Any, Details]:
        """Replace what is stored of a node, in the same step as some asks; again if another process was first."""
        for _ in range(MAX_ATTEMPTS):
            value = yield from self._read_flow(path)
            details = Details.load(value.data)
            changed = change(details)
            if changed is details:
                return details
            write = Write(self.collection, "/".join(path), changed.dump(), changed.ttl, value.data)
            try:
                yield ApplyStep(self.store, verb, asks(changed), self.now(), None, (write, *writes(changed)))
            except ValueConflict as conflict:
                if conflict.write.collection != self.collection:
                    raise
                continue
            if path in self._nodes:
                yield from self.refresh_flow(path)
            return changed
        raise StoreUnavailable(f"could not change the run {'/'.join(path)}: other processes change it all the time")

    def end_flow(self, path: Path, status: str, *, ends_streams: bool = False) -> Flow[Any, Details]:
        """Stop or close a node: no call of it or of a node below it is admitted from now on."""

        def change(details: Details) -> Details:
            if details.status == OPEN or (details.status, status) == (STOPPED, CLOSED):
                return details.change(status=status, ends_streams=ends_streams or details.ends_streams)
            if ends_streams and not details.ends_streams:
                return details.change(ends_streams=True)
            return details

        return self.change_flow(path, change)

    def extend_flow(self, path: Path, change: Callable[[Details], Details]) -> Flow[Any, Details]:
        """Move the quotas and the end of a node in one step.

        Usage is kept as long as the window in which it was charged. If the end moves, each limit is charged one unit in
        the longer window in the same step, and the unit is refunded afterwards: the usage then counts until the new
        end. A process that is killed in between leaves one unit charged. The entry of a carve-out is kept as long, on
        condition that its rest was not returned; so are the listing of a root, and what calls were for.
        """
        node = yield from self.node_flow(path)
        touched: list[Ask] = []
        before: list[int] = []  # the end, as it was

        def changed_from(details: Details) -> Details:
            before[:] = [details.ends]
            return change(details)

        def asks(changed: Details) -> Sequence[Ask]:
            touched.clear()
            if [changed.ends] == before:
                return ()
            longer = self.build(path, node.parent, changed.dump())
            policy = longer.limiter.policy
            touched.append((policy, node.key, tuple(int(limit.rules.windowed) for limit in policy.limits)))
            return touched

        def writes(changed: Details) -> Sequence[Write]:
            return () if changed.carved is None else (unreturned(node, UNRETURNED, changed.ttl),)

        details = yield from self.change_flow(path, changed_from, "adjust", asks, writes)
        for policy, key, costs in touched:
            yield ApplyStep(self.store, "adjust", ((policy, key, tuple(-cost for cost in costs)),), self.now())
        if touched:
            if len(path) == 1:
                yield from self._enter_root_flow(details)
            yield from self._keep_labels_flow(self.build(path, node.parent, details.dump()))
        return details

    def _keep_labels_flow(self, node: Node) -> Flow[Any, None]:
        """Keep what the calls of a node were for until its new end."""
        listed = labels_of(self.root)
        values: Mapping[str, Value] = yield ReadStep(self.store, listed, None, self.now())
        names = [name for name in values if name.partition("=")[0] == node.value_name]
        policy = node.labels.policy
        for group in in_batches(names):
            keys = [node.label_key(name.partition("=")[2]) for name in group]
            kept = tuple(Write(listed, name, b"", node.details.ttl, ANYTHING) for name in group)
            for cost, writes in ((1, kept), (-1, ())):
                asks = [(policy, key, (cost,) * len(policy.limits)) for key in keys]
                yield ApplyStep(self.store, "adjust", asks, self.now(), None, writes)


def check_name(name: str) -> None:
    """Check the name of a node."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise ConfigError(f"must be 1 to 200 characters without '/' and control characters, not {name!r}", field="name")


def check_policy_name(name: str) -> None:
    """Refuse the name that the nodes themselves have."""
    if name == POLICY:
        raise ConfigError(f"the policy name {POLICY!r} is that of runs: choose another", field="parent")


def check_ttl(name: str, value: float) -> int:
    """Return the microseconds of a time to live."""
    if not 0 < value <= 366 * 86_400:
        raise ConfigError(f"must be above 0 and at most 366 days, not {value!r} s", field=name)
    return round(value * SECOND)
