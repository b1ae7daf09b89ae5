"""Capacities: the resources of one agent and their capacities, synchronised with other agents over a Bus."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.fork import fork_safe
from tidegate.adaptive._capacity import CapacityState
from tidegate.adaptive._recovery import RecoverySettings
from tidegate.adaptive._signing import EPOCH, MalformedError, MessageSigner, read_signed
from tidegate.adaptive._update import (
    ALL_RESOURCES,
    MAX_NAME,
    MAX_UPDATE_BYTES,
    SUBJECT,
    CapacityUpdate,
    is_name,
    retain_key,
)
from tidegate.bus import Bus, Event, Retain
from tidegate.bus._base import SUBJECT as SUBJECT_PATTERN
from tidegate.core._bounds import SECOND
from tidegate.errors import Closed, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAMESPACE: Final = 100  # characters
MAX_UNCONFIGURED_RESOURCES: Final = 256  # whose updates are stored until the resource is configured
MAX_UPDATES_PER_UNCONFIGURED: Final = 8
MAX_CLEARED_RESOURCES: Final = 1024  # whose last clearing is remembered
RETAIN_CLEARED: Final = 86_400.0  # seconds; a message from before a clearing is refused by its age after that
RETAIN_AFTER_RECOVERY: Final = 300.0  # seconds for which an update is retained after its recovery: clocks differ
RETAIN_WITHOUT_RECOVERY: Final = 86_400.0  # seconds, if it never recovers

CLEARING_AGENT_ID: Final = "tidegate swarm --clear"
COUNTS: Final = ("sent", "applied", "own", "unknown", "above", "stale", "expired", "malformed", "cleared")

Listener = Callable[[CapacityUpdate], object]


def subject_in(namespace: str, subject: str) -> str:
    """Return a subject within a namespace; without one, the subject itself."""
    if not namespace:
        return subject
    if not isinstance(namespace, str) or len(namespace) > MAX_NAMESPACE or not SUBJECT_PATTERN.fullmatch(namespace):
        message = f"must be words of letters, digits, '-' and '_', joined by dots, such as 'eu.web', not {namespace!r}"
        raise ConfigError(message, field="namespace")
    return f"{namespace}.{subject}"


class Clearing(NamedTuple):
    """Reductions up to `order` were ended by an operator; the message that said so, and its timestamp."""

    order: int
    payload: bytes
    at: int


class CapacitySnapshot(NamedTuple):
    """A resource at an instant. Times are microseconds of the clock's steady time."""

    original: int
    current: int
    frozen_until: int | None  # None: not frozen now
    due: int | None  # when it changes next


@dataclass(slots=True)
class _TrackedResource:
    capacity: CapacityState
    window: float | None = None  # in seconds, for messages
    messages: dict[tuple[int, str], bytes] = field(default_factory=dict)  # as sent, of the known reductions
    due: int | None = None


def clearing_key(place: str, tag: str, namespace: str) -> str:
    """Return the retain key of the last clearing of a resource, or of ALL_RESOURCES."""
    return retain_key(place, CLEARING_AGENT_ID, tag, namespace)


