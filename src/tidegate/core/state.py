"""What the algorithms share: the shapes of a State and of a View, and when a state of a changed limit is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tidegate.core.limit import Limit

State = tuple[Any, ...]
View = tuple[int, int, int]

NEVER: Final = -1


def current(state: State | None, limit: Limit, now: int) -> State | None:
    """Forget a state that had ended under the limit it was written for, before that limit was changed."""
    if state is None or state[0] is limit or limit.rules.expires(state) > now:
        return state
    return None
