"""What a replay asks of rules, and what they answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tidegate.core._algorithms import NEVER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate.core._decision import Decision
    from tidegate.core._limit import Limit
    from tidegate.plan._clock import ReplayClock
    from tidegate.plan._logs.batch import LogSender, LogSubject

MAX_SUBJECTS: Final = 20_000  # distinct paths that are kept; the cache is cleared when it is full


class PolicyDecision(NamedTuple):
    """A policy that a request was charged to, and the decision."""

    policy: str
    decision: Decision


class Outcome(NamedTuple):
    """Whether a request was allowed, what it was charged to, and which policies denied it."""

    allowed: bool
    charged: Sequence[PolicyDecision] = ()
    denied_by: Sequence[PolicyDecision] = ()
    blocked: bool = False  # the client is blocked: no limit was asked

    @property
    def retry(self) -> int | None:
        """When the same request would be allowed, in microseconds from now; None: never."""
        waits = [each.decision.retry for each in self.denied_by]
        return None if NEVER in waits else max(waits, default=0)


UNLIMITED: Final = Outcome(allowed=True)


class ReplaySubject(Protocol):
    """What requests ask for: a path, a policy, a provider."""

    endpoint: str  # the name in reports
    policies: tuple[str, ...]
    limited: bool  # whether any limit applies

    def decide(self, key: object, status: int, duration: int, cost: Mapping[str, int] | int) -> Outcome:
        """Decide about a request at the time of the clock."""


class ReplayRules(Protocol):
    """Rules, in the time of a clock. `limits`: all limits of each policy."""

    clock: ReplayClock
    limits: Mapping[str, tuple[Limit, ...]]
    patterns: dict[str, list[str]]  # the endpoints of each policy, such as `GET /items`, if the rules have any
    notes: list[str]  # what a reader of the result has to know

    @property
    def due(self) -> int | None:
        """When something has to be settled next, in microseconds; None: nothing has."""

    def settle(self) -> None:
        """Settle what is due at the time of the clock."""

    def find_key(self, sender: LogSender) -> object:
        """Return the key of a sender, as `decide` takes it; None: the sender is exempt."""

    def name_of(self, key: object) -> str:
        """Return the name of a key for people."""

    def find(self, subject: LogSubject) -> ReplaySubject:
        """Return what a subject is to the rules."""

    def close(self) -> None:
        """Close what was opened."""