class Capacities:
    """The capacities of an agent's resources. Thread-safe; no method waits.

    `changed(resource)` is called, without a lock held, after the capacity of a resource changed. `received` is called
    with each update of another agent that had an effect, and `synced` each time after the retained updates of the bus
    were read. Updates without effect are counted in `metrics()`: our own, of
    resources that are not configured here, above the original, stale (already known), expired (its sender has recovered
    since then; or signed, but too old or from a clock that is too far ahead), malformed.

    Recovery does not call `changed`: waiting callers take a snapshot again at `due`.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        settings: RecoverySettings | None = None,
        clock: Clock | None = None,
        bus: Bus | None = None,
        secret: str | bytes | None = None,
        namespace: str = "",
        changed: Callable[[str], object] | None = None,
        received: Listener | None = None,
        synced: Callable[[], object] | None = None,
    ) -> None:
        """Subscribe to the bus, if there is one, under this agent's name; `close` does not close the bus."""
        if not is_name(agent_id):
            message = f"must be a unique string of 1 to {MAX_NAME} characters, not {agent_id!r}"
            raise ConfigError(message, field="agent_id")
        if bus is not None and not isinstance(bus, Bus):
            raise ConfigError(f"must be a Bus, such as open_bus('nats://127.0.0.1:4222'), not {bus!r}", field="bus")
        self.agent_id = agent_id
        self.settings: RecoverySettings = settings or RecoverySettings()
        self.clock: Clock = clock or SystemClock()
        self._bus = bus
        self._signer = MessageSigner(secret, self.clock)
        self._namespace = namespace
        self._subject = subject = subject_in(namespace, SUBJECT)
        self._changed = changed or (lambda _resource: None)
        self._received = received or (lambda _update: None)
        self._on_synced = synced or (lambda: None)
        self._lock = fork_safe(threading.Lock())
        self._resources: dict[str, _TrackedResource] = {}
        self._unconfigured: OrderedDict[str, list[tuple[CapacityUpdate, bytes, int]]] = OrderedDict()
        self._cleared: OrderedDict[str, Clearing] = OrderedDict()  # by resource, or ALL_RESOURCES
        self._counts = dict.fromkeys(COUNTS, 0)
        self._subscription = None if bus is None else bus.subscribe(subject, self._on_message, self._synced)

    # ---- resources ---------------------------------------------------------------------------------------------------

    def set(self, resource: str, original: int, window: float | None = None) -> None:
        """Set the original capacity of a resource per window; this ends the reductions of a known resource.

        For a new resource, updates that other agents sent before apply.
        """
        if not is_name(resource):
            raise ConfigError(f"must be a string of 1 to {MAX_NAME} characters, not {resource!r}", field="resource")
        now = self.clock.steady()
        with self._lock:
            entry = self._resources.get(resource)
            if entry is not None:
                entry.capacity = entry.capacity.restart(original)
                entry.messages.clear()
            else:
                capacity = CapacityState(original, self.settings).clear(self._cleared_up_to(resource))
                entry = self._resources[resource] = _TrackedResource(capacity)
                for update, payload, since in self._unconfigured.pop(resource, ()):
                    self._merge(entry, update, payload, now, now - since)
            entry.window = window
            entry.due = entry.capacity.next_change(now)

    def remove(self, resource: str) -> None:
        """Remove a resource."""
        with self._lock:
            self._resources.pop(resource, None)

    def __contains__(self, resource: str) -> bool:
        """Return whether a resource is configured."""
        return resource in self._resources

    def snapshot(self, resource: str, at: int | None = None) -> CapacitySnapshot | None:
        """Return the state of a resource now, or at an instant since the last snapshot; None: it is not configured."""
        with self._lock:
            entry = self._resources.get(resource)
            if entry is None:
                return None
            now = self.clock.steady() if at is None else at
            capacity = entry.capacity
            due = capacity.next_change(now)
            if at is None:
                entry.due = due
            frozen = capacity.frozen_until
            frozen = None if frozen is None or frozen <= now else frozen
            return CapacitySnapshot(capacity.original, capacity.current(now), frozen, due)

    def due(self, resource: str) -> int | None:
        """Return when the resource changes next, without computing a snapshot."""
        entry = self._resources.get(resource)
        return None if entry is None else entry.due

    # ---- reducing ----------------------------------------------------------------------------------------------------

    def reduce(
        self, resource: str, reason: str = "", retry_after: float | None = None, began: float | None = None
    ) -> CapacityUpdate | None:
        """Reduce a resource and publish the update; None if it is not configured, or was reduced just before.

        `retry_after` is the number of seconds for which no agent may make calls. `began` is when the refused call
        began, in seconds of the clock's steady time: if that was before the latest reduction took effect, it reduces no
        further.
        """
        if retry_after is not None and not 0 <= retry_after < float("inf"):
            raise ConfigError(f"must be a non-negative number of seconds, not {retry_after!r}", field="retry_after")
        now, wall = self.clock.steady(), self.clock.ns() // 1000
        with self._lock:
            entry = self._resources.get(resource)
            if entry is None:
                return None
            before = entry.capacity
            epoch = before.next_epoch(wall)
            pause = 0 if retry_after is None else round(retry_after * SECOND)
            after = before.reduce(now, epoch, self.agent_id, pause, None if began is None else round(began * SECOND))
            if after is before:
                return None
            end, current = after.recovered_at(now), before.current(now)
            reduction = next(r for r in after.reductions if (r.epoch, r.agent) == (epoch, self.agent_id))
            update = CapacityUpdate(
                resource,
                self.agent_id,
                reduction.value,
                reason.encode("utf-8", "replace").decode()[:MAX_NAME],
                EPOCH + timedelta(microseconds=wall),
                epoch,
                retry_after,
                reduction.refused_at or (current if reduction.value < current else None),  # None: it only freezes
                None if end is None else (end - now) / SECOND,
                original=before.original,
                window=entry.window,
                factor=self._factor(reduction.value, current, before.original),
            )
            payload = update.to_json(self._signer.secret, subject=self._subject)
            self._keep(entry, after, update, payload, now)
            retain = self._retain(entry.capacity, update, now)
            self._counts["sent"] += self._bus is not None
        self._changed(resource)
        self._publish(payload, retain)
        return update

    def _factor(self, value: int, current: int, original: int) -> float:
        """Return the share of the original that a reduction leaves, before rounding."""
        left = self.settings.reduce * current if value == self.settings.reduced(current) else value
        return float(Fraction(left, original))

    def _publish(self, payload: bytes, retain: Retain, *, late: bool = False) -> None:
        if self._bus is not None:
            with suppress(Closed):  # the reduction still applies here
                self._bus.publish(self._subject, payload, retain, late=late)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _on_message(self, event: Event) -> None:
        try:
            fields, signature = read_signed(event.payload, self._signer.secret, MAX_UPDATE_BYTES, self._subject)
            update = CapacityUpdate.from_fields(fields)
        except MalformedError:
            self._count("malformed")
            return
        age_class = self._signer.classify(signature, update.at, late=event.late)
        if age_class in ("expired", "replayed"):
            self._count("expired" if age_class == "expired" else "stale")
            return
        self.receive(update, event.payload, late=age_class == "old")

    def receive(self, update: CapacityUpdate, payload: bytes = b"", *, late: bool = False) -> bool:
        """Apply an update of another agent; returns whether it had an effect.

        The age of a `late` message is computed from its timestamp; any other counts from now.
        """
        if update.agent_id == self.agent_id and not late:  # a late one may be from before a restart of this agent
            self._count("own")
            return False
        if update.clears:
            self._clear(update, payload)
            return False
        now = self.clock.steady()
        age = max(0, self.clock.ns() // 1000 - update.at) if late else 0
        with self._lock:
            if update.order <= self._cleared_up_to(update.resource):
                self._counts["stale"] += 1
                return False
            entry = self._resources.get(update.resource)
            if entry is None:
                self._counts["unknown"] += 1
                self._store_unconfigured(update, payload, now - age)
                return False
            outcome = self._merge(entry, update, payload, now, age)
            self._counts[outcome] += 1
        if outcome != "applied":
            return False
        self._changed(update.resource)
        self._received(update)
        return True

    def _clear(self, update: CapacityUpdate, payload: bytes) -> None:
        """End the reductions up to the epoch of an update, and refuse messages about them from now on."""
        place = ALL_RESOURCES if update.clears_all else update.resource
        now = self.clock.steady()
        with self._lock:
            known = self._cleared.get(place)
            if known is not None and known.order >= update.order:
                self._counts["stale"] += 1
                return
            self._cleared[place] = Clearing(update.order, payload, update.at)
            self._cleared.move_to_end(place)
            while len(self._cleared) > MAX_CLEARED_RESOURCES:
                self._cleared.popitem(last=False)
            names = list(self._resources) if update.clears_all else [update.resource]
            cleared = [name for name in names if name in self._resources]
            for name in cleared:
                entry = self._resources[name]
                entry.capacity = entry.capacity.clear(update.order)
                entry.due = entry.capacity.next_change(now)
            for name, updates in self._unconfigured.items():
                if update.clears_all or name == update.resource:
                    updates[:] = [each for each in updates if each[0].order > update.order]
            self._counts["cleared" if cleared else "unknown"] += 1
        for name in cleared:
            self._changed(name)

    def _cleared_up_to(self, resource: str) -> int:
        """Return the highest epoch of a reduction of this resource that was cleared; 0 if none was."""
        places = (self._cleared.get(resource), self._cleared.get(ALL_RESOURCES))
        return max((place.order for place in places if place is not None), default=0)

    def _merge(self, entry: _TrackedResource, update: CapacityUpdate, payload: bytes, now: int, age: int) -> str:
        before = entry.capacity
        if update.recovers_after is not None and age and age >= update.recovers_after * SECOND:
            return "expired"
        value, refused_at = update.scaled(before.original)
        if value > before.original:
            return "above"
        order, agent = update.order, update.agent_id
        after = before.merge(now, order, agent, value, age=age, retry_after=update.pause, refused_at=refused_at)
        if after is before:
            return "stale"
        previous = before.current(now), before.frozen_until
        self._keep(entry, after, update, payload, now)
        # Stored, but without effect: recovered long ago, or not lower than the reductions in force.
        had_effect = (after.current(now), after.frozen_until) != previous or after.recovered_at(
            now
        ) != before.recovered_at(now)
        return "applied" if had_effect else "stale"

    def _store_unconfigured(self, update: CapacityUpdate, payload: bytes, since: int) -> None:
        updates = self._unconfigured.setdefault(update.resource, [])
        updates.append((update, payload, since))
        del updates[:-MAX_UPDATES_PER_UNCONFIGURED]
        while len(self._unconfigured) > MAX_UNCONFIGURED_RESOURCES:
            self._unconfigured.popitem(last=False)

    def _keep(
        self, entry: _TrackedResource, after: CapacityState, update: CapacityUpdate, payload: bytes, now: int
    ) -> None:
        entry.capacity = after
        entry.due = after.next_change(now)
        entry.messages[update.order, update.agent_id] = payload
        known = {(reduction.epoch, reduction.agent) for reduction in after.reductions}
        entry.messages = {place: sent for place, sent in entry.messages.items() if place in known}

    def _retain(self, capacity: CapacityState, update: CapacityUpdate, now: int) -> Retain:
        end = capacity.recovered_at(now)
        ttl = RETAIN_WITHOUT_RECOVERY if end is None else (end - now) / SECOND + RETAIN_AFTER_RECOVERY
        key = retain_key(update.resource, update.agent_id, self._signer.tag, self._namespace)
        return Retain(key, update.order, ttl)

    def _synced(self, retained: Mapping[str, int]) -> None:
        """Publish reductions in force and clearings again if the server lost them, for example in a restart."""
        now = self.clock.steady()
        with self._lock:
            lost = self._lost_clearings(retained)
            for entry in self._resources.values():
                for reduction in entry.capacity.in_force(now):
                    payload = entry.messages.get((reduction.epoch, reduction.agent))
                    if payload:
                        update = CapacityUpdate.from_json(payload, self._signer.secret, self._subject)
                        retain = self._retain(entry.capacity, update, now)
                        if retained.get(retain.key, 0) < retain.version:
                            lost.append((payload, retain))
        for payload, retain in lost:
            self._publish(payload, retain, late=True)
        self._on_synced()

    def _lost_clearings(self, retained: Mapping[str, int]) -> list[tuple[bytes, Retain]]:
        lost = []
        wall = self.clock.ns() // 1000
        for place, cleared in self._cleared.items():
            key = clearing_key(place, self._signer.tag, self._namespace)
            left = RETAIN_CLEARED - (wall - cleared.at) / SECOND
            if cleared.payload and left > 0 and retained.get(key, 0) < cleared.order:
                lost.append((cleared.payload, Retain(key, cleared.order, min(left, RETAIN_CLEARED))))
        return lost

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def metrics(self) -> dict[str, int]:
        """Return counters of updates sent, applied, and ignored by reason."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Unsubscribe from the bus."""
        if self._subscription is not None:
            self._subscription.close()
