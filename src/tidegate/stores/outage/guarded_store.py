"""A store that may be lost without its callers noticing more than the answers they chose for that case."""

from __future__ import annotations

import asyncio
import atexit
import logging
import secrets
import threading
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock, SystemClock, ThreadSignal
from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_INTEGER, SECOND
from tidegate.core.decision import Decision
from tidegate.core.limit import Limit
from tidegate.errors import Closed, ConfigError, StoreUnavailable
from tidegate.fork import at_fork
from tidegate.policy import Policy
from tidegate.stores.base import Store
from tidegate.stores.cancellation import BackgroundTasks, corrections
from tidegate.stores.outage.bounded_calls import DeadlineTasks, DeadlineThreads
from tidegate.stores.outage.breaker import CircuitBreaker
from tidegate.stores.outage.fallback import MIN_RETRY, Fallback, only_charges
from tidegate.stores.outage.local_share import LocalShare
from tidegate.stores.outage.peers import WHOLE_LIMIT, Peers
from tidegate.stores.outage.server_clock import ServerClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.clock import Signal
    from tidegate.policy import Key
    from tidegate.stores.base import Ask

log = logging.getLogger(__name__)

OUTAGE_ERRORS: Final = (
    StoreUnavailable,
    OSError,
)  # what a store raises that cannot answer; the second, one that forgot to say so
DECIDING_VERBS: Final = ("acquire", "hold", "peek")
MIN_SECONDS: Final = 0.001  # seconds that a deadline, a beat and the like can be set to
MAX_SECONDS: Final = 1_000_000
CONNECT_DEADLINE: Final = 1.0  # seconds for a call that has to connect
FIRST_CALL_TRIES: Final = 3
PROBE_POLICY: Final = Policy("tidegate.probe", (Limit(2**40, "1m", algorithm="fixed_window"),))  # allows, and so writes


