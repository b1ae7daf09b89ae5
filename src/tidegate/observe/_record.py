"""Record: what an observer receives for each decision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tidegate._policy import Key, Policy
    from tidegate.core._decision import Decision


class Record(NamedTuple):
    """One decision: its verb, policy, key, the cost at each limit, and the Decision.

    `subject` describes what the decision was about, if known: the method and path of a request.
    """

    verb: str
    policy: Policy
    key: Key
    costs: tuple[int, ...]
    decision: Decision
    subject: str = ""


Observer = Callable[[Record], None]
