"""Writes the header fields of the usual decisions from prepared bytes or strings: an allowed request, and logs.

Every allowed response has these fields, so they are written by position and with as few objects as possible. Tests
compare them with `headers.write`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from tidegate.core.bounds import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate.core.decision import Decision
    from tidegate.policy import Policy

CACHED_REMAINING: Final = 1024
ROUND_UP: Final = SECOND - 1
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
    quota, length, reset_name, number = limit.quota, limit.length, form.reset_name, form.number
    first: tuple[S, S] = (form.limit_name, number(quota))
    extra: tuple[tuple[S, S], ...] = form.extra
    remaining, write_remaining = form.remaining, form.write_remaining
    # Cache of one reset field: (after, until, field). It is valid for charges in the interval (after, until].
    last: tuple[int, int, tuple[S, S]] = (0, 0, first)

    def fields(decision: Decision) -> list[tuple[S, S]]:
        nonlocal last
        state = decision[3][0]  # by position: a fast path
        if not decision[0] or decision[2] is not limits or state is None or state[0] is not limit:
            return general(decision)
        # The same as view_log for a state whose last entry is this request.
        _, log, _, tail, base = state
        at = log.times[tail - 1]
        if at < decision[1]:
            return general(decision)
        after, until, reset = last
        if not after < at <= until:
            second = (at + length + ROUND_UP) // SECOND
            until = second * SECOND - length
            reset = (reset_name, number(second))
            last = (until - SECOND, until, reset)
        left = quota - log.sums[tail - 1] + base
        return [first, remaining[left] if left < CACHED_REMAINING else write_remaining(left), reset, *extra]

    return fields


class TightestWriter(NamedTuple):
    """Writes the fields of the tightest of several single logs that were charged together."""

    limits: tuple[tuple[int, int], ...]  # the quota and length of each
    raw_writers: tuple[Callable[[Decision], list[tuple[bytes, bytes]]], ...]
    text_writers: tuple[Callable[[Decision], list[tuple[str, str]]], ...]

    def find(self, decisions: Sequence[Decision]) -> int:
        """Return the index of the decision with the fewest permits left; of equals, the one with the latest reset."""
        fewest = found = latest = -1
        for index, (quota, length) in enumerate(self.limits):
            _, log, _, tail, base = decisions[index][3][0]  # type: ignore[misc]  # the state of a log; a fast path
            left = quota - log.sums[tail - 1] + base
            if found < 0 or left < fewest or (left == fewest and length > latest):
                fewest, found, latest = left, index, length
        return found
