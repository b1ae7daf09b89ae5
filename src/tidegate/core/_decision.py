"""Decision, and the verbs that decide about all limits of a key at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tidegate.core._algorithms import NEVER, State, View
from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core._limit import Limit


class LimitDecision(NamedTuple):
    """The result for one limit. Times are in seconds; `retry_after` is None if the cost can never fit."""

    name: str
    quota: int
    remaining: int
    retry_after: float | None
    reset_after: float
    allowed: bool
    unit: str
    limit: Limit


class Decision(
    tuple[bool, int, "tuple[Limit, ...]", "Sequence[State | None] | Sequence[View]", "Sequence[int] | None"]
):
    """The result of one call; true if the call may proceed.

    `of_states` and `of_views` create one. It is a tuple, the cheapest object to create, of: whether the call is within
    the limits, the instant, the limits, and either their views and None, or their states and the costs from which the
    views are computed when they are read. Only the core and shortcuts of stores use these positions.
    """

    __slots__ = ()

    @classmethod
    def of_states(
        cls,
        at: int,
        limits: tuple[Limit, ...],
        states: Sequence[State | None],
        costs: Sequence[int],
        *,
        within_limits: bool,
    ) -> Self:
        """Create a decision from the states after the call, and the costs for which views are computed from them."""
        return cls((within_limits, at, limits, states, costs))

    @classmethod
    def of_views(cls, at: int, limits: tuple[Limit, ...], views: Sequence[View], *, within_limits: bool) -> Self:
        """Create a decision from the view of each limit."""
        return cls((within_limits, at, limits, views, None))

    @property
    def within_limits(self) -> bool:
        """Whether no limit denied the call: the same as `allowed`, except in shadow mode, which allows every call."""
        return self[0]

    @property
    def allowed(self) -> bool:
        """Whether the call may proceed."""
        return self[0]

    @property
    def at(self) -> int:
        """The instant of the decision, in microseconds since 1970, by the store's clock."""
        return self[1]

    @property
    def policy_limits(self) -> tuple[Limit, ...]:
        """The limits that were decided on, in the order of the policy; `limits` has the result for each."""
        return self[2]

    @property
    def states(self) -> Sequence[State | None] | None:
        """The state of each limit after the call; None if the store returned views."""
        return None if self[4] is None else self[3]

    @property
    def views(self) -> Sequence[View]:
        """The view of each limit, in integers."""
        _, at, limits, results, costs = self
        if costs is None:
            return results  # type: ignore[return-value]  # without costs, views
        if len(limits) == 1:
            return (limits[0].view(results[0], limits[0], costs[0], at),)
        triples = zip(limits, results, costs, strict=True)
        return [limit.view(state, limit, cost, at) for limit, state, cost in triples]

    def with_views(self) -> Self:
        """Return this decision with its views computed: it no longer depends on states."""
        within_limits, at, limits, _, costs = self
        return self if costs is None else self.of_views(at, limits, self.views, within_limits=within_limits)

    def about(self, limits: tuple[Limit, ...], places: Sequence[int]) -> Self:
        """Return the decision about some of its limits, given as `limits` and as their places among all."""
        views = self.views
        return self.of_views(self.at, limits, [views[place] for place in places], within_limits=self.within_limits)

    @property
    def used(self) -> list[int]:
        """The permits in use at each limit: more than it allows if a correction took more, or the limit was lowered."""
        return [limit.burst - view.remaining for limit, view in zip(self[2], self.views, strict=True)]

    @property
    def remaining(self) -> int:
        """Permits left at the limit with the fewest."""
        within_limits, at, limits, results, costs = self
        if costs is not None and len(limits) == 1:  # the most common decision, without lists
            if not within_limits and costs[0] == 1:
                return 0  # a limit that denies one permit has none
            limit = limits[0]
            remaining = limit.remaining_of(results[0], limit, at)
        elif costs is not None:
            pairs = zip(limits, results, strict=True)
            remaining = min([limit.remaining_of(state, limit, at) for limit, state in pairs])
        else:
            remaining = min([view[0] for view in self.views])  # a list: a generator costs as much as the view
        return remaining if remaining > 0 else 0  # noqa: FURB136 - max() would cost a third of the view

    @property
    def retry(self) -> int:
        """Microseconds until the same call would be allowed: 0 if it is allowed now, NEVER (-1) if it can never be."""
        _, at, limits, results, costs = self
        if costs is not None and len(limits) == 1:  # the most common decision, without lists
            limit = limits[0]
            return limit.retry_of(results[0], limit, costs[0], at)
        waits = [view[1] for view in self.views]
        return NEVER if NEVER in waits else max(waits)

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same call would be allowed: 0.0 if it is allowed now, None if it can never be."""
        within_limits, at, limits, results, costs = self
        if within_limits:
            return 0.0
        if costs is not None and len(limits) == 1:  # as in `retry`: a further call would cost a third of the view
            limit = limits[0]
            retry = limit.retry_of(results[0], limit, costs[0], at)
        else:
            retry = self.retry
        return None if retry == NEVER else retry / SECOND

    @property
    def reset_after(self) -> float:
        """Seconds until all permits of all limits are available again."""
        return max([view[2] for view in self.views]) / SECOND

    @property
    def limits(self) -> tuple[LimitDecision, ...]:
        """The result for each limit, in the order of the policy."""
        return tuple(
            LimitDecision(
                limit.name,
                limit.quota,
                max(0, remaining),
                None if retry == NEVER else retry / SECOND,
                reset / SECOND,
                not retry,
                limit.unit,
                limit,
            )
            for limit, (remaining, retry, reset) in zip(self[2], self.views, strict=True)
        )

    @property
    def violated(self) -> tuple[str, ...]:
        """Names of the limits that denied the call."""
        return tuple(limit.name for limit, view in zip(self[2], self.views, strict=True) if view[1])

    def __bool__(self) -> bool:
        """Return whether the call may proceed."""
        return self.allowed

    def __repr__(self) -> str:
        """Show the main attributes."""
        shown = f"allowed={self.allowed}, remaining={self.remaining}, retry_after={self.retry_after}"
        return f"{type(self).__name__}({shown}, violated={list(self.violated)})"


class LocalDecision(Decision):
    """A decision made in this process while the store was unavailable, according to `on_store_error`.

    With `on_store_error: local`, its limits are the share of this process.
    """

    __slots__ = ()


def denied_without_store(decision: Decision, limits: tuple[Limit, ...]) -> bool:
    """Return whether a denial only says that the store was unavailable: the share of this process was not exceeded.

    `limits` are those of the policy; the limits of a share are other objects.
    """
    if not isinstance(decision, LocalDecision) or decision.within_limits:
        return False
    own = {id(limit) for limit in limits}
    return any(id(limit) in own and view[1] for limit, view in zip(decision.policy_limits, decision.views, strict=True))


class ShadowDecision(Decision):
    """A decision of a policy in shadow mode: always allowed; `violated` names the limits that would have denied it."""

    __slots__ = ()

    @property
    def allowed(self) -> bool:
        """Whether the call may proceed: always."""
        return True

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same call would be allowed: always 0.0."""
        return 0.0


