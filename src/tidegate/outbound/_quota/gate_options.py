"""The keyword options of gates, as types for code that passes them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.bus import Bus
    from tidegate.observe import Observer
    from tidegate.spending import Spending


class CommonGateOptions(TypedDict, total=False):
    """The keyword options of a gate that a SourceRunner takes as well; it sets `timeout` itself."""

    priority: float
    bus: str | Bus | None
    clock: Clock | None
    observer: Observer | None
    jitter: Callable[[], float]
    reload: float | None
    tokenizer: object
    spending: Spending | str | None


class GateOptions(CommonGateOptions, total=False):
    """The keyword options of a gate, which every client adapter takes as well."""

    timeout: float | None
