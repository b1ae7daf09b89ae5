"""Shared by the algorithms: State, View, when the state of a changed limit has expired, and the plain stored format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.core.limit import Limit

State = tuple[Any, ...]
View = tuple[int, int, int]

NEVER: Final = -1


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
