"""Charges calls to a node and its ancestors, in one step of the store, before they are sent.

reserve_flow ──► one joint call of the engine (alternatives in order), on condition that no node of the line changed
│           a condition fails: read that node again, and ask again
│           denied, and a carve-out below a node has expired: return its rest to the node, and ask again
▼
RunCharge ──► settled once, where it was charged (see `carving`)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._limiter.joint import Charged, JointCall, LimiterAsk, acquire_flow
from tidegate._limiter.reservation import BaseReservation
from tidegate.agents._errors import RunDenied, RunEndedError, no_decision
from tidegate.agents._limits import CALLS, COUNTED
from tidegate.agents._node import OPEN, REPEATS, STOPPED, Node, counts_label, entries_of
from tidegate.core._algorithms import NEVER
from tidegate.core._decision import Decision, LocalDecision
from tidegate.errors import CollectionFull, Denied, StoreUnavailable, ValueConflict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from tidegate._limiter.reservation import ReservedCharge
    from tidegate._runtime.clock import Signal
    from tidegate._runtime.flow import Flow
    from tidegate.agents._credits import CreditNode
    from tidegate.agents._node import Path
    from tidegate.agents._tree import Tree
    from tidegate.core._algorithms import View
    from tidegate.core._limit import Limit

MAX_REFRESHES: Final = 64  # how often a call is asked again because a node of its line has changed


class RunCall(JointCall):
    """A joint call that remembers what denied it."""

    __slots__ = ("denials",)

    def __init__(self, alternatives: Sequence[Sequence[LimiterAsk]]) -> None:
        """Ask for the first alternative that is allowed."""
        super().__init__(alternatives)
        self.denials: list[Charged] = []  # of the last time it was asked for, in the order of the alternatives

    def ask_flow(self, verb: str, numbers: Sequence[int]) -> Flow[Any, Decision]:
        """Ask for the first alternative that is allowed."""
        self.denials.clear()
        return super().ask_flow(verb, numbers)

    def remember_denial(self, charged: Charged) -> None:
        """Remember a denial."""
        super().remember_denial(charged)
        self.denials.append(charged)


class Payment(NamedTuple):
    """One way to pay for a call: a cost by counted unit, and the credits that pay their unit of it, if any do."""

    name: str
    cost: Mapping[str, int]
    credits: CreditNode | None = None

    def asks(self, node: Node, digest: str, label: str) -> list[LimiterAsk]:
        """Return what is charged for a call of a node."""
        labels = [node.label_ask(self.cost, label)] if label else []
        return [*self._asks(node, digest), *labels]

    def _asks(self, node: Node, digest: str) -> list[LimiterAsk]:
        if self.credits is None:
            return node.asks(self.cost, digest)
        paid = self.credits.node
        left = {unit: amount for unit, amount in self.cost.items() if unit != self.credits.unit}
        amount = {self.credits.unit: self.cost[self.credits.unit], CALLS: 1}
        return [*node.asks(left, digest), LimiterAsk(paid.limiter, paid.key, amount, (paid.condition,))]


class RunCharge(NamedTuple):
    """What a call was charged: at which node, the place of the alternative, how it is paid, and the reservation."""

    node: Node
    chosen: int
    payment: Payment
    charges: Sequence[ReservedCharge]


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
    find_payments: Callable[[], Sequence[Payment]],
    timeout: float | None,
    make_signal: Callable[[], Signal],
    return_expired: Callable[[Node], Flow[Any, bool]],
    token_ends: int | None = None,
    digest: str = "",
    label: str = "",
) -> Flow[Any, RunCharge]:
    """Charge the first of several payments that fits, at a node and its ancestors."""
    for _ in range(MAX_REFRESHES):
        check_open(node)
        payments = find_payments()
        call = RunCall([payment.asks(node, digest, label) for payment in payments])
        try:
            decision = yield from acquire_flow(call, "hold", timeout, 0, make_signal)
        except CollectionFull:
            label = ""  # too many tools and models are listed: it is counted at its node, and not by what it is for
            continue
        except ValueConflict as conflict:
            yield from refresh_flow(trees_of(tree, payments), node, conflict)
            continue
        except Denied as denied:
            check_time(node, denied.decision.at, token_ends)
            if isinstance(denied.decision, LocalDecision):
                raise StoreUnavailable(f"{node.title}: the store is unavailable; try again later") from None
            if (yield from return_expired(node)):
                continue
            raise explain_denial(node, call, denied.decision) from None
        charges = call.reserved()
        try:
            check_time(node, decision.at, token_ends)
        except RunDenied:
            yield from BaseReservation(charges, node.limiter.clock, 60).cancel_flow()
            raise
        if label:
            node.known_labels.add(label)
        return RunCharge(node, call.chosen, payments[call.chosen], charges)
    raise StoreUnavailable(f"{node.title}: its line changes all the time; try again later")


def trees_of(tree: Tree, payments: Iterable[Payment]) -> list[Tree]:
    """Return the trees whose nodes some payments charge."""
    return [tree, *(payment.credits.tree for payment in payments if payment.credits is not None)]


def refresh_flow(trees: Sequence[Tree], node: Node, conflict: ValueConflict) -> Flow[Any, None]:
    """Read the node again whose condition has failed; raises RunDenied if that is the entry of a carve-out."""
    path = tuple(conflict.write.name.split("/"))
    if conflict.write.collection == entries_of(path[0]):
        check_open(node)
        raise returned_denial(node, next((each.title for each in node.line if each.path == path), node.title))
    yield from refresh_path_flow(next(each for each in trees if each.root == path[0]), node, path)


def returned_denial(node: Node, title: str) -> RunDenied:
    """Return the denial of a carve-out whose rest was returned."""
    message = f"{node.title}: the carve-out {title} has ended, and what it had left was returned"
    return RunDenied(message, no_decision(), title, "ended")


def refresh_path_flow(tree: Tree, node: Node, path: Path) -> Flow[Any, None]:
    """Read a node of a line again; raises RunDenied if it is unknown."""
    try:
        yield from tree.refresh_flow(path)
    except RunEndedError as ended:
        title = next((each.title for each in node.line if each.path == path), node.title)
        message = f"{node.title}: the run {title} is unknown: it ended, or the store has lost it"
        raise RunDenied(message, no_decision(), title, "unknown") from ended


def explain_denial(node: Node, call: RunCall, decision: Decision) -> RunDenied:
    """Say which node and limit denied the first alternative, and what is left where."""
    left: dict[str, dict[str, int]] = {}
    found: RunDenied | None = None
    for charged in call.denials:
        for (limiter, (_, key, costs)), own in zip(charged.asks, charged.decisions, strict=True):
            if counts_label(key):
                continue
            title = limiter.node or limiter.policy.name
            rows = list(zip(own.policy_limits, own.views, costs, strict=True))
            shown = {limit.name: max(0, view.remaining) for limit, view, _ in rows if not is_counter(limit.quota)}
            left.setdefault(title, {}).update(shown)
            for limit, view, wanted in rows:
                if view.retry and found is None:
                    message = f"{node.title}: {title} denied it: {_reason(limit, view, wanted)}"
                    found = RunDenied(message, decision, title, limit.name, left, limit.unit, limit.quota, wanted)
    return found or RunDenied(f"{node.title}: denied", decision, node.title, "", left)


def _reason(limit: Limit, view: View, wanted: int) -> str:
    if limit.name == REPEATS:
        return f"the same request was made {limit.quota} times in this run; change it, or stop"
    rest = max(0, view.remaining)
    when = "" if view.retry == NEVER else f"; try again in {view.retry / 1e6:.3g} s"
    return f"{limit.name} has {rest} of {limit.quota} {limit.unit} left, and the call needs {wanted}{when}"


def is_counter(quota: int) -> bool:
    """Return whether a limit only counts."""
    return quota == COUNTED
