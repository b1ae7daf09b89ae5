"""Carve-outs: a part of what a node has left, reserved for a child when it is created.

The parent and its ancestors are charged the whole part in the step that creates the child; the calls of the child are
charged to the child alone. An entry per carve-out says whether its rest was returned. It changes in two steps, so that
each call is settled at exactly one place, whichever process is killed in between:

    open ───────────────► closing ───────────────► (removed)
    settled at the child   the child's usage no     the rest, what the child has not used, is refunded to the
                           longer changes; settled  parent in the step that removes the entry
                           at the parent

Any process may continue from `closing`. The rest of a carve-out that has ended is returned by the next call that is
denied in its tree, and by the next that reads usage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.joint import acquire_flow
from tidegate._limiter.waiting import ApplyStep, ReadStep
from tidegate._runtime.clock import ThreadSignal
from tidegate.agents._charging import RunCall, explain_denial
from tidegate.agents._errors import RunEndedError
from tidegate.agents._limits import read_cost, run_name
from tidegate.agents._node import CLOSED, UNRETURNED, Details, Node, Path, entries_of, unreturned
from tidegate.errors import ConfigError, Denied, ValueConflict
from tidegate.stores._values import Write

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._limiter.base_limiter import BaseLimiter
    from tidegate._policy import Key
    from tidegate._runtime.flow import Flow
    from tidegate.agents._limits import Amount
    from tidegate.agents._tree import Tree
    from tidegate.stores._base import Ask
    from tidegate.stores._values import Value

CLOSING: Final = b"closing:"  # followed by the instant at which it was charged
MAX_ATTEMPTS: Final = 64


def settled_here(node: Node) -> tuple[Write, ...]:
    """Return the condition under which a call of a node is settled where it was charged."""
    return tuple(unreturned(each) for each in node.carved_line)


class Carving:
    """Creates carve-outs in a tree, and returns what is left of them."""

    def __init__(self, tree: Tree) -> None:
        """Use the nodes of this tree."""
        self._tree = tree
        self._entries = entries_of(tree.root)

    def create_flow(self, parent: Node, details: Details, carve: Mapping[str, Amount]) -> Flow[Any, Node]:
        """Create a child that has a part of what its parent has left; raises RunDenied if that is not there."""
        amounts = {unit: amount for unit, amount in read_cost(carve, parent.units).items() if amount}
        if not amounts:
            raise ConfigError("needs an amount of at least one, such as {'usd': '0.05'}", field="carve")
        caps = tuple(f"{amount}/run unit={unit} name={run_name(unit)}" for unit, amount in amounts.items())
        own = {word for text in details.limits for word in text.split() if word.startswith("name=")}
        for cap in caps:
            if cap.split()[-1] in own:
                raise ConfigError("a unit of the carve-out has a limit, too: leave out the limit", field="limits")
        details = details._replace(limits=(*details.limits, *caps), carved=amounts)
        path = self._tree.new_path(parent)
        name = "/".join(path)
        writes = (
            Write(self._tree.collection, name, details.dump(), details.ttl, None),
            Write(self._entries, name, UNRETURNED, details.ttl, None),
        )
        first, *others = parent.asks(amounts)
        asks = [first._replace(conditions=first.conditions + writes), *others]
        if len(set(self._tree.store.key_slots([each.ask() for each in asks]))) > 1:
            message = "a carve-out of a run whose parent is in another slot of the cluster is not supported"
            raise ConfigError(message, field="carve")
        call = RunCall([asks])
        try:
            yield from acquire_flow(call, "hold", 0.0, 0, ThreadSignal)
        except Denied as denied:
            if (yield from self.return_expired_flow(parent)):
                return (
                    yield from self.create_flow(parent, details._replace(limits=details.limits[: -len(caps)]), carve)
                )
            raise explain_denial(parent, call, denied.decision) from None
        return self._tree.add(path, parent, details.dump())

    # ---- return ------------------------------------------------------------------------------------------------------

    def return_expired_flow(self, node: Node) -> Flow[Any, bool]:
        """Return the rest of all carve-outs of the tree that have ended; returns whether there was one."""
        del node  # a carve-out may be anywhere: its parent is charged at all nodes above
        entries: Mapping[str, Value] = yield ReadStep(self._tree.store, self._entries, None, self._tree.now())
        if not entries:
            return False
        now = yield from self._tree.time_flow()
        found = False
        for name in sorted(entries, reverse=True):  # children before their parents
            path = tuple(name.split("/"))
            if (yield from self._has_ended_flow(path, now)):
                yield from self.return_flow(path)
                found = True
        return found

    def return_below_flow(self, path: Path) -> Flow[Any, None]:
        """Return the rest of the carve-outs at and below a node that was closed."""
        entries: Mapping[str, Value] = yield ReadStep(self._tree.store, self._entries, None, self._tree.now())
        for name in sorted(entries, reverse=True):
            below = tuple(name.split("/"))
            if below[: len(path)] == path:
                yield from self.return_flow(below)

    def _has_ended_flow(self, path: Path, now: int) -> Flow[Any, bool]:
        """Return whether a node, or one above it, was closed or has reached its end."""
        for length in range(1, len(path) + 1):
            try:
                node = yield from self._tree.refresh_flow(path[:length])
            except RunEndedError:
                return True
            if node.details.status == CLOSED or node.details.ends <= now:
                return True
        return False

    def return_flow(self, path: Path) -> Flow[Any, None]:
        """Return what a carve-out has left to its parent, once; it accepts no calls any more."""
        name = "/".join(path)
        for _ in range(MAX_ATTEMPTS):
            entry: Value | None = yield ReadStep(self._tree.store, self._entries, name, self._tree.now())
            if entry is None:
                return
            try:
                if entry.data == UNRETURNED:
                    closing = CLOSING + str(entry.written).encode()
                    write = Write(self._entries, name, closing, max(1, entry.ends - entry.written), UNRETURNED)
                    yield ApplyStep(self._tree.store, "acquire", (), self._tree.now(), None, (write,))
                else:
                    yield from self._refund_flow(path, entry)
            except ValueConflict:
                continue

    def _refund_flow(self, path: Path, entry: Value) -> Flow[Any, None]:
        node = yield from self._tree.node_flow(path)
        assert node.parent is not None and node.details.carved is not None  # noqa: PT018, S101 - it has an entry
        policy = node.limiter.policy
        (decision,) = yield ApplyStep(
            self._tree.store, "peek", ((policy, node.key, (0,) * len(policy.limits)),), self._tree.now()
        )
        used = {
            limit.name: limit.burst - view.remaining for limit, view in zip(policy.limits, decision.views, strict=True)
        }
        rest = {unit: max(0, amount - used[run_name(unit)]) for unit, amount in node.details.carved.items()}
        asks, conditions = yield from self.place_flow(node.parent, {unit: -amount for unit, amount in rest.items()})
        done = Write(self._entries, node.value_name, None, 0, entry.data)
        at = int(entry.data.removeprefix(CLOSING))
        yield ApplyStep(self._tree.store, "adjust", asks, self._tree.now(), at, (done, *conditions))

    def place_flow(self, node: Node, change: Mapping[str, int]) -> Flow[Any, tuple[list[Ask], list[Write]]]:
        """Return the corrections for a change at a node, and the condition under which it counts there.

        What was charged inside a carve-out that was returned counts where the carve-out itself was charged.
        """
        returned: set[Node] = set()
        for each in node.carved_line:
            entry: Value | None = yield ReadStep(self._tree.store, self._entries, each.value_name, self._tree.now())
            if entry is None or entry.data != UNRETURNED:
                returned.add(each)
        places: dict[Node, dict[str, int]] = {}
        above: dict[str, int] = {}
        for unit, amount in change.items():
            counted: list[Node] = []
            for each in node.line:
                counted.append(each)
                if unit in (each.details.carved or ()):
                    if each not in returned:
                        break
                    counted = []
            else:
                above[unit] = amount
            for each in counted:
                places.setdefault(each, {})[unit] = amount
        asks: list[Ask] = [correction(each.limiter, each.key, own) for each, own in places.items()]
        asks += [correction(limiter, key, above) for limiter, key in node.line[-1].above]
        return asks, [unreturned(each) for each in node.carved_line if each not in returned]


def correction(limiter: BaseLimiter, key: Key, change: Mapping[str, int]) -> Ask:
    """Return the correction of what some key was charged."""
    return limiter.policy, key, tuple(change.get(limit.unit, 0) for limit in limiter.policy.limits)
