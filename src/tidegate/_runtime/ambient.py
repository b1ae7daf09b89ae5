"""What every call is charged in addition: the run of an agent that is current in this thread or task.

`tidegate.agents` sets it, and what charges calls reads it: so the limits of a run apply to functions and clients that
were not passed the run. This module only keeps it.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidegate._limiter.waiting import Step
    from tidegate._runtime.flow import Flow


class AmbientCharge(Protocol):
    """What a call was charged at a run."""

    def commit_usage_flow(self, usage: Mapping[str, int] | None) -> Flow[Step, None]:
        """Correct the estimate to the usage (None: keep it); units that no node counts are left out."""

    def cancel_flow(self) -> Flow[Step, None]:
        """Refund it."""


class CurrentRun(Protocol):
    """A run, as what charges calls sees it."""

    def charge_flow(
        self, cost: Mapping[str, int], identify: Callable[[], bytes] | None = None, label: str = ""
    ) -> Flow[Step, AmbientCharge]:
        """Charge a call before it is sent; units that no node counts are left out. Raises Denied, without waiting.

        `identify` returns what the request is made of, by which a repeated one is recognised; `label` says what
        it is for, such as a model.
        """


CURRENT_RUN: Final[ContextVar[CurrentRun | None]] = ContextVar("tidegate_run", default=None)


def charge_run_flow(
    cost: Mapping[str, int], identify: Callable[[], bytes] | None = None, label: str = ""
) -> Flow[Step, AmbientCharge | None]:
    """Charge a call to the current run, if there is one."""
    current = CURRENT_RUN.get()
    return None if current is None else (yield from current.charge_flow(cost, identify, label))
