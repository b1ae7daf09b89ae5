"""A Decision: what was asked of every limit at once, and what each of them said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.algorithms import NEVER, State, View
from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from tidegate.core.limit import Limit


class LimitDecision(NamedTuple):
    """What one limit said. Times are in seconds; `retry_after` is None when the cost can never fit."""

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
    """The answer to one call; true when it may proceed.

    It holds what the store answered with: whether, when, by which limits, and either their views or, where the states
    are at hand, those and the costs still open, from which the views are worked out when somebody asks.
    """

    __slots__ = ()

    @property
    def allowed(self) -> bool:
        """Whether the call may proceed."""
        return self[0]

    @property
    def at(self) -> int:
        """The instant of the decision, in microseconds since 1970, by the store's clock."""
        return self[1]

    @property
    def views(self) -> Sequence[View]:
        """What each limit said, as the core's integers: remaining, retry and reset."""
        _, at, limits, told, costs = self
        if costs is None:
            return told  # type: ignore[return-value]  # without costs, views
        if len(limits) == 1:
            return (limits[0].rules.view(told[0], limits[0], costs[0], at),)
        triples = zip(limits, told, costs, strict=True)
        return [limit.rules.view(state, limit, cost, at) for limit, state, cost in triples]

    @property
    def remaining(self) -> int:
        """Permits left at the limit that has the fewest."""
        return min([view[0] for view in self.views])  # a list: a generator costs as much as the view

    @property
    def retry(self) -> int:
        """Microseconds until the same call would be allowed: 0 if it is, NEVER (-1) if it never will be."""
        waits = [view[1] for view in self.views]
        return NEVER if NEVER in waits else max(waits)

    @property
    def retry_after(self) -> float | None:
        """Seconds until the same call would be allowed; 0.0 when it is, None when it never will be."""
        if self.allowed:
            return 0.0
        return None if self.retry == NEVER else self.retry / SECOND

    @property
    def reset_after(self) -> float:
        """Seconds until every limit is as if nothing had been spent."""
        return max([view[2] for view in self.views]) / SECOND

    @property
    def limits(self) -> tuple[LimitDecision, ...]:
        """What each limit said, in the policy's order."""
        return tuple(
            LimitDecision(
                limit.name,
                limit.quota,
                remaining,
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
        """Names of the limits that said no."""
        return tuple(limit.name for limit, view in zip(self[2], self.views, strict=True) if view[1])

    def __bool__(self) -> bool:
        """Tell whether the call may proceed."""
        return self.allowed

    def __repr__(self) -> str:
        """Show the answer as a person would read it."""
        answer = f"allowed={self.allowed}, remaining={self.remaining}, retry_after={self.retry_after}"
        return f"{type(self).__name__}({answer}, violated={list(self.violated)})"


class LocalDecision(Decision):
    """An answer given without the store, which could not be asked: by this process alone, as the policy says.

    Its limits are this process's share of the policy's, where it decided by one.
    """

    __slots__ = ()


class ShadowDecision(Decision):
    """The answer of a policy in shadow mode: always allowed; `violated` tells what would have been denied."""

    __slots__ = ()

    @property
    def allowed(self) -> bool:
        """Whether the call may proceed: always."""
        return True


# ---- what can be done to the states of a key, all limits at once ---------------------------------------------------
#
# Each verb takes the limits, their states, a number for each, the instant, and for `adjust` the instant `at` of the
# charge to be corrected. It gives whether the call is allowed, the states after (the very same object if nothing has
# changed), and the costs that are still open: with the states after, they tell a Decision what each limit said.

Limits = Sequence["Limit"]
States = Sequence[State | None]
Verb = Callable[[Limits, States, Sequence[int], int, int | None], tuple[bool, States, Sequence[int]]]


def acquire(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Charge every limit, or, if one of them says no, none."""
    del at
    changed = []
    for limit, state, cost in zip(limits, states, costs, strict=True):
        if not cost:
            changed.append(state)
            continue
        charged = limit.charge(state, limit, cost, now)
        if charged is None:
            return False, states, costs
        changed.append(charged)
    return True, changed, nothing(limits)


def peek(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Give the answer that `acquire` would give; the states after are what it would leave."""
    return acquire(limits, states, costs, now, at)


def hold(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Charge as `acquire` does, leaving a mark where the charge is to be corrected later."""
    allowed, changed, left = acquire(limits, states, costs, now, at)
    if allowed:
        triples = zip(limits, changed, costs, strict=True)
        changed = [limit.rules.mark(state) if cost and state else state for limit, state, cost in triples]
    return allowed, changed, left


def adjust(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Correct an earlier charge by a signed difference per limit: that of the instant `at`, or the latest."""
    triples = zip(limits, states, costs, strict=True)
    changed = [limit.rules.adjust(state, limit, cost, now, at) if cost else state for limit, state, cost in triples]
    return True, changed, nothing(limits)


def reset(
    limits: Limits, states: States, costs: Sequence[int], now: int, at: int | None = None
) -> tuple[bool, States, Sequence[int]]:
    """Forget everything."""
    del states, costs, now, at
    return True, [None] * len(limits), nothing(limits)


def nothing(limits: Limits) -> Sequence[int]:
    """Give the cost of nothing, to each limit."""
    return ZERO_COSTS[: len(limits)] if len(limits) <= len(ZERO_COSTS) else (0,) * len(limits)


ZERO_COSTS: Final = (0,) * 8
VERBS: Final[dict[str, Verb]] = {verb.__name__: verb for verb in (acquire, peek, hold, adjust, reset)}
