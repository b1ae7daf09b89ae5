"""EgressExchange: what the gateway records about one request, for counts, the access log and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.egress._bodies import RequestBody
    from tidegate.egress._stats import TrafficCounts


class EgressExchange:
    """One request. Times are microseconds of the monotonic clock."""

    __slots__ = (
        "attempts",
        "body",
        "caller",
        "complete",
        "cost",
        "counts",
        "first_byte",
        "host",
        "member",
        "method",
        "parts",
        "path",
        "problem",
        "provider",
        "span",
        "started",
        "status",
        "truncates_at",
        "waited",
        "waiting",
    )

    def __init__(self, started: int, method: str) -> None:
        """Begin."""
        self.started: int = started
        self.method: str = method
        self.caller: str = ""
        self.provider: str = ""
        self.member: str | None = None
        self.host: str = ""
        self.path: str = ""
        self.status: int = 0
        self.complete: bool = False  # whether the whole response was sent
        self.problem: str = ""
        self.waited: float = 0.0  # seconds
        self.attempts: int = 0
        self.first_byte: int | None = None
        self.cost: Any = 0
        self.truncates_at: int | None = None  # the tokens at which the limits of its caller truncate its output
        self.parts: dict[Any, int] = {}
        self.counts: TrafficCounts | None = None
        self.waiting: bool = False
        self.span: Any = None
        self.body: RequestBody | None = None

    def count(self, name: str) -> None:
        """Add one to a count of its caller and provider."""
        if self.counts is not None:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def begin_wait(self) -> None:
        """Record that it waits for its permit."""
        if self.counts is not None and not self.waiting:
            self.waiting = True
            self.counts.waiting += 1

    def end_wait(self) -> None:
        """Record that it no longer waits."""
        if self.counts is not None and self.waiting:
            self.waiting = False
            self.counts.waiting -= 1
