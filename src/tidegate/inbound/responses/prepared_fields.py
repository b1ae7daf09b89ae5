"""Writes the header fields of the usual decisions from prepared bytes or strings: an allowed request, and logs.

Every allowed response has these fields, so they are written by position and with as few objects as possible. Tests
compare them with `headers.write`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.core import Limit
    from tidegate.core.decision import Decision
    from tidegate.policy import Policy

    FieldWriter = Callable[[Any], list[Any]]  # of one decision, or of several; writes bytes or strings

CACHED_REMAINING: Final = 1024
ROUND_UP: Final = SECOND - 1
PAIR: Final = 2
S = TypeVar("S")  # a string or bytes: a name or value of a header field


class FieldForm(Generic[S]):
    """The three fields of the style "x", as bytes or strings, with what can be prepared of them."""

    __slots__ = ("extra", "limit_name", "number", "remaining", "remaining_name", "reset_name")

    def __init__(self, names: Sequence[S], number: Callable[[int], S], extra: Iterable[tuple[S, S]]) -> None:
        """Prepare the fields with these names; `number` writes an integer, `extra` fields follow."""
        self.limit_name: S = names[0]
        self.remaining_name: S = names[1]
        self.reset_name: S = names[2]
        self.number: Callable[[int], S] = number
        self.remaining: list[tuple[S, S]] = [(self.remaining_name, number(left)) for left in range(CACHED_REMAINING)]
        self.extra: tuple[tuple[S, S], ...] = tuple(extra)

    def write_remaining(self, left: int) -> tuple[S, S]:
        """Return the field that says how much is left."""
        return self.remaining[left] if left < CACHED_REMAINING else (self.remaining_name, self.number(left))


def is_single_log(policy: Policy) -> bool:
    """Return whether a policy has one limit, and this a sliding_log: the default inbound."""
    return len(policy.limits) == 1 and policy.limits[0].rules.rolling


def prepare_writer(
    policy: Policy, general: Callable[[Decision], list[tuple[S, S]]], form: FieldForm[S]
) -> Callable[[Decision], list[tuple[S, S]]]:
    """Return a function that writes the fields of a policy; only a single sliding_log has a fast one."""
    if not is_single_log(policy):
        return general
    limits = policy.limits
    limit = limits[0]
    quota, write = limit.quota, _log_writer(limit, form)

    def fields(decision: Decision) -> list[tuple[S, S]]:
        state = decision[3][0]  # by position: a fast path
        if not decision[0] or decision[2] is not limits or state is None or state[0] is not limit:
            return general(decision)
        # The same as view_log for a state whose last entry is this request.
        _, (times, sums), _, tail, base = state
        tail -= 1
        at = times[tail]
        return write(quota - sums[tail] + base, at) if at >= decision[1] else general(decision)

    return fields


def prepare_tightest(
    policies: Sequence[Policy], form: FieldForm[S]
) -> Callable[[Sequence[Decision]], list[tuple[S, S]]] | None:
    """Return a function that writes the fields of the tightest of several single logs that were charged together.

    That is the one with the fewest permits left; of equals, the one with the latest reset. None: other policies.
    """
    if not all(is_single_log(policy) for policy in policies):
        return None
    logs = [(limit.quota, limit.length, _log_writer(limit, form)) for policy in policies for limit in policy.limits]
    quota_1, length_1, write_1 = logs[0]
    quota_2, length_2, write_2 = logs[-1]

    def write_tightest(decisions: Sequence[Decision]) -> list[tuple[S, S]]:
        fewest = latest = -1
        write = write_1
        for (quota, length, each), decision in zip(logs, decisions, strict=True):
            _, (times, sums), _, tail, base = decision[3][0]  # type: ignore[misc]  # the state of a log; a fast path
            left = quota - sums[tail - 1] + base
            if latest < 0 or left < fewest or (left == fewest and length > latest):
                fewest, latest, write, at = left, length, each, times[tail - 1]
        return write(fewest, at)

    def write_tighter(decisions: Sequence[Decision]) -> list[tuple[S, S]]:
        first, second = decisions
        _, (times_1, sums_1), _, tail_1, base_1 = first[3][0]  # type: ignore[misc]  # as above
        _, (times_2, sums_2), _, tail_2, base_2 = second[3][0]  # type: ignore[misc]  # as above
        left_1 = quota_1 - sums_1[tail_1 - 1] + base_1
        left_2 = quota_2 - sums_2[tail_2 - 1] + base_2
        if left_2 < left_1 or (left_2 == left_1 and length_2 > length_1):
            return write_2(left_2, times_2[tail_2 - 1])
        return write_1(left_1, times_1[tail_1 - 1])

    return write_tighter if len(logs) == PAIR else write_tightest


def _log_writer(limit: Limit, form: FieldForm[S]) -> Callable[[int, int], list[tuple[S, S]]]:
    """Return a function that writes the fields of a log: how much is left, and when its last entry was made."""
    length, reset_name, remaining_name, number = limit.length, form.reset_name, form.remaining_name, form.number
    first: tuple[S, S] = (form.limit_name, number(limit.quota))
    extra, remaining = form.extra, form.remaining
    # Cache of one reset field: (after, until, field). It is valid for charges in the interval (after, until].
    last: tuple[int, int, tuple[S, S]] = (0, 0, first)

    def write(left: int, at: int) -> list[tuple[S, S]]:
        nonlocal last
        after, until, reset = last
        if not after < at <= until:
            second = (at + length + ROUND_UP) // SECOND
            until = second * SECOND - length
            reset = (reset_name, number(second))
            last = (until - SECOND, until, reset)
        return [first, remaining[left] if left < CACHED_REMAINING else (remaining_name, number(left)), reset, *extra]

    return write
