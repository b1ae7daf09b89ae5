"""A store wrapper that keeps deciding calls while the store is unavailable."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.bounds import SECOND
from tidegate.core.limit import Limit
from tidegate.errors import Closed, ConfigError
from tidegate.flow import run, run_async
from tidegate.fork import at_fork
from tidegate.policy import Policy
from tidegate.stores.base import Alternatives, Store
from tidegate.stores.outage.breaker import CircuitBreaker
from tidegate.stores.outage.double_cost import doubled, original_decisions
from tidegate.stores.outage.fallback import MIN_RETRY, Fallback, only_charges
from tidegate.stores.outage.local_share import LocalShare
from tidegate.stores.outage.peers import WHOLE_LIMIT, Peers
from tidegate.stores.outage.server_clock import ServerClock
from tidegate.stores.outage.store_calls import OUTAGE_ERRORS, StoreCalls

if TYPE_CHECKING:
    import logging
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tidegate.clock import Signal
    from tidegate.core.decision import Decision
    from tidegate.flow import Flow
    from tidegate.policy import Key
    from tidegate.stores.base import Ask, WaitQueueRefs

DECIDING_VERBS: Final = ("acquire", "hold", "peek")
MIN_SECONDS: Final = 0.001  # bounds of deadline, local_for and heartbeat
MAX_SECONDS: Final = 1_000_000
PROBE_POLICY: Final = Policy(
    "tidegate.probe", (Limit(2**40, "1m", algorithm="fixed_window"),)
)  # always allowed, so that a probe writes


class GuardedStore(Store):
    """Calls a shared store while it answers; during an outage, decides as `on_store_error` of each policy says.

    `deny` denies, `allow` allows, and `local` spends this process's share of the limit (see `local_share` and `peers`).
    An outage starts with the first call that is not answered within `deadline` seconds. During the outage a call takes
    microseconds, and only a background thread probes the store. The start and the end of an outage are logged, one line
    each, and counted.

    `bounded` means that the store enforces the deadline itself (as our stores opened by URL do); otherwise its calls
    run in a few threads, at some cost. The very first call, which connects, gets more time. `local_for` is the
    minimum time in seconds for which a process may spend its share. `heartbeat` is the interval in seconds at which
    processes with a `local` policy exchange heartbeats.

    A caller that handles outages itself replaces the log lines with a function: `report_outages`.

    `clock` measures deadlines and pauses. `number` identifies this process. Set `background` to False in tests that
    call `maintain` themselves.
    """

    has_fallback = True

    def __init__(
        self,
        store: Store,
        *,
        deadline: float = 0.05,
        local_for: float = 600.0,
        heartbeat: float = 1.0,
        bounded: bool = False,
        clock: Clock | None = None,
        number: int | None = None,
        background: bool = True,
    ) -> None:
        """Guard this store; closing the GuardedStore closes it."""
        super().__init__(store.clock)
        self.wait_queues: WaitQueueRefs = store.wait_queues
        for name, value in (("deadline", deadline), ("local_for", local_for), ("heartbeat", heartbeat)):
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not MIN_SECONDS <= value <= MAX_SECONDS
            ):
                raise ConfigError(
                    f"must be a number of seconds from {MIN_SECONDS} to {MAX_SECONDS}, not {value!r}", field=name
                )
        self.store = store
        self.decides_alternatives: bool = store.decides_alternatives  # type: ignore[misc]  # same as the guarded store
        self.deadline = deadline
        self._heartbeat = round(heartbeat * SECOND)
        self._term = max(2 * round(local_for * SECOND), 100 * self._heartbeat)
        self._steady: Clock = clock or SystemClock()
        self._number = number
        self._background = background
        self._bounded = bounded
        self._report: Callable[[str | None], object] | None = None
        at_fork(child=self._reset)
        self._reset()

    def _reset(self) -> None:
        """Set the initial state, also in a forked process."""
        self._breaker = CircuitBreaker()
        self._server_clock = ServerClock()
        self._fallback = Fallback(self._breaker, self._server_clock, self.clock, self._steady)
        self._calls = StoreCalls(self.store, self.deadline, self._steady, self._fallback, bounded=self._bounded)
        self._ask_one: Callable[..., Decision] = self.store.apply_one if self._bounded else self._calls.apply_one
        self._shares = self._fallback.shares
        self._lock = self._fallback.lock  # also held when an outage starts or ends
        self._maintenance_lock = threading.Lock()
        self._wake = ThreadSignal()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed_ask: Ask | None = None  # the ask that failed: in a cluster, other keys may still work
        self._decided_before = 0
        self._at_exit: Callable[[], None] | None = None
        self._process_number = int.from_bytes(os.urandom(5)) | 1 if self._number is None else self._number

    # ---- methods of Store --------------------------------------------------------------------------------------------

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        if self._breaker.is_open or self._calls.tries > 1 or policy.on_store_error == "local":
            return self.apply(verb, ((policy, key, costs),), now, at)[0]
        outages = self._breaker.outages
        try:
            return self._ask_one(verb, policy, key, costs, now, at)
        except OUTAGE_ERRORS as error:
            asks = ((policy, key, costs),)
            self._record_failure(error, outages, asks)
            return self._fallback.decide(verb, asks, now, at, in_doubt=True)[0]

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""

        def perform(sent: Sequence[Ask] | None) -> list[Decision] | None:
            if sent is not None:
                return self.ask_store(verb, sent, now, at)
            self.maintain()
            return None

        return run(self._apply_flow(verb, asks, now, at), perform)

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop. A cancelled call does not count as a failure of the store."""
        if self._is_simple(asks):
            outages = self._breaker.outages
            try:
                return await self.store.apply_async(verb, asks, now, at)
            except OUTAGE_ERRORS as error:
                self._record_failure(error, outages, asks)
                return self._fallback.decide(verb, asks, now, at, in_doubt=True)

        def perform(sent: Sequence[Ask] | None) -> Awaitable[object]:
            return asyncio.to_thread(self.maintain) if sent is None else self.ask_store_async(verb, sent, now, at)

        return await run_async(self._apply_flow(verb, asks, now, at), perform)

    def _apply_flow(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None
    ) -> Flow[Sequence[Ask] | None, list[Decision]]:
        """Decide with the store, or without it in an outage; yields the asks to send, or None to call `maintain`."""
        if self._needs_sync(asks):
            yield None
        outages = self._breaker.outages
        sent = self._asks_to_send(verb, asks)
        for left in range(self._calls.tries_for(verb) if sent else 0, 0, -1):
            try:
                answers = yield sent
            except OUTAGE_ERRORS as error:
                if left == 1:
                    self._record_failure(error, outages, asks)
            else:
                self._calls.tries = 1
                return answers if sent is asks else original_decisions(asks, sent, answers, self._heartbeat)
        return self._fallback.decide(verb, asks, now, at, in_doubt=bool(sent))

    @contextmanager
    def observe_call(self) -> Iterator[None]:
        """Observe a call to the store that bypasses this wrapper: a failure starts an outage, and is raised."""
        outages = self._breaker.outages
        try:
            yield
        except OUTAGE_ERRORS as error:
            self._record_failure(error, outages)
            raise
        self._calls.tries = 1  # connected: the next failure is not one of connecting

    def log_outages(self, logger: logging.Logger) -> None:
        """Log outages with this logger."""
        super().log_outages(logger)
        self.store.log_outages(logger)

    def report_outages(self, report: Callable[[str | None], object]) -> None:
        """Call `report` in place of logging: with the reason when an outage starts, with None when it ends."""
        self._report = report

    def metrics(self) -> dict[str, int]:
        """Return counts of outages and local decisions, together with those of the store.

        `store_lost` is 1 during an outage, `losses` and `returns` count starts and ends of outages, `probes` the
        probes. `allowed_without_store` and `denied_without_store` count calls. `corrections_waiting` and
        `corrections_dropped` count refunds, releases and commits. Under `local`: `keys_unsettled` counts keys to be
        charged to the store, `peers` is how many processes share a policy (maximum of all policies), `share_ppm` the
        part of the limit that this process may spend when disconnected (minimum, in millionths), `halved` is 1 while
        calls cost double.
        """
        now = self._steady.steady()
        peers = [share.peers for share in self._shares.values()]
        latest = self._server_clock.latest(now)
        return {
            **self.store.metrics(),
            "store_lost": int(self._breaker.is_open),
            "losses": self._breaker.outages,
            "returns": self._breaker.recoveries,
            "probes": self._breaker.probes,
            "allowed_without_store": self._fallback.allowed,
            "denied_without_store": self._fallback.denied,
            "corrections_waiting": len(self._fallback.pending_corrections),
            "corrections_dropped": self._fallback.dropped_corrections,
            "keys_unsettled": sum(len(share.spent) for share in self._shares.values()),
            "peers": max((one.processes for one in peers), default=0),
            "share_ppm": min((one.claimed_share(latest)[0] * 10**6 // WHOLE_LIMIT for one in peers), default=0),
            "halved": int(any(one.all_connected_until <= latest for one in peers)),
        }

    def close(self) -> None:
        """Leave the peers and close the store."""
        self._leave_peers()
        self.store.close()

    async def close_async(self) -> None:
        """Leave the peers and close the store, without blocking the event loop."""
        await asyncio.to_thread(self._leave_peers)
        await self._calls.finish()
        await self.store.close_async()

    # ---- calls to the store ------------------------------------------------------------------------------------------

    def _is_simple(self, asks: Sequence[Ask]) -> bool:
        """Return whether the call can go straight to the store: the usual case, which must be fast."""
        if self._breaker.is_open or self._calls.tries > 1 or not self._bounded or len(asks) != 1:
            return False
        return asks[0][0].on_store_error != "local"

    @property
    def unavailable(self) -> bool:
        """Whether there is an outage now."""
        return self._breaker.is_open

    def ask_store(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Call the store itself, within the deadline. Raises StoreUnavailable if it does not answer."""
        return self._calls.apply(verb, asks, now, at)

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Call the store itself, without blocking the event loop; the charge of a cancelled call is refunded."""
        return await self._calls.apply_async(verb, asks, now, at)

    def _needs_sync(self, asks: Sequence[Ask]) -> bool:
        """Return whether a `local` policy is used for the first time: peers are synchronized before it is decided."""
        needed = False
        for policy, _, _ in asks:
            if policy.on_store_error == "local" and not self._closed:
                share = self._shares.get(policy.name) or self._join(policy.name)
                needed = needed or share.peers.posted < 0
        return needed and not self._breaker.is_open

    def _join(self, name: str) -> LocalShare:
        with self._lock:
            if self._at_exit is None:
                self._at_exit = partial(_leave_peers_at_exit, weakref.ref(self))
                atexit.register(self._at_exit)
            peers = Peers(name, self._process_number, self._heartbeat, self._term)
            share = self._shares.setdefault(
                name, LocalShare(peers, 2 * round(self.deadline * SECOND) + self._heartbeat // 4)
            )
        self._start_thread()
        return share

    def _asks_to_send(self, verb: str, asks: Sequence[Ask]) -> Sequence[Ask]:
        """Return the asks for the store: none in an outage, at double cost if a peer may be disconnected."""
        if self._breaker.is_open:
            return ()
        if verb not in DECIDING_VERBS or not self._shares:
            return asks
        latest = self._server_clock.latest(self._steady.steady())
        if not any(self._halved(policy, latest) for policy, _, _ in asks):
            return asks
        sent = [
            (policy, key, doubled(policy, costs)) if self._halved(policy, latest) else (policy, key, costs)
            for policy, key, costs in asks
        ]
        return asks.replace(sent) if isinstance(asks, Alternatives) else sent

    def _halved(self, policy: Policy, latest: int) -> bool:
        if policy.on_store_error != "local":
            return False
        share = self._shares.get(policy.name)
        return share is None or share.peers.all_connected_until <= latest

    # ---- outages -----------------------------------------------------------------------------------------------------

    def _record_failure(self, error: Exception, outages: int, asks: Sequence[Ask] = ()) -> None:
        with self._lock:
            for policy, _, _ in asks:
                self._fallback.modes.setdefault(policy.name, policy.on_store_error)
            starts = not self._closed and self._breaker.record_failure(self._steady.steady(), outages)
            self._calls.tries = 1
            if starts:
                self._decided_before = self._fallback.allowed + self._fallback.denied
                self._failed_ask = asks[0] if asks else None
        if starts:
            reason = str(error) or type(error).__name__
            if self._report is None:
                self.outage_log.error(
                    "store unavailable: %s; until it is available again, %s; probing it in the background",
                    reason,
                    self._fallback.describe_modes(),
                )
            else:
                self._report(reason)
            self._start_thread()

    def maintain(self) -> int | None:
        """Do what is due: probe an unavailable store, settle after an outage, synchronize with the peers.

        Returns when to call it again, in steady time; None if only an outage makes that necessary.
        """
        with self._maintenance_lock:
            breaker = self._breaker
            if breaker.is_open and self._steady.steady() >= breaker.probe_due:
                self._probe()
            if breaker.is_open:
                return breaker.probe_due
            outages = breaker.outages
            try:
                return self._sync_peers()
            except OUTAGE_ERRORS as error:
                self._record_failure(error, outages)
                return breaker.probe_due

    def _probe(self) -> None:
        self._breaker.start_probe()
        try:
            self._ask_background("acquire", PROBE_POLICY, "probe", (1,))
            if self._failed_ask is not None:
                policy, key, costs = self._failed_ask
                self._ask_background("peek", policy, key, (0,) * len(costs))
        except OUTAGE_ERRORS:
            answered = False
        else:
            answered = True
        with self._lock:
            now = self._steady.steady()
            self._breaker.record_probe(now, answered=answered)
            duration = (now - self._breaker.since) / SECOND
            decided = self._fallback.allowed + self._fallback.denied - self._decided_before
        if answered and self._report is not None:
            self._report(None)
        elif answered:
            self.outage_log.warning(
                "store available again after %.3f s; %d calls were decided without it", duration, decided
            )

    def _sync_peers(self) -> int | None:
        """Settle with the store, then synchronize with the peers: a process may only post when all is settled."""
        while self._fallback.pending_corrections:
            policy, key, costs, at = self._fallback.pending_corrections.popleft()
            if any(charges := only_charges(costs)):  # a refund is sent once: it may have arrived unanswered
                self._fallback.pending_corrections.appendleft((policy, key, charges, at))
            self._ask_background("adjust", policy, key, costs, at)
            if any(charges):
                self._fallback.pending_corrections.popleft()
        if self._shares and not self._server_clock.known:
            self._ask_background("peek", PROBE_POLICY, "probe", (1,))
        due = []
        for share in list(self._shares.values()):
            share.settle(self._ask_background, self._fallback.memory, self._now())
            share.peers.sync(self._ask_background, self._now())
            due.append(share.peers.due())
        if not due:
            return None
        return self._steady.steady() + max(MIN_RETRY, min(due) - self._now())

    def _now(self) -> int:
        return self._server_clock.earliest(self._steady.steady())

    def _ask_background(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None
    ) -> Decision:
        """Call the store for maintenance, and record the server's time from the answer."""
        before = self._steady.steady()
        decision = self._calls.apply_one_in_background(verb, policy, key, costs, None, at)
        self._calls.tries = 1
        self._server_clock.record(decision.at, before, self._steady.steady())
        return decision

    # ---- the background thread ---------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if not self._background:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                arguments = (weakref.ref(self), self._wake, self._steady)
                self._thread = threading.Thread(
                    target=_run_maintenance, args=arguments, name="tidegate-maintenance", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def _may_stop(self) -> bool:
        """Return whether the background thread can end, since there is nothing to do."""
        with self._lock:
            if self._closed or not (self._breaker.is_open or self._shares or self._fallback.pending_corrections):
                self._thread = None
                return True
        return False

    def _leave_peers(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        with self._lock:
            closed, self._closed = self._closed, True
        self._wake.set()
        if not closed and not self._breaker.is_open:
            with self._maintenance_lock, suppress(*OUTAGE_ERRORS):
                for share in self._shares.values():
                    share.settle(self._ask_background, self._fallback.memory, self._now())
                    share.peers.leave(self._ask_background)


def _leave_peers_at_exit(reference: weakref.ref[GuardedStore]) -> None:
    guarded = reference()
    if guarded is not None:
        guarded._leave_peers()  # noqa: SLF001 - part of the class


def _run_maintenance(reference: weakref.ref[GuardedStore], wake: Signal, clock: Clock) -> None:
    """Maintain a store until it is closed, deleted, or needs no maintenance."""
    while (guarded := reference()) is not None and not guarded._may_stop():  # noqa: SLF001 - part of the class
        wake.clear()
        try:
            due = guarded.maintain()
        except Closed:
            return
        except Exception:  # noqa: BLE001 - logged with its traceback; ruff does not know the logger
            guarded.outage_log.exception("store maintenance failed; retrying in 1 s")
            due = clock.steady() + SECOND
        del guarded
        clock.wait(wake, due)
