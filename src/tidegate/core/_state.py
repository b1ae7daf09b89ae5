"""Shared by the algorithms: State, View, when the state of a changed limit has expired, and the plain stored format."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core._limit import Limit

State = tuple[Any, ...]

NEVER: Final = -1


class View(tuple[int, int, int]):
    """What a state means for a cost: `View((remaining, retry, reset))`. Times are in microseconds.

    `remaining` is negative if more permits are in use than the limit allows: a correction took more, or the limit was
    lowered. `retry` is 0 if the cost would be charged, else the time until it would be, or NEVER. `reset` is the time
    until all permits are available again. A named tuple would take four times as long to create.
    """

    __slots__ = ()
    remaining: int = property(itemgetter(0))  # type: ignore[assignment]  # as in a named tuple
    retry: int = property(itemgetter(1))  # type: ignore[assignment]  # as above
    reset: int = property(itemgetter(2))  # type: ignore[assignment]  # as above


def current(state: State | None, limit: Limit, now: int) -> State | None:
    """Return the state, or None if it had expired under the limit that wrote it before that limit was changed."""
    if state is None or state[0] is limit or limit.rules.expires(state) > now:
        return state
    return None


def dump_integers(state: State) -> list[int]:
    """Return the integers of a state that has nothing else."""
    return list(state[1:])


def load_integers(limit: Limit, numbers: Sequence[int]) -> State:
    """Restore a state that consists of integers."""
    return (limit, *numbers)
