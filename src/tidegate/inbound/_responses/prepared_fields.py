"""Writes the header fields of allowed requests from prepared bytes or strings, with as few objects as possible.

Tests compare them with `headers.write`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.core._bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate._policy import Policy
    from tidegate.core import Limit
    from tidegate.core._decision import Decision

    Decided = Sequence[Decision]  # one decision for each policy
    FieldWriter = Callable[[Any], list[Any]]  # of a decision, or of several made together; writes bytes or strings

CACHED_REMAINING: Final = 1024
ROUND_UP: Final = SECOND - 1
S = TypeVar("S")  # a string or bytes: a name or value of a header field


class FieldForm(Generic[S]):
    """The three fields of the style "x", as bytes or strings, with what can be prepared of them."""

    __slots__ = ("limit_name", "number", "remaining", "remaining_name", "reset_name")

    def __init__(self, names: Sequence[S], number: Callable[[int], S]) -> None:
        """Prepare the fields with these names; `number` writes an integer."""
        self.limit_name: S = names[0]
        self.remaining_name: S = names[1]
        self.reset_name: S = names[2]
        self.number: Callable[[int], S] = number
        self.remaining: list[tuple[S, S]] = [(self.remaining_name, number(left)) for left in range(CACHED_REMAINING)]

    def write_remaining(self, left: int) -> tuple[S, S]:
        """Return the field that says how much is left."""
        return self.remaining[left] if left < CACHED_REMAINING else (self.remaining_name, self.number(left))


def prepare_tightest(
    policies: Sequence[Policy], form: FieldForm[S], write_others: FieldWriter
) -> Callable[[Decided], list[tuple[S, S]]]:
    """Return a function that writes the fields of the tightest of several policies that were charged together.

    Each has one limit. The tightest has the fewest permits left; of equals, it has the latest reset. `write_others`
    writes decisions about other limits: a store that leases permits, or an outage, may have decided about a share.
    """
    rows = [(policy.limits, policy.limits[0].view, _limit_writer(policy.limits[0], form)) for policy in policies]
    ((own_limits, own_view, own_write), *others) = rows

    def write_tightest(decisions: Decided) -> list[tuple[S, S]]:
        left, reset, write = -1, 0, own_write
        for (_, at, limits, results, costs), (policy_limits, view, each) in zip(decisions, rows, strict=True):
            if limits is not policy_limits:
                return write_others(decisions)
            own, _, full = results[0] if costs is None else view(results[0], limits[0], costs[0], at)  # type: ignore[misc]  # without costs, views
            if left < 0 or own < left or (own == left and full > reset):
                left, reset, write = own, full, each
        return write(left, decisions[0][1] + reset)

    def write_only(decisions: Decided) -> list[tuple[S, S]]:
        _, at, limits, results, costs = decisions[0]
        if limits is not own_limits:
            return write_others(decisions)
        left, _, reset = results[0] if costs is None else own_view(results[0], limits[0], costs[0], at)  # type: ignore[misc]  # as above
        return own_write(left, at + reset)

    return write_tightest if others else write_only


def _limit_writer(limit: Limit, form: FieldForm[S]) -> Callable[[int, int], list[tuple[S, S]]]:
    """Return a function that writes the fields of a limit: how much is left, and when it is full again."""
    quota, reset_name, remaining_name, number = limit.quota, form.reset_name, form.remaining_name, form.number
    first: tuple[S, S] = (form.limit_name, number(quota))
    remaining = form.remaining
    # Cache of one reset field: (after, until, field). It is valid for ends in the interval (after, until].
    last: tuple[int, int, tuple[S, S]] = (0, 0, first)

    def write(left: int, ends: int) -> list[tuple[S, S]]:
        nonlocal last
        after, until, reset = last
        if not after < ends <= until:
            second = (ends + ROUND_UP) // SECOND
            until = second * SECOND
            reset = (reset_name, number(second))
            last = (until - SECOND, until, reset)
        if left > quota:
            left = quota
        elif left < 0:
            left = 0
        return [first, remaining[left] if left < CACHED_REMAINING else (remaining_name, number(left)), reset]

    return write
