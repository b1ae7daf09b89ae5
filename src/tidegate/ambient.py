"""What every call is charged in addition: the run of an agent that is current in this thread or task.

`tidegate.agents` sets it, and what charges calls reads it: so limits of a run apply to functions and clients that were
not passed the run. This module only keeps it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class CurrentRun(Protocol):
    """A run, as what charges calls sees it."""

    for_tasks: bool

    def start_call(self, cost: Mapping[str, int], timeout: float | None = 0.0) -> Any:  # noqa: ANN401 - a reservation, or an awaitable of it
        """Charge a call before it is sent; units that no node counts are left out."""


CURRENT_RUN: Final[ContextVar[CurrentRun | None]] = ContextVar("tidegate_run", default=None)
