"""A store wrapper that keeps deciding calls while the store is unavailable."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate._policy import Policy
from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import Clock, SystemClock
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.fork import at_fork
from tidegate.core._bounds import SECOND
from tidegate.core._decision import VERBS
from tidegate.core._limit import Limit
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.stores._delegating import DelegatingStore
from tidegate.stores._outage.breaker import ShardBreakers
from tidegate.stores._outage.fallback import Fallback
from tidegate.stores._outage.local_share import longest_window
from tidegate.stores._outage.process_share import PROCESSES, WHOLE_PARTS, ProcessShare

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.stores._base import Ask, Store
    from tidegate.stores._values import Collection, Value, Write

MAX_PROCESSES: Final = WHOLE_PARTS
MAX_KNOWN_POLICIES: Final = 10_000
PROBE_POLICY: Final = Policy(
    "tidegate.probe", (Limit(2**40, "1m", algorithm="fixed_window"),)
)  # always allowed, so that a probe writes


OUTAGE_ERRORS: Final = (
    StoreUnavailable,
    OSError,
)  # raised by a store that is unavailable; OSError by one that does not translate errors of its driver
FIRST_CALL_TRIES: Final = 3
REFUSED_RETRY: Final = SECOND  # after which a call may be repeated whose key the store cannot use
REFUSED_PAUSE: Final = 60 * SECOND  # between two log messages about such keys


class FailedKey(NamedTuple):
    """A key whose call failed, so that an outage started: that of an ask, or of a value."""

    ask: Ask | None
    value: tuple[Collection, str] | None


class GuardedStore(DelegatingStore):
    """Calls a shared store while it answers; during an outage, decides as `on_store_error` of each policy says.

    `deny` denies, `allow` allows, and `local` admits this process's part of the limit (see `local_share` and
    `process_share`). An outage starts with the first call that raises StoreUnavailable or OSError. During the outage a
    call takes microseconds, and only a background thread probes the store. The start and the end of an outage
    are logged, one line each, and counted. If parts of the store fail separately (`Store.shard`), each part has outages
    of its own.

    The store itself bounds how long a call may take (`verify_store` tests it). The very first call, which connects, is
    tried several times. `processes` is the number of processes that share the limits of `local` policies; by default
    they count each other through the store.

    A caller that handles outages itself replaces the log lines with a function: `report_outages`.

    `clock` measures pauses. Set `background` to False in tests that call `maintain` themselves.
    """

    def __init__(
        self,
        store: Store,
        *,
        processes: int | None = None,
        clock: Clock | None = None,
        background: bool = True,
    ) -> None:
        """Guard this store; closing the GuardedStore closes it."""
        super().__init__(store)
        self.instant: bool = False  # type: ignore[misc]  # a call may wait for the store
        self.has_fallback: bool = True  # type: ignore[misc]  # decides without the store
        if processes is not None and (
            isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= MAX_PROCESSES
        ):
            raise ConfigError(f"must be an integer from 1 to {MAX_PROCESSES}, not {processes!r}", field="processes")
        self.store = store
        self._processes = processes
        self._steady: Clock = clock or SystemClock()
        self._background = background
        self._report: Callable[[str | None], object] | None = None
        self._thread = BackgroundThread(self._maintain_if_open, "tidegate-maintenance", clock=self._steady)
        store.handle_lost_corrections(partial(_correct_later, weakref.ref(self)))
        at_fork(child=self._reset)
        self._reset()

    def _reset(self) -> None:
        """Set the initial state, also in a forked process."""
        self._breakers = ShardBreakers()
        self._share = ProcessShare(os.urandom(8).hex(), self._processes, self._steady.steady)
        self._fallback = Fallback(self._breakers, self._share, self.clock, self._steady)
        self._tries = FIRST_CALL_TRIES  # how often a call is sent before an outage starts: more than once to connect
        self._lock = self._fallback.lock  # also held when an outage starts or ends
        self._counts_processes = False  # whether a `local` policy was used, and the store can count processes
        self._horizon = 0  # the longest window of these policies
        self._local_policies: dict[int, Policy] = {}  # by id: those that are known
        self._maintenance_lock = threading.Lock()
        self._closed = False
        self._failed_keys: dict[Hashable, FailedKey] = {}  # by part of the store: what its probes ask for
        self._decided_before: dict[Hashable, int] = {}  # calls that were decided here before an outage
        self._at_exit: Callable[[], None] | None = None
        self._refused_log_due = 0

    def _tries_for(self, verb: str) -> int:
        """Return how often a call is sent: a correction once, since an unanswered attempt may have arrived."""
        return min(1, self._tries) if VERBS[verb].corrects else self._tries

    # ---- methods of Store --------------------------------------------------------------------------------------------

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        if self._breakers.lost or self._tries > 1 or self._fallback.spending:
            return self.apply(verb, ((policy, key, costs),), now, at)[0]
        if policy.on_store_error == "local" and id(policy) not in self._local_policies:
            self._add_local_policy(policy)
        outages = self._breakers.outages
        try:
            return self.store.apply_one(verb, policy, key, costs, now, at)
        except OUTAGE_ERRORS as error:
            return self._decide_failed(error, outages, verb, ((policy, key, costs),), now, at)[0]

    def apply(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply the verb to every key together.

        During an outage no values are written: the decisions are LocalDecisions. Without asks, or for a correction,
        StoreUnavailable is raised: a correction without its values could be made twice.
        """
        flow = self._apply_flow(verb, asks, now, at, writes)
        return run(flow, lambda _: super(GuardedStore, self).apply(verb, asks, now, at, writes))

    async def apply_async(
        self,
        verb: str,
        asks: Sequence[Ask],
        now: int | None = None,
        at: int | None = None,
        writes: Sequence[Write] = (),
    ) -> list[Decision]:
        """Apply without blocking the event loop. A cancelled call does not count as a failure of the store."""
        self._count_processes(asks)
        if self._is_simple(asks) and not writes:
            outages = self._breakers.outages
            try:
                return await self.store.apply_async(verb, asks, now, at)
            except OUTAGE_ERRORS as error:
                return self._decide_failed(error, outages, verb, asks, now, at)
        flow = self._apply_flow(verb, asks, now, at, writes)
        return await run_async(flow, lambda _: super(GuardedStore, self).apply_async(verb, asks, now, at, writes))

    def _apply_flow(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write]
    ) -> Flow[None, list[Decision]]:
        """Decide with the store, or without it in an outage; yields to send the call."""
        self._count_processes(asks)
        if VERBS[verb].corrects and not writes and self._fallback.has_charged(asks, at):
            corrected = self._fallback.decide(verb, asks, now, at)
            self._start_thread()
            return corrected
        values = [(write.collection, write.name) for write in writes]
        outages, lost = self._breakers.outages, self._is_lost(asks, values)
        for left in range(0 if lost else self._tries_for(verb), 0, -1):
            try:
                decisions: list[Decision] = yield None
            except OUTAGE_ERRORS as error:
                if left == 1 or concerns_key(error):
                    return self._decide_failed(error, outages, verb, asks, now, at, values)
            else:
                self._tries = 1
                return decisions
        if not asks or (writes and VERBS[verb].corrects):
            raise self._unavailable_error()
        return self._fallback.decide(verb, asks, now, at)

    def _decide_failed(
        self,
        error: Exception,
        outages: int,
        verb: str,
        asks: Sequence[Ask],
        now: int | None,
        at: int | None,
        values: Sequence[tuple[Collection, str]] = (),
    ) -> list[Decision]:
        """Decide a call that the store has not answered, or refused because of one of its keys."""
        if concerns_key(error):
            if not VERBS[verb].asks or not asks:
                raise error
            self._log_refused(error)
            return self._fallback.decide(verb, asks, now, at, wait=REFUSED_RETRY)
        self._record_failure(error, outages, asks, values)
        if not asks or (values and VERBS[verb].corrects):
            raise error
        return self._fallback.decide(verb, asks, now, at, in_doubt=True)

    def _log_refused(self, error: Exception) -> None:
        """Log that a key cannot be used, at most once in REFUSED_PAUSE."""
        with self._lock:
            now = self._steady.steady()
            due = now >= self._refused_log_due
            if due:
                self._refused_log_due = now + REFUSED_PAUSE
        if due:
            self.outage_log.error("a call is decided without the store, and others are not: %s", error)

    # ---- values ------------------------------------------------------------------------------------------------------

    def get_value(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value; raises StoreUnavailable during an outage."""
        with self._observe_read(collection, name):
            return self.store.get_value(collection, name, now)

    async def get_value_async(self, collection: Collection, name: str, now: int | None = None) -> Value | None:
        """Read a value, without blocking the event loop."""
        with self._observe_read(collection, name):
            return await self.store.get_value_async(collection, name, now)

    def list_values(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection; raises StoreUnavailable during an outage."""
        with self._observe_read(collection):
            return self.store.list_values(collection, now)

    async def list_values_async(self, collection: Collection, now: int | None = None) -> dict[str, Value]:
        """Read all values of a listed collection, without blocking the event loop."""
        with self._observe_read(collection):
            return await self.store.list_values_async(collection, now)

    @contextmanager
    def _observe_read(self, collection: Collection, name: str = "") -> Iterator[None]:
        values = ((collection, name),)
        if self._is_lost((), values):
            raise self._unavailable_error()
        with self.observe_call(values):
            yield

    @staticmethod
    def _unavailable_error() -> StoreUnavailable:
        return StoreUnavailable("could not read or write a value: the store is unavailable; try again later")

    @contextmanager
    def observe_call(self, values: Sequence[tuple[Collection, str]] = ()) -> Iterator[None]:
        """Observe a call to the store that bypasses this wrapper: a failure starts an outage, and is raised."""
        outages = self._breakers.outages
        try:
            yield
        except OUTAGE_ERRORS as error:
            self._record_failure(error, outages, (), values)
            raise
        self._tries = 1  # connected: the next failure is not one of connecting

    def report_outages(self, report: Callable[[str | None], object]) -> None:
        """Call `report` in place of logging: with the reason when an outage starts, with None when it ends."""
        self._report = report

    def metrics(self) -> dict[str, int]:
        """Return counts of outages and local decisions, together with those of the store.

        `store_lost` is 1 during an outage, `losses` and `returns` count starts and ends of outages, `probes` the
        probes. `allowed_without_store` and `denied_without_store` count calls. `corrections_waiting` and
        `corrections_dropped` count refunds, releases and commits. Under `local`: `keys_unsettled` counts keys to be
        charged to the store, `processes` is how many processes share the limits (0: unknown), `share_ppm` the part of
        the limit that this process may admit during an outage, in millionths.
        """
        return {
            **self.store.metrics(),
            "store_lost": int(self._breakers.is_open),
            "losses": self._breakers.outages,
            "returns": self._breakers.recoveries,
            "probes": self._breakers.probes,
            "allowed_without_store": self._fallback.allowed,
            "denied_without_store": self._fallback.denied,
            "corrections_waiting": len(self._fallback.pending_corrections),
            "corrections_dropped": self._fallback.dropped_corrections,
            "keys_unsettled": len(self._fallback.spending),
            "processes": self._share.processes,
            "share_ppm": self._share.usable() * 10**6 // WHOLE_PARTS,
        }

    def close(self) -> None:
        """Charge what was admitted without the store, free the share of this process, and close the store."""
        self._leave()
        self.store.close()

    async def close_async(self) -> None:
        """Do what `close` does, without blocking the event loop."""
        await asyncio.to_thread(self._leave)
        await self.store.close_async()

    # ---- calls to the store ------------------------------------------------------------------------------------------

    def _is_simple(self, asks: Sequence[Ask]) -> bool:
        """Return whether the call can go straight to the store: the usual case, which must be fast."""
        return not self._breakers.lost and self._tries == 1 and len(asks) == 1 and not self._fallback.spending

    @property
    def unavailable(self) -> bool:
        """Whether there is an outage of the whole store now."""
        return None in self._breakers.lost

    def _is_lost(self, asks: Sequence[Ask], values: Sequence[tuple[Collection, str]] = ()) -> bool:
        """Return whether the part of the store that has these keys is unavailable."""
        lost = self._breakers.lost
        return bool(lost) and (None in lost or self.store.shard(asks, values) in lost)

    def ask_store(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Call the store itself. Raises StoreUnavailable if it does not answer."""
        self._require_shard(asks)
        with translated():
            return self.store.apply(verb, asks, now, at)

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Call the store itself, without blocking the event loop; the charge of a cancelled call is refunded."""
        self._require_shard(asks)
        with translated():
            return await self.store.apply_async(verb, asks, now, at)

    def _require_shard(self, asks: Sequence[Ask]) -> None:
        """Raise StoreUnavailable if the part of the store with these keys is lost, and others are not."""
        if not self.unavailable and self._is_lost(asks):
            raise StoreUnavailable("the part of the store that has these keys is unavailable; it is probed meanwhile")

    def _count_processes(self, asks: Sequence[Ask]) -> None:
        """Count processes in the background, once a `local` policy is used and their number is not configured."""
        known = self._local_policies
        for policy, _, _ in asks:
            if policy.on_store_error == "local" and id(policy) not in known:
                self._add_local_policy(policy)

    def _add_local_policy(self, policy: Policy) -> None:
        with self._lock:
            if len(self._local_policies) >= MAX_KNOWN_POLICIES:
                self._local_policies.clear()
            self._local_policies[id(policy)] = policy
            if not self.keeps_values or self._closed or self._share.configured:
                return
            window = longest_window(policy, self.clock.ns() // 1000)
            if window <= self._horizon and self._counts_processes:
                return
            self._horizon = max(window, self._horizon)
            self._counts_processes = True
            self._share.due = 0
            if self._at_exit is None:
                self._at_exit = partial(_leave_at_exit, weakref.ref(self))
                atexit.register(self._at_exit)
        self._start_thread()

    # ---- outages -----------------------------------------------------------------------------------------------------

    def _record_failure(
        self,
        error: Exception,
        outages: int,
        asks: Sequence[Ask] = (),
        values: Sequence[tuple[Collection, str]] = (),
    ) -> None:
        if concerns_key(error):
            return
        shard = error.shard if isinstance(error, StoreUnavailable) else None
        if shard is not None and self.store.shard(asks, values) is None:  # a wrapper that does not know of parts
            shard = None
        with self._lock:
            for policy, _, _ in asks:
                self._fallback.modes.setdefault(policy.name, policy.on_store_error)
            starts = not self._closed and self._breakers.record_failure(shard, self._steady.steady(), outages)
            self._tries = 1
            if starts:
                self._decided_before[shard] = self._fallback.allowed + self._fallback.denied
                self._failed_keys[shard] = FailedKey(asks[0] if asks else None, values[0] if values else None)
        if starts:
            reason = str(error) or type(error).__name__
            modes = self._fallback.describe_modes()
            if self._report is not None:
                self._report(reason)
            elif shard is None:
                message = "store unavailable: %s; until it is available again, %s; probing it in the background"
                self.outage_log.error(message, reason, modes)
            else:
                message = "a part of the store is unavailable: %s; until it is available again, %s; probing it"
                self.outage_log.error(message, reason, modes)
            self._start_thread()

    def maintain(self) -> int | None:
        """Do what is due: probe an unavailable store, settle after an outage, count processes.

        Returns when to call it again, in steady time; None if only an outage makes that necessary.
        """
        with self._maintenance_lock:
            breakers = self._breakers
            for shard, breaker in tuple(breakers.lost.items()):
                if self._steady.steady() >= breaker.probe_due:
                    self._probe(shard)
            if None in breakers.lost:
                return breakers.probe_due
            with suppress(*OUTAGE_ERRORS):  # recorded as the start of an outage
                if not breakers.lost:
                    self._fallback.settle(self._ask_to_settle)
                if self._counts_processes and self._steady.steady() >= self._share.due:
                    with self.observe_call(((PROCESSES, self._share.name),)):
                        self._share.synchronize(self.store, self._horizon, self._fallback)
            due = [breakers.probe_due] if breakers.lost else []
            return min(due + [self._share.due] * self._counts_processes, default=None)

    def _probe(self, shard: Hashable) -> None:
        breaker = self._breakers.lost[shard]
        breaker.start_probe()
        ask, value = self._failed_keys[shard]
        try:
            if shard is None:
                self._ask_background("acquire", PROBE_POLICY, "probe", (1,))
            if ask is not None:  # its server may be another one by now
                policy, key, costs = ask
                self._ask_background("peek", policy, key, (0,) * len(costs))
            elif value is not None and shard is not None:
                self.store.get_value(*value)
        except OUTAGE_ERRORS as error:
            answered = concerns_key(error)
        else:
            answered = True
        with self._lock:
            now = self._steady.steady()
            self._breakers.record_probe(shard, now, answered=answered)
            duration = (now - breaker.since) / SECOND
            decided = self._fallback.allowed + self._fallback.denied - self._decided_before[shard]
        if answered and self._report is not None:
            if not self._breakers.lost:
                self._report(None)
        elif answered and shard is None:
            message = "store available again after %.3f s; %d calls were decided without it"
            self.outage_log.warning(message, duration, decided)
        elif answered:
            message = "a part of the store is available again after %.3f s; %d calls were decided without it"
            self.outage_log.warning(message, duration, decided)

    def _ask_background(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None
    ) -> Decision:
        """Call the store for maintenance."""
        decision = self.store.apply_one(verb, policy, key, costs, None, at)
        self._tries = 1
        return decision

    def _ask_to_settle(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None
    ) -> Decision:
        """Call the store to settle; a failure is one of this key, so that its part of the store is probed."""
        outages = self._breakers.outages
        try:
            return self._ask_background(verb, policy, key, costs, at)
        except OUTAGE_ERRORS as error:
            self._record_failure(error, outages, ((policy, key, costs),))
            raise

    # ---- the background thread ---------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._background:
            self._thread.wake()

    def _maintain_if_open(self) -> int | None:
        return None if self._closed else self.maintain()

    def _leave(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        with self._lock:
            closed, self._closed = self._closed, True
        self._thread.stop(0)
        if not closed and not self._breakers.is_open:
            with self._maintenance_lock, suppress(*OUTAGE_ERRORS):
                self._fallback.settle(self._ask_background)
                self._share.leave(self.store, held=self._fallback.held)


@contextmanager
def translated() -> Iterator[None]:
    """Raise StoreUnavailable in place of an error that a store does not translate."""
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the store failed: {str(error) or type(error).__name__}") from error


def concerns_key(error: Exception) -> bool:
    """Return whether an error concerns a key of one call, and not the store."""
    return isinstance(error, StoreUnavailable) and error.concerns_key


def _correct_later(reference: weakref.ref[GuardedStore], asks: Sequence[Ask], now: int | None, at: int | None) -> None:
    """Make a correction of a cancelled task that the store has not answered, as `apply` does without a cancellation."""
    guarded = reference()
    if guarded is not None:
        guarded._fallback.decide("adjust", asks, now, at, in_doubt=True)  # noqa: SLF001 - part of the class
        guarded._start_thread()  # noqa: SLF001 - as above


def _leave_at_exit(reference: weakref.ref[GuardedStore]) -> None:
    guarded = reference()
    if guarded is not None:
        guarded._leave()  # noqa: SLF001 - part of the class