class LocalShadowDecision(ShadowDecision, LocalDecision):  # type: ignore[misc]  # both are the same tuple
    """A decision of a policy in shadow mode, made while the store was unavailable."""

    __slots__ = ()


def shadow(decision: Decision) -> ShadowDecision:
    """Return the decision of a policy in shadow mode: it always allows the call."""
    return (LocalShadowDecision if isinstance(decision, LocalDecision) else ShadowDecision)(decision)


def join_decisions(decisions: Sequence[Decision]) -> Decision:
    """Return one decision about all limits of several, which were made together: allowed if all of them are."""
    if len(decisions) == 1:
        return decisions[0]
    limits: list[Limit] = []
    states: list[Any] = []
    left: list[int] = []
    at = decisions[0].at
    for each in decisions:
        _, instant, own, results, costs = each
        limits += own
        if costs is None or instant != at or each.__class__ is not Decision:
            break
        states += results
        left += costs
    else:  # the views can be computed when they are read
        return Decision((all([each[0] for each in decisions]), at, tuple(limits), states, left))  # noqa: C419 - faster
    limits = [limit for each in decisions for limit in each.policy_limits]
    views = [view for each in decisions for view in each.views]
    kind = LocalDecision if any(isinstance(each, LocalDecision) for each in decisions) else Decision
    return kind.of_views(at, tuple(limits), views, within_limits=all(each.allowed for each in decisions))


