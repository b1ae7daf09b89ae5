"""What an observer is told of a decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidegate.core.decision import Decision
    from tidegate.policy import Key, Policy


class Record(NamedTuple):
    """One decision, after the store has answered: whose, under which policy, at what cost to each limit.

    `subject` says what it was about, where that is known: of a request its method and path.
    """

    verb: str
    policy: Policy
    key: Key
    costs: tuple[int, ...]
    decision: Decision
    subject: str = ""


Observer = Callable[[Record], None]
