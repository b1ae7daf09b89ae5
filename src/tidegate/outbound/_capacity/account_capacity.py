"""How much of its narrowest limit an account may use now.

A refused request (429 or 503) takes one path, `AccountCapacity.refuse_flow`:

    SharedNotices.read_flow      what other processes were refused in the meantime
    Refusals.record              the new capacity, and the pause
    SharedCapacity.announce      applies both in this process, which calls `changed`, and publishes them on the bus
    SharedNotices.write_flow     writes the same message to the store

Messages of other processes arrive with `check_flow` if they share the store, otherwise over the bus. Both are given to
`Capacities.receive`, which calls `_record_remote` for those with an effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.outbound._capacity.learning import SERVICE_UNAVAILABLE, TOO_MANY_REQUESTS
from tidegate.outbound._capacity.refusals import Refusals
from tidegate.outbound._capacity.shared_notices import NOTICE_TTL, SharedNotice

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import CallFlow
    from tidegate.adaptive import CapacityUpdate
    from tidegate.core import Limit
    from tidegate.outbound._capacity.shared_capacity import SharedCapacity
    from tidegate.outbound._capacity.shared_notices import SharedNotices

MAX_WRITES: Final = 3  # tries to write a notice, while other processes write others
REASONS: Final = {
    TOO_MANY_REQUESTS: "responded with 429 Too Many Requests",
    SERVICE_UNAVAILABLE: "responded with 503 Service Unavailable",
}


class CurrentCapacity(NamedTuple):
    """The quota that applies now, and the instant of steady time until which nothing is sent."""

    quota: int
    frozen_until: int


class AccountCapacity:
    """The capacity of one account. Instants are the clock's steady time.

    `changed` is called, without a lock held, when `current` may return something else.
    """

    def __init__(
        self,
        resource: str,
        limit: Limit,
        shared_capacity: SharedCapacity,
        make_notices: Callable[[int], SharedNotices],
        clock: Clock,
        changed: Callable[[], object],
    ) -> None:
        """Start with the whole quota of the narrowest limit; `make_notices` takes the length of its period."""
        self._resource = resource
        self.shared_capacity = shared_capacity
        self._make_notices = make_notices
        self._clock = clock
        self._changed = changed
        self._exhausted_until = 0  # until then the provider has no remaining quota
        self._reset(limit)

    def _reset(self, limit: Limit) -> None:
        """Start again without refusals, for this limit."""
        self._limit = limit
        self._refusals = Refusals(limit, self.shared_capacity.interval or 0)
        self.open_notices()

    def open_notices(self) -> None:
        """Read the notices of other processes again, for the current limits, before the next request."""
        self._notices = self._make_notices(self._limit.length)
        self._next_check = self._clock.steady()

    def register(self) -> None:
        """Apply and receive reductions of other processes from now on."""
        self.shared_capacity.set(self._resource, self._limit.quota, self._changed, self._record_remote)

    def remove(self) -> None:
        """Stop receiving reductions of other processes."""
        self.shared_capacity.remove(self._resource)

    def set_limit(self, limit: Limit) -> None:
        """Replace the narrowest limit."""
        before = self._limit
        if limit != before:
            self._reset(limit)
        if limit.quota != before.quota:
            self.register()

    # ---- the current capacity ----------------------------------------------------------------------------------------

    @property
    def quota(self) -> int:
        """How much of the quota may be used now."""
        snapshot = self.shared_capacity.snapshot(self._resource)
        return self._limit.quota if snapshot is None else snapshot.current

    @property
    def is_whole(self) -> bool:
        """Whether nothing is reduced or paused."""
        snapshot = self.shared_capacity.snapshot(self._resource)
        if self._exhausted_until > self._clock.steady():
            return False
        return snapshot is None or (snapshot.current >= snapshot.original and snapshot.frozen_until is None)

    def due(self) -> int | None:
        """Return when the capacity recovers next."""
        return self.shared_capacity.due(self._resource)

    def current(self) -> CurrentCapacity | None:
        """Return what applies now; None: it is not registered, or `changed` was called again for a held level."""
        snapshot = self.shared_capacity.snapshot(self._resource)
        if snapshot is None:
            return None
        held_level = self._refusals.held_level(self._clock.steady(), snapshot.current)
        if held_level is not None:
            self.shared_capacity.hold(self._resource, held_level)
            return None
        return CurrentCapacity(snapshot.current, max(snapshot.frozen_until or 0, self._exhausted_until))

    def exhaust(self, reset: int) -> None:
        """Send nothing for this number of microseconds: the provider reports that no quota is left until then."""
        self._exhausted_until = max(self._exhausted_until, self._clock.steady() + reset)
        self._changed()

    # ---- refusals ----------------------------------------------------------------------------------------------------

    def refuse_flow(
        self, status: int, sent: int, retry_after: float | None, at: int, used_flow: CallFlow[Any]
    ) -> CallFlow[Any]:
        """Handle the refusal of a request that was `sent` at that instant: reduce the capacity, pause, notify others.

        `at` is the time now by the store's clock. `used_flow` returns how much of the limit was in use; it is run for a
        429 only.
        """
        yield from self.check_flow(at)
        used = (yield from used_flow) if status == TOO_MANY_REQUESTS else 0
        current = self.quota
        notice = self._refusals.record(self._clock.steady(), sent, current, used, retry_after)
        if notice.value < current or notice.pause:
            value, pause = notice.value, max(notice.pause, self._paused_for())
            update = self.shared_capacity.announce(self._resource, value, pause, REASONS[status])
            yield from self._share_flow(update, at)

    def _share_flow(self, update: CapacityUpdate, at: int) -> CallFlow[Any]:
        """Write a reduction to the store; if another process has written one, apply it first."""
        for _ in range(MAX_WRITES):
            if (yield from self._notices.write_flow(SharedNotice(update, at))):
                return
            yield from self.check_flow(at)
            value, pause = min(self.quota, update.new_capacity), max(update.pause, self._paused_for())
            update = self.shared_capacity.make_update(self._resource, value, pause, update.reason)

    def _paused_for(self) -> int:
        snapshot = self.shared_capacity.snapshot(self._resource)
        frozen = None if snapshot is None else snapshot.frozen_until
        return 0 if frozen is None else max(0, frozen - self._clock.steady())

    def record_success(self) -> None:
        """Record a response that was not a refusal."""
        self._refusals.record_success()

    def is_check_due(self) -> bool:
        """Return whether it is time to check for refusals of other processes."""
        now = self._clock.steady()
        if now < self._next_check:
            return False
        self._next_check = now + self._notices.check_interval
        return True

    def check_flow(self, at: int) -> CallFlow[Any]:
        """Check for refusals of other processes; returns whether that changes what may be sent.

        `at` is the time now by the store's clock.
        """
        notice = yield from self._notices.read_flow()
        if notice is None:
            return False
        return self.shared_capacity.receive(notice.update, min(max(0, at - notice.since), NOTICE_TTL))

    @property
    def shared_quotas(self) -> tuple[int, ...]:
        """The quotas that any process has learned and shared, by limit; 0: none."""
        return self._notices.quotas

    def share_quotas_flow(self, quotas: tuple[int, ...]) -> CallFlow[Any]:
        """Share the quotas that were learned with other processes."""
        return self._notices.write_quotas_flow(quotas)

    def _record_remote(self, value: int) -> None:
        now = self._clock.steady()
        self._refusals.record_remote(now, now, self.quota, value)