# ---- verbs: apply to the states of all limits of a key at once -------------------------------------------------------
#
# Each verb takes the limits, their states, one cost per limit, the instant, and for `adjust` the instant `at` of the
# charge to correct. It returns whether the call is allowed, the new states (the same object if nothing changed), and
# the costs for which a Decision computes the views from the new states.

Limits = Sequence["Limit"]
States = Sequence[State | None]
VerbFunction = Callable[[Limits, States, Sequence[int], int, int | None], tuple[bool, States, Sequence[int]]]


def acquire(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Charge every limit, or none if one of them denies."""
    del at
    changed = []
    # strict=True would cost a twentieth of the decision.
    for limit, state, cost in zip(limits, states, costs):  # noqa: B905 - see above
        if cost:
            state = limit.charge(state, limit, cost, now)  # noqa: PLW2901 - before becomes after
            if state is None:
                return False, states, costs
        changed.append(state)
    return True, changed, zero_costs(limits)


def peek(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Return what `acquire` would return; the caller does not store the new states."""
    return acquire(limits, states, costs, now, at)


def hold(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Charge like `acquire`, and mark states so that the charge can be corrected later."""
    allowed, changed, left = acquire(limits, states, costs, now, at)
    if allowed:
        triples = zip(limits, changed, costs, strict=True)
        changed = [limit.rules.mark(state) if cost and state else state for limit, state, cost in triples]
    return allowed, changed, left


def adjust(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Correct an earlier charge by a signed difference per limit: the charge at `at`, or the latest."""
    changed = []
    for limit, state, cost in zip(limits, states, costs, strict=True):
        changed.append(limit.rules.adjust(state, limit, cost, now, at) if cost else state)
    return True, changed, zero_costs(limits)


def reset(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Clear all states."""
    del states, costs, now, at
    return True, [None] * len(limits), zero_costs(limits)


def zero_costs(limits: Limits) -> Sequence[int]:
    """Return a cost of 0 for each limit."""
    return ZERO_COSTS[len(limits)] if len(limits) < len(ZERO_COSTS) else (0,) * len(limits)


ZERO_COSTS: Final = tuple((0,) * count for count in range(9))  # by the number of limits


class Verb(NamedTuple):
    """A verb: the function that decides, and what stores and callers have to know about it."""

    decide: VerbFunction
    changes: bool = True  # the new states are stored
    clears: bool = False  # it removes all states
    charges: bool = False  # an allowed call takes permits, which are refunded if its caller is cancelled
    asks: bool = False  # it may be denied; it is not sent if its caller is cancelled before, since it settles nothing
    marks: bool = False  # the charge is marked, so that it can be corrected exactly
    corrects: bool = False  # it corrects an earlier charge: it is sent once, since repeating it would count twice


# A new verb is an entry here and its function; its number in the ports is its place.
VERBS: Final[dict[str, Verb]] = {
    "acquire": Verb(acquire, charges=True, asks=True),
    "peek": Verb(peek, asks=True, changes=False),
    "hold": Verb(hold, charges=True, asks=True, marks=True),
    "adjust": Verb(adjust, corrects=True),
    "reset": Verb(reset, clears=True),
}
