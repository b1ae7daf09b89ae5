"""Charges calls to a node and its ancestors, in one step of the store, before they are sent.

reserve_flow ──► one joint call of the engine (alternatives in order), on condition that no node of the line changed
│           a condition fails: read that node again, and ask again
│           denied, and a carve-out below a node has expired: return its rest to the node, and ask again
▼
RunCharge ──► settled once, where it was charged (see `carving`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.joint import Charged, JointCall, acquire_flow
from tidegate._limiter.reservation import BaseReservation
from tidegate.agents._limits import COUNTED, read_cost
from tidegate.agents._node import OPEN, STOPPED, Node
from tidegate.agents._tree import RunEndedError, Tree
from tidegate.core._algorithms import NEVER
from tidegate.core._decision import Decision, LocalDecision
from tidegate.errors import Denied, StoreUnavailable, ValueConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from tidegate._limiter.joint import LimiterAsk
    from tidegate._limiter.reservation import ReservedCharge
    from tidegate._runtime.clock import Signal
    from tidegate._runtime.flow import Flow
    from tidegate.agents._limits import RunCost

MAX_REFRESHES: Final = 64  # how often a call is asked again because a node of its line has changed


class RunDenied(Denied):
    """A call that a node of its run has denied, before it was sent.

    `node` has the names from the root to the node that denied, `limit` the name of its limit, or why the node accepts
    no calls: `stopped`, `closed`, `ended` or `unknown`. `left` is what remains per unit at each node of the line.
    """

    def __init__(
        self,
        message: str,
        decision: Decision,
        node: str,
        limit: str,
        left: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        """Keep who denied, and why."""
        super().__init__(message, decision, node)
        self.limit = limit
        self.left: Mapping[str, Mapping[str, int]] = left or {}

    def __reduce__(self) -> tuple[type[RunDenied], tuple[Any, ...]]:
        """Support pickling."""
        return type(self), (str(self), self.decision.with_views(), self.node, self.limit, self.left)


class RunCall(JointCall):
    """A joint call that remembers what denied it."""

    __slots__ = ("denials",)

    def __init__(self, alternatives: Sequence[Sequence[LimiterAsk]]) -> None:
        """Ask for the first alternative that is allowed."""
        super().__init__(alternatives)
        self.denials: list[Charged] = []

    def remember_denial(self, charged: Charged) -> None:
        """Remember a denial."""
        super().remember_denial(charged)
        self.denials.append(charged)


class RunCharge(NamedTuple):
    """What a call was charged: at which node, the place of the alternative, and the reservation."""

    node: Node
    chosen: int
    charges: Sequence[ReservedCharge]


def no_decision(at: int = 0) -> Decision:
    """Return a denial without limits: the node accepts no calls."""
    return Decision.of_views(at, (), (), within_limits=False)


def check_open(node: Node) -> None:
    """Raise RunDenied if the node or an ancestor was stopped or closed."""
    for each in node.line:
        status = each.details.status
        if status != OPEN:
            verb = "was stopped" if status == STOPPED else "is closed"
            raise RunDenied(f"{node.title}: the run {each.title} {verb}", no_decision(), each.title, status)


def check_time(node: Node, at: int, token_ends: int | None) -> None:
    """Raise RunDenied if the node, an ancestor or the token had ended at an instant."""
    for each in node.line:
        if at >= each.details.ends:
            raise RunDenied(f"{node.title}: the run {each.title} has ended", no_decision(at), each.title, "ended")
    if token_ends is not None and at >= token_ends:
        message = f"{node.title}: the token has ended: ask for another"
        raise RunDenied(message, no_decision(at), node.title, "ended")


def reserve_flow(
    tree: Tree,
    node: Node,
    costs: Sequence[RunCost],
    timeout: float | None,
    make_signal: Callable[[], Signal],
    return_expired: Callable[[Node], Flow[Any, bool]],
    token_ends: int | None = None,
) -> Flow[Any, RunCharge]:
    """Charge the first of several costs that fits, at a node and its ancestors."""
    for _ in range(MAX_REFRESHES):
        check_open(node)
        amounts = [read_cost(cost, node.units, calls=1) for cost in costs]
        call = RunCall([node.asks(amount) for amount in amounts])
        try:
            decision = yield from acquire_flow(call, "hold", timeout, 0, make_signal)
        except ValueConflict as conflict:
            yield from refresh_flow(tree, node, conflict)
            continue
        except Denied as denied:
            check_time(node, denied.decision.at, token_ends)
            if isinstance(denied.decision, LocalDecision):
                raise StoreUnavailable(f"{node.title}: the store is unavailable; try again later") from None
            if (yield from return_expired(node)):
                continue
            raise explain_denial(node, call, denied.decision, amounts[-1]) from None
        charges = call.reserved()
        try:
            check_time(node, decision.at, token_ends)
        except RunDenied:
            yield from BaseReservation(charges, node.limiter.clock, 60).cancel_flow()
            raise
        return RunCharge(node, call.chosen, charges)
    raise StoreUnavailable(f"{node.title}: its line changes all the time; try again later")


def refresh_flow(tree: Tree, node: Node, conflict: ValueConflict) -> Flow[Any, None]:
    """Read the node again whose condition has failed."""
    path = tuple(conflict.write.name.split("/"))
    try:
        yield from tree.refresh_flow(path)
    except RunEndedError as ended:
        title = next((each.title for each in node.line if each.path == path), node.title)
        message = f"{node.title}: the run {title} is unknown: it ended, or the store has lost it"
        raise RunDenied(message, no_decision(), title, "unknown") from ended


def explain_denial(node: Node, call: RunCall, decision: Decision, cost: Mapping[str, int]) -> RunDenied:
    """Say which node and limit denied, and what is left where."""
    left: dict[str, dict[str, int]] = {}
    for (limiter, _), found in (
        zip(call.denials[-1].asks, call.denials[-1].decisions, strict=True) if call.denials else ()
    ):
        left[limiter.node or limiter.policy.name] = {
            limit.name: max(0, view.remaining)
            for limit, view in zip(found.policy_limits, found.views, strict=True)
            if not is_counter(limit.quota)
        }
    for charged in reversed(call.denials):
        for (limiter, _), found in reversed(list(zip(charged.asks, charged.decisions, strict=True))):
            for limit, view in zip(found.policy_limits, found.views, strict=True):
                if view.retry:
                    title = limiter.node or limiter.policy.name
                    wanted, rest = cost.get(limit.unit, 0), max(0, view.remaining)
                    when = "" if view.retry == NEVER else f"; try again in {view.retry / 1e6:.3g} s"
                    message = (
                        f"{node.title}: {title} denied it: {limit.name} has {rest} of {limit.quota} {limit.unit} left, "
                        f"and the call needs {wanted}{when}"
                    )
                    return RunDenied(message, decision, title, limit.name, left)
    return RunDenied(f"{node.title}: denied", decision, node.title, "", left)


def is_counter(quota: int) -> bool:
    """Return whether a limit only counts."""
    return quota == COUNTED