class GuardedStore(Store):
    """Asks a shared store while it answers; while it does not, decides without it, as each policy says.

    `deny` denies, `allow` allows, and `local` goes on with this process's share of the limit (see `share` and `peers`).
    The first call that is not answered within `deadline` seconds ends the asking: from then on a call costs
    microseconds, and only a background thread looks whether the store is back. Losing and finding it are logged, one
    line each, and counted.

    `bounded` says that the store keeps the deadline by itself (as ours do, opened by a URL); otherwise its calls run in
    a few threads of their own, at some cost. The first call of all, which connects, is given more time. `local_for` is
    how many seconds a process may go on with its share at least. `beat` is how often processes with a `local` policy
    look for each other.

    `clock` measures deadlines and pauses. `number` tells this process from others. `background` can be turned off for
    tests that call `tend` themselves.
    """

    def __init__(
        self,
        store: Store,
        *,
        deadline: float = 0.05,
        local_for: float = 600.0,
        beat: float = 1.0,
        bounded: bool = False,
        clock: Clock | None = None,
        number: int | None = None,
        background: bool = True,
    ) -> None:
        """Guard this store, which is closed with the guard."""
        super().__init__(store.clock)
        self.waited_on = store.waited_on
        for name, value in (("deadline", deadline), ("local_for", local_for), ("beat", beat)):
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not MIN_SECONDS <= value <= MAX_SECONDS
            ):
                raise ConfigError(
                    f"must be a number of seconds from {MIN_SECONDS} to {MAX_SECONDS}, not {value!r}", field=name
                )
        self.store = store
        self.deadline = deadline
        self._beat = round(beat * SECOND)
        self._term = max(2 * round(local_for * SECOND), 100 * self._beat)
        self._steady: Clock = clock or SystemClock()
        self._number = number
        self._background = background
        self._bounded = bounded
        self._ask_one: Callable[..., Decision] = store.apply_one if bounded else self._bounded_one
        at_fork(child=self._reset)
        self._reset()

    def _reset(self) -> None:
        """Start afresh: at first, and in a process that was forked from one that guarded."""
        self._workers = None if self._bounded else DeadlineThreads()
        self._tasks = DeadlineTasks()
        self._abandoned_calls = BackgroundTasks()
        self._breaker = CircuitBreaker()
        self._reckoning = ServerClock()
        self._alone = Fallback(self._breaker, self._reckoning, self.clock, self._steady)
        self._shares = self._alone.shares
        self._lock = self._alone.lock  # also for the change between with and without the store
        self._tending = threading.Lock()
        self._wake = ThreadSignal()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._tries = FIRST_CALL_TRIES  # how often a question is put before the store counts as lost
        self._failed: Ask | None = None  # what the store did not answer: in a cluster, other keys may do well
        self._told = 0
        self._at_exit: Callable[[], None] | None = None
        self._me = secrets.randbits(40) | 1 if self._number is None else self._number

    # ---- the store's methods -----------------------------------------------------------------------------------------

    def apply_one(
        self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], now: int | None = None, at: int | None = None
    ) -> Decision:
        """Apply the verb to one key."""
        if self._breaker.lost or self._tries > 1 or policy.on_store_error == "local":
            return self.apply(verb, ((policy, key, costs),), now, at)[0]
        losses = self._breaker.losses
        try:
            return self._ask_one(verb, policy, key, costs, now, at)
        except OUTAGE_ERRORS as error:
            asks = ((policy, key, costs),)
            self._lose(error, losses, asks)
            return self._alone.decide(verb, asks, now, at, in_doubt=True)[0]

    def apply(self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None) -> list[Decision]:
        """Apply the verb to every key together."""
        if self._meets_peers(asks):
            self.tend()
        losses = self._breaker.losses
        sent = self._outgoing(verb, asks)
        for left in range(self._tries_for(verb) if sent else 0, 0, -1):
            try:
                answers = self.ask_store(verb, sent, now, at)
            except OUTAGE_ERRORS as error:
                if left == 1:
                    self._lose(error, losses, asks)
            else:
                self._tries = 1
                return answers if sent is asks else self._incoming(asks, sent, answers)
        return self._alone.decide(verb, asks, now, at, in_doubt=bool(sent))

    async def apply_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Apply without blocking the event loop. A caller that is cancelled says nothing about the store."""
        if self._plain(asks):
            losses = self._breaker.losses
            try:
                return await self.store.apply_async(verb, asks, now, at)
            except OUTAGE_ERRORS as error:
                self._lose(error, losses, asks)
                return self._alone.decide(verb, asks, now, at, in_doubt=True)
        if self._meets_peers(asks):
            await asyncio.to_thread(self.tend)
        losses = self._breaker.losses
        sent = self._outgoing(verb, asks)
        for left in range(self._tries_for(verb) if sent else 0, 0, -1):
            try:
                answers = await self.ask_store_async(verb, sent, now, at)
            except OUTAGE_ERRORS as error:
                if left == 1:
                    self._lose(error, losses, asks)
            else:
                self._tries = 1
                return answers if sent is asks else self._incoming(asks, sent, answers)
        return self._alone.decide(verb, asks, now, at, in_doubt=bool(sent))

    def metrics(self) -> dict[str, int]:
        """Count what the guard did, beside the store's own counts.

        `store_lost` is 1 while it is lost, `losses` and `returns` count the changes, `probes` the looks in between.
        `allowed_without_store` and `denied_without_store` count calls. `corrections_waiting` and `corrections_dropped`
        are refunds, releases and commits. Under `local`: `keys_unsettled` are to be charged to the store, `peers` is
        how many processes share a policy (the most of all policies), `share_ppm` what part of the limit this one may
        spend when cut off (the least, in millionths), `halved` is 1 while calls to the store cost double.
        """
        now = self._steady.steady()
        peers = [share.peers for share in self._shares.values()]
        latest = self._reckoning.latest(now)
        return {
            **self.store.metrics(),
            "store_lost": int(self._breaker.lost),
            "losses": self._breaker.losses,
            "returns": self._breaker.returns,
            "probes": self._breaker.probes,
            "allowed_without_store": self._alone.allowed,
            "denied_without_store": self._alone.denied,
            "corrections_waiting": len(self._alone.later),
            "corrections_dropped": self._alone.dropped,
            "keys_unsettled": sum(len(share.spent) for share in self._shares.values()),
            "peers": max((one.processes for one in peers), default=0),
            "share_ppm": min((one.held(latest)[0] * 10**6 // WHOLE_LIMIT for one in peers), default=0),
            "halved": int(any(one.complete_until <= latest for one in peers)),
        }

    def close(self) -> None:
        """Leave the peers and close the store."""
        self._leave()
        self.store.close()

    async def close_async(self) -> None:
        """Leave the peers and close the store, without blocking the event loop."""
        await asyncio.to_thread(self._leave)
        await self._abandoned_calls.finish()
        await self.store.close_async()

    # ---- with the store ----------------------------------------------------------------------------------------------

    def _plain(self, asks: Sequence[Ask]) -> bool:
        """Tell whether there is nothing to do but to ask: the usual case, which should cost nothing."""
        if self._breaker.lost or self._tries > 1 or self._workers is not None or len(asks) != 1:
            return False
        return asks[0][0].on_store_error != "local"

    @property
    def lost(self) -> bool:
        """Whether the store is lost right now."""
        return self._breaker.lost

    def ask_store(self, *asked: Any) -> list[Decision]:  # noqa: ANN401 - the arguments of apply
        """Ask the store itself, within the deadline; raise where it does not answer."""
        if self._workers is None:
            return self.store.apply(*asked)
        return self._workers.run(partial(self.store.apply, *asked), self._seconds())

    async def ask_store_async(
        self, verb: str, asks: Sequence[Ask], now: int | None = None, at: int | None = None
    ) -> list[Decision]:
        """Ask the store itself, without blocking the event loop; what a cancelled call was charged is given back."""
        if self._workers is None:
            return await self.store.apply_async(verb, asks, now, at)
        await self._abandoned_calls.watch()
        began = self._steady.steady()
        call: asyncio.Future[list[Decision]]
        if type(self.store).apply_async is Store.apply_async:  # it would block the loop
            call = self._workers.begin(partial(self.store.apply, verb, asks, now, at))
        else:
            call = asyncio.ensure_future(self.store.apply_async(verb, asks, now, at))
        try:
            return await self._tasks.wait(call, self._seconds())
        except asyncio.CancelledError:
            self._abandoned_calls.start(self._abandoned(call, (verb, asks, now), began))
            raise

    async def _abandoned(
        self, call: asyncio.Future[list[Decision]], asked: tuple[str, Sequence[Ask], int | None], began: int
    ) -> None:
        """Wait for the answer to a call whose task was cancelled, and give back what it was charged."""
        verb, asks, now = asked
        for _ in range(2):  # a loop that ends cancels this task, too
            with suppress(asyncio.CancelledError):
                await asyncio.wait((call,), timeout=self._seconds())
                break
        if not call.done():
            call.cancel()  # it hangs; a store that can undo it by itself will
            return
        if call.cancelled() or call.exception() is not None:
            return
        for back, at in corrections(verb, asks, call.result(), self._steady.steady() - began):
            try:
                await self.ask_store_async("adjust", back, now, at)
            except OUTAGE_ERRORS:
                self._alone.decide("adjust", back, now, at, in_doubt=True)
        if verb != "peek":
            self.wake(asks)

    def _bounded_one(self, *asked: Any) -> Decision:  # noqa: ANN401 - the arguments of apply_one
        assert self._workers is not None  # noqa: S101 - what chose this method
        return self._workers.run(partial(self.store.apply_one, *asked), self._seconds())

    def _seconds(self) -> float:
        """Give a call its deadline; the first has to connect."""
        return max(self.deadline, CONNECT_DEADLINE) if self._tries > 1 else self.deadline

    def _tries_for(self, verb: str) -> int:
        """Return how often a call is sent: a correction once, since an unanswered attempt may have arrived."""
        return min(1, self._tries) if verb == "adjust" else self._tries

    def _meets_peers(self, asks: Sequence[Ask]) -> bool:
        """Tell whether a `local` policy is asked for the first time: the others are looked for before it is decided."""
        met = False
        for policy, _, _ in asks:
            if policy.on_store_error == "local" and not self._closed:
                share = self._shares.get(policy.name) or self._join(policy.name)
                met = met or share.peers.posted < 0
        return met and not self._breaker.lost

    def _join(self, name: str) -> LocalShare:
        with self._lock:
            if self._at_exit is None:
                self._at_exit = partial(_leave_at_exit, weakref.ref(self))
                atexit.register(self._at_exit)
            peers = Peers(name, self._me, self._beat, self._term)
            share = self._shares.setdefault(
                name, LocalShare(peers, 2 * round(self.deadline * SECOND) + self._beat // 4)
            )
        self._start_thread()
        return share

    def _outgoing(self, verb: str, asks: Sequence[Ask]) -> Sequence[Ask]:
        """Word what the store is asked: the same; at double cost where a peer may be cut off; nothing if it is lost."""
        if self._breaker.lost:
            return ()
        if verb not in DECIDING_VERBS or not self._shares:
            return asks
        latest = self._reckoning.latest(self._steady.steady())
        if not any(self._halved(policy, latest) for policy, _, _ in asks):
            return asks
        return [
            (policy, key, doubled(policy, costs)) if self._halved(policy, latest) else (policy, key, costs)
            for policy, key, costs in asks
        ]

    def _halved(self, policy: Policy, latest: int) -> bool:
        if policy.on_store_error != "local":
            return False
        share = self._shares.get(policy.name)
        return share is None or share.peers.complete_until <= latest

    def _incoming(self, asks: Sequence[Ask], sent: Sequence[Ask], answers: list[Decision]) -> list[Decision]:
        """Read answers to questions, some of them at double cost."""
        return [
            answer if costs == asked else halve(answer, costs, self._beat)
            for (_, _, costs), (_, _, asked), answer in zip(asks, sent, answers, strict=True)
        ]

    # ---- losing it and finding it again ------------------------------------------------------------------------------

    def _lose(self, error: Exception, losses: int, asks: Sequence[Ask] = ()) -> None:
        with self._lock:
            for policy, _, _ in asks:
                self._alone.modes.setdefault(policy.name, policy.on_store_error)
            lost = not self._closed and self._breaker.fail(self._steady.steady(), losses)
            self._tries = 1
            if lost:
                self._told = self._alone.allowed + self._alone.denied
                self._failed = asks[0] if asks else None
        if lost:
            reason = str(error) or type(error).__name__
            log.error(
                "store unavailable: %s; until it is back, %s; probing it in the background",
                reason,
                self._describe_modes(),
            )
            self._start_thread()

    def _describe_modes(self) -> str:
        """Describe, for the log, how calls are decided during the outage."""
        outcomes = {"deny": "are denied", "allow": "are allowed without limit"}
        described = []
        for name, mode in sorted(self._alone.modes.items()):
            if mode == "local" and name in self._shares:
                latest = self._reckoning.latest(self._steady.steady())
                part = 100 * self._shares[name].peers.held(latest)[0] / WHOLE_LIMIT
                described.append(
                    f"calls to policy {name!r} are decided by this process's share, {part:.3g} % of the limit"
                )
            else:
                described.append(f"calls to policy {name!r} {outcomes.get(mode, 'are denied')}")
        return ", ".join(described) or "calls are decided by on_store_error of their policies"

    def tend(self) -> int | None:
        """Do what is due besides deciding: look for a lost store, settle with one that is back, meet the peers.

        Tells when it wants to be called again, in steady time; None: when the store is lost.
        """
        with self._tending:
            breaker = self._breaker
            if breaker.lost and self._steady.steady() >= breaker.due:
                self._probe()
            if breaker.lost:
                return breaker.due
            losses = breaker.losses
            try:
                return self._meet()
            except OUTAGE_ERRORS as error:
                self._lose(error, losses)
                return breaker.due

    def _probe(self) -> None:
        try:
            self._ask("acquire", PROBE_POLICY, "probe", (1,))
            if self._failed is not None:
                policy, key, costs = self._failed
                self._ask("peek", policy, key, (0,) * len(costs))
        except OUTAGE_ERRORS:
            answered = False
        else:
            answered = True
        with self._lock:
            now = self._steady.steady()
            self._breaker.probed(now, answered=answered)
            duration = (now - self._breaker.since) / SECOND
            decided = self._alone.allowed + self._alone.denied - self._told
        if answered:
            log.warning("store available again after %.3f s; %d calls were decided without it", duration, decided)

    def _meet(self) -> int | None:
        """Settle with the store, then look for the peers: whoever posts must have nothing left to settle."""
        while self._alone.later:
            policy, key, costs, at = self._alone.later.popleft()
            if any(charges := only_charges(costs)):  # what gives permits back is sent once: it may arrive unanswered
                self._alone.later.appendleft((policy, key, charges, at))
            self._ask("adjust", policy, key, costs, at)
            if any(charges):
                self._alone.later.popleft()
        if self._shares and not self._reckoning.known:
            self._ask("peek", PROBE_POLICY, "probe", (1,))
        due = []
        for share in list(self._shares.values()):
            share.settle(self._ask, self._alone.memory, self._now())
            share.peers.turn(self._ask, self._now())
            due.append(share.peers.due())
        if not due:
            return None
        return self._steady.steady() + max(MIN_RETRY, min(due) - self._now())

    def _now(self) -> int:
        return self._reckoning.earliest(self._steady.steady())

    def _ask(self, verb: str, policy: Policy, key: Key, costs: tuple[int, ...], at: int | None = None) -> Decision:
        """Ask the store itself, and learn from the answer what its clock shows."""
        before = self._steady.steady()
        if self._workers is None:
            decision = self.store.apply_one(verb, policy, key, costs, None, at)
        else:  # nobody waits for this, so it may take longer: it is no reason to call the store lost
            call = partial(self.store.apply_one, verb, policy, key, costs, None, at)
            decision = self._workers.run(call, max(self.deadline, CONNECT_DEADLINE))
        self._tries = 1
        self._reckoning.note(decision.at, before, self._steady.steady())
        return decision

    # ---- the thread in the background --------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if not self._background:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                arguments = (weakref.ref(self), self._wake, self._steady)
                self._thread = threading.Thread(target=_tend, args=arguments, name="tidegate-guard", daemon=True)
                self._thread.start()
        self._wake.set()

    def _rest(self) -> bool:
        """End the thread if there is nothing to tend."""
        with self._lock:
            if self._closed or not (self._breaker.lost or self._shares or self._alone.later):
                self._thread = None
                return True
        return False

    def _leave(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        with self._lock:
            closed, self._closed = self._closed, True
        self._wake.set()
        if not closed and not self._breaker.lost:
            with self._tending, suppress(*OUTAGE_ERRORS):
                for share in self._shares.values():
                    share.settle(self._ask, self._alone.memory, self._now())
                    share.peers.leave(self._ask)


def _leave_at_exit(me: weakref.ref[GuardedStore]) -> None:
    guard = me()
    if guard is not None:
        guard._leave()  # noqa: SLF001 - part of the class


def _tend(me: weakref.ref[GuardedStore], wake: Signal, clock: Clock) -> None:
    """Tend a guard until it is closed, gone, or has nothing to be tended."""
    while (guard := me()) is not None and not guard._rest():  # noqa: SLF001 - part of the class
        wake.clear()
        try:
            due = guard.tend()
        except Closed:
            return
        except Exception:
            log.exception("store maintenance failed; retrying in 1 s")
            due = clock.steady() + SECOND
        del guard
        clock.wait(wake, due)


def doubled(policy: Policy, costs: tuple[int, ...]) -> tuple[int, ...]:
    """Double a cost, except at limits of which nobody has a share."""
    pairs = zip(policy.limits, costs, strict=True)
    return tuple(cost if limit.algorithm == "concurrency" else min(2 * cost, MAX_INTEGER) for limit, cost in pairs)


def halve(decision: Decision, costs: tuple[int, ...], wait: int) -> Decision:
    """Read the answer to a question at double cost."""
    limits, views = decision[2], []
    for limit, cost, (remaining, retry, reset) in zip(limits, costs, decision.views, strict=True):
        left = remaining if limit.algorithm == "concurrency" else remaining // 2
        views.append((left, wait if retry == NEVER and cost <= limit.burst else retry, reset))
    return Decision((decision.allowed, decision.at, limits, views, None))
