"""Processes that lease from one store over a bad network, in virtual time; and an oracle that saw every use.

Nothing sleeps and nothing runs by itself: the Simulation has the only clock and a queue of what happens when. Requests
and replies are delayed or lost, clients give up on requests that arrive all the same, processes are killed and new ones
start, their clocks are set wrong, step and drift. The code under test is the product's own: the short way, the steps
and the chores of a LeasedStore; only the driver that carries its questions to the store is ours.
"""

from __future__ import annotations

import heapq
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate import Limit, Policy, StoreUnavailable
from tidegate.stores import MemoryStore
from tidegate.stores.lease import Lease, LeasedStore
from tidegate.stores.lease.manager import MAX_ASKING, StoreRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate import Decision

START = 1_700_000_000_000_000
MINUTE = 60_000_000


class Use(NamedTuple):
    """A call that went ahead: when, in true time, and at what cost to each limit."""

    time: int
    costs: tuple[int, ...]


class Net(NamedTuple):
    """How bad the network is: the longest usual delay, how often it is far longer, and how often a message is lost."""

    delay: int = 2_000
    slow: float = 0.0
    lost: float = 0.0
    patience: int = 200_000  # how long a client waits for a reply


NETS = (
    Net(),
    Net(delay=20_000, slow=0.05, lost=0.02),
    Net(delay=50_000, slow=0.1, lost=0.1),
    Net(delay=300_000, slow=0.02, patience=5_000_000),
)


class Simulation:
    """True time, which is the store's; what is to happen; what was used, of one key."""

    def __init__(self, policy: Policy, lease: Lease, net: Net, seed: int, *, mixed: bool = False) -> None:
        self.random = Random(seed)
        self.mixed = mixed  # whether processes that do not lease take part
        self.policy = policy
        self.lease = lease
        self.net = net
        self.now = START - START % MINUTE + self.random.randrange(MINUTE // 6, MINUTE)
        self.store = MemoryStore()
        self.uses: list[Use] = []
        self.windows: dict[str, set[tuple[int, int]]] = {limit.name: set() for limit in policy.limits}
        self.denied = self.asked = self.local = 0  # calls denied; questions to the store; uses that asked it nothing
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._order = count()

    def after(self, delay: int, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def run(self, until: int) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, until)

    def delay(self) -> int:
        usual = self.random.randrange(1, self.net.delay + 1)
        return usual * self.random.randrange(10, 500) if self.random.random() < self.net.slow else usual

    def lose(self) -> bool:
        return self.random.random() < self.net.lost

    def apply(self, step: Any) -> list[Decision]:
        """Let the store decide, now; keep what it says of its windows."""
        self.asked += 1
        decisions = self.store.apply(step.verb, step.asks, self.now, step.at)
        if step.verb in ("acquire", "hold") and decisions[0].allowed:
            policy, _, costs = step.asks[0]
            for limit, cost, (_, _, reset) in zip(policy.limits, costs, decisions[0].views, strict=True):
                if cost and limit.algorithm == "fixed_window":
                    self.windows[limit.name].add((self.now + reset - limit.length, self.now + reset))
        return decisions


class ProcessClock:
    """A process's own idea of time: a steady clock that drifts, and a wall clock that anybody may set."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._start = simulation.now
        self._steady = simulation.random.randrange(10**12)
        self._drift = simulation.random.randrange(-400, 401)  # parts per million
        self.wall = 0

    def steady(self) -> int:
        passed = self._simulation.now - self._start
        return self._steady + passed + passed * self._drift // 1_000_000

    def ns(self) -> int:
        return (self._simulation.now + self.wall) * 1000


class Process:
    """One process with a leased store; until it is killed."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.clock = ProcessClock(simulation)
        inner = MemoryStore(clock=self.clock)  # never asked: `drive` asks the simulation's
        self.store = LeasedStore(inner, simulation.lease)
        self.desk = self.store.desk
        self.short = self.store.shortcut(simulation.policy, lambda _key, _cost: None)
        self.alive = True
        self._looked_after = 0

    def call(self, cost: int | tuple[int, ...]) -> None:
        """Call once, as `try_acquire` does."""
        if not self.alive:
            return
        policy = self.simulation.policy
        costs = tuple(o * cost for o in policy.one) if isinstance(cost, int) else cost
        decision = self.short("k", cost) if isinstance(cost, int) else None
        if decision is not None:
            self.told([decision], None, costs)
            return
        steps = self.desk.asking("acquire", [(policy, "k", costs)], None, None)
        self.drive(steps, lambda told, at: self.told(told, at, costs))

    def told(self, answer: list[Decision], at: int | None, costs: tuple[int, ...]) -> None:
        """Use what was allowed: now, or, where the store was asked for this call, when it said so."""
        simulation = self.simulation
        if answer[0].allowed:
            simulation.uses.append(Use(simulation.now if at is None else at, costs))
            simulation.local += at is None
        else:
            simulation.denied += 1

    def hoard(self, permits: int) -> None:
        """Take a share of any size, whatever the demand: soundness must not depend on how shares are sized."""
        book = self.desk.book(self.simulation.policy)
        holder = book.holder("k", self.clock.steady())
        if book.length and holder is not None and holder.asking <= self.clock.steady():
            costs = tuple(min(permits, limit.burst) for limit in book.strict.limits)
            holder.asking = self.clock.steady() + MAX_ASKING
            self.drive(self.desk.holding(book, holder, costs, self.clock.steady(), (0,) * len(costs)))

    def ambush(self, others: list[Process]) -> None:
        """Take shares, use them at the last moment, and let the others take all they can get: the worst there is.

        All they can get: at that moment, and when what was charged leaves the store again.
        """
        simulation = self.simulation
        length = self.desk.book(simulation.policy).length
        for _ in range(simulation.random.choice((1, 1, 2))):
            permits = simulation.random.choice((20, 100, 1000))
            simulation.after(simulation.random.randrange(length + 1), partial(self.hoard, permits))
        simulation.after(simulation.random.randrange(length + 1), lambda: self.use_up_late(others))
        simulation.after(length + 1, lambda: self.use_up_late(others))

    def use_up_late(self, others: list[Process]) -> None:
        """Use what is held just before it ends."""
        simulation, book = self.simulation, self.desk.book(self.simulation.policy)
        holder = book.holders.get("k")
        for share in (holder.share, holder.after) if holder is not None else ():
            late = share.ends - self.clock.steady() - 1
            if late < 0:
                continue
            simulation.after(late - late // 1000, lambda: self.use_up(others))  # should the clock be slow
            for limit in book.strict.limits:
                leaves = share.charged + limit.length - simulation.now
                for other in others:
                    simulation.after(max(0, leaves), other.drain)

    def use_up(self, others: list[Process]) -> None:
        holder = self.desk.book(self.simulation.policy).holders.get("k")
        for _ in range(holder.share.units + holder.after.units if holder is not None else 0):
            self.call(1)
        for other in others:
            other.drain()

    def drain(self) -> None:
        """Take whatever there is."""
        simulation, asked = self.simulation, self.desk.book(self.simulation.policy).strict
        (looked,) = simulation.store.apply("peek", [(asked, "k", (0,) * len(asked.limits))], simulation.now)
        unleased = simulation.mixed and simulation.random.random() < 0.7
        for cost in (looked.remaining, looked.remaining // 4, 2, 1, 1):
            (self.call_unleased if unleased else self.call)((cost,) * len(asked.limits))

    def call_unleased(self, costs: tuple[int, ...]) -> None:
        """Call as a process does that does not lease, by the limits as the user wrote them."""

        def steps() -> Any:
            return (yield StoreRequest("acquire", [(self.simulation.policy, "k", costs)]))

        self.drive(steps(), lambda told, at: self.told(told, at, costs))

    def reserve(self, costs: tuple[int, ...]) -> None:
        """Hold permits and give some of them back later, as a Reservation does."""
        simulation, policy = self.simulation, self.simulation.policy
        actual = tuple(simulation.random.randint(0, cost) for cost in costs)

        def settle(answer: list[Decision], at: int | None) -> None:
            if not answer[0].allowed or at is None:
                return
            simulation.uses.append(Use(at, actual))
            back = tuple(new - old for new, old in zip(actual, costs, strict=True))
            steps = self.desk.asking("adjust", [(policy, "k", back)], None, answer[0].at)
            simulation.after(simulation.random.randrange(MINUTE), lambda: self.drive(steps))

        self.drive(self.desk.asking("hold", [(policy, "k", costs)], None, None), settle)

    def drive(self, steps: Any, then: Callable[[Any, int | None], None] | None = None) -> None:
        """Carry the questions of some steps to the store and the answers back, as well as the network allows."""
        Conversation(self, steps, then).go(steps.send, None)

    def look_after(self) -> None:
        """Start the chores there are, sometimes late; come back when there may be more."""
        simulation = self.simulation
        if not self.alive:
            return
        while (chore := self.desk.chore()) is not None:
            if simulation.random.random() < 0.8:
                self.drive(chore)
            else:
                simulation.after(simulation.delay() * 20, partial(self.drive, chore))
        due = self.desk.due()
        if due is not None and due != self._looked_after:
            self._looked_after = due
            wait = max(1, due - self.clock.steady())
            simulation.after(wait + wait // 1000, self.look_after)

    def kill(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.desk.close()
        self.look_after()


class Conversation:
    """The steps of a call or chore, question by question, until they end; `then` is told the answer and its instant."""

    def __init__(self, process: Process, steps: Any, then: Callable[[Any, int | None], None] | None) -> None:
        self.process = process
        self.steps = steps
        self.then = then
        self.answered: int | None = None  # when the store gave its last answer
        self.question = 0

    def go(self, resume: Callable[[Any], Any], value: Any) -> None:
        """Let the steps go on to the next question."""
        if not self.process.alive:
            return
        try:
            step = resume(value)
        except StopIteration as done:
            if self.then is not None:
                self.then(done.value, self.answered)
        except StoreUnavailable:
            pass  # the call failed; nothing is used
        else:
            self.ask(step)
        self.process.look_after()

    def ask(self, step: Any) -> None:
        """Send a question; whether or not it arrives, after a while nobody waits for the answer any more."""
        simulation = self.process.simulation
        if not simulation.lose():
            simulation.after(simulation.delay(), partial(self.arrive, self.question, step))
        simulation.after(simulation.net.patience, partial(self.give_up, self.question))

    def arrive(self, question: int, step: Any) -> None:
        """Let the store decide, and send its answer."""
        simulation = self.process.simulation
        decisions = simulation.apply(step)
        if not simulation.lose():
            simulation.after(simulation.delay(), partial(self.hear, question, decisions, simulation.now))

    def hear(self, question: int, decisions: list[Decision], at: int) -> None:
        """Take the answer, if it is still waited for."""
        if question == self.question:
            self.question += 1
            self.answered = at
            self.go(self.steps.send, decisions)

    def give_up(self, question: int) -> None:
        """Wait no more."""
        if question == self.question:
            self.question += 1
            self.go(self.steps.throw, StoreUnavailable("no reply"))


def overspent(simulation: Simulation, limits: tuple[Limit, ...] | None = None) -> str | None:
    """Replay every use, in order of true time, by the limits as the user wrote them; tell where one says no.

    The window of a fixed_window opens when the store first charges it, so there the windows are the store's.
    """
    uses = sorted(simulation.uses)
    for i, limit in enumerate(limits or simulation.policy.limits):
        costs = [(use.time, use.costs[i]) for use in uses if use.costs[i]]
        if limit.algorithm == "fixed_window":
            found = _overspent_windows(limit, costs, simulation.windows[limit.name])
        else:
            found = _overspent(limit, costs)
        if found:
            return f"{limit}: {found}"
    return None


def _overspent(limit: Limit, costs: list[tuple[int, int]]) -> str | None:
    state = None
    for time, cost in costs:
        after = limit.charge(state, limit, cost, time)
        if after is None:
            return f"{cost} more at {time - START} us, with {limit.rules.view(state, limit, cost, time)}"
        state = after
    return None


def _overspent_windows(limit: Limit, costs: list[tuple[int, int]], windows: set[tuple[int, int]]) -> str | None:
    for start, end in windows:
        used = sum(cost for time, cost in costs if start <= time < end)
        if used > limit.quota:
            return f"{used} used in the window [{start - START}, {end - START})"
    outside = [time for time, _ in costs if not any(start <= time < end for start, end in windows)]
    return f"used at {outside[0] - START} us, in no window of the store" if outside else None


def random_policy(random: Random, algorithms: tuple[str, ...]) -> Policy:
    """Draw limits."""
    limits = []
    for i, algorithm in enumerate(algorithms):
        quota, period = random.choice((20, 50, 100, 300)), random.choice((2, 10))
        burst = random.choice((quota, max(20, quota // 3), quota * 2)) if algorithm == "token_bucket" else 0
        length = "minute" if algorithm == "calendar_window" else period
        limits.append(Limit(quota, length, algorithm, burst=burst, name=f"limit{i}"))
    return Policy("p", tuple(limits))


def random_simulation(seed: int, algorithms: tuple[str, ...], *, mixed: bool = False) -> Simulation:
    """Draw a policy, a network and some processes, let them live for a few periods, and give what came of it."""
    random = Random(f"{seed} {algorithms}")
    policy = random_policy(random, algorithms)
    lease = Lease(seconds=random.choice((None, 0.2, 1, 60)), spread=random.choice((1, 2, 4)))
    simulation = Simulation(policy, lease, random.choice(NETS), seed, mixed=mixed)
    lasts = max(min(limit.length, 10_000_000) for limit in policy.limits)
    everyone = [Process(simulation) for _ in range(random.randint(1, 4))]
    pause = lasts // 12

    def go_on() -> None:
        something_happens(simulation, everyone, pause)
        quiet = 10 if simulation.random.random() < 0.1 else 1
        simulation.after(quiet * simulation.random.randrange(1, 2 * pause), go_on)

    go_on()
    simulation.run(simulation.now + 3 * lasts)
    return simulation


def something_happens(simulation: Simulation, everyone: list[Process], pause: int) -> None:
    """Let one of the processes do something, or have something done to it."""
    random, limits = simulation.random, simulation.policy.limits
    which = random.randrange(len(everyone))
    process = everyone[which]

    def crash() -> None:
        process.kill()
        everyone[which] = Process(simulation)

    def set_the_clock() -> None:
        process.clock.wall += random.randrange(-(10**9), 10**9)

    def demand() -> None:
        for _ in range(random.randrange(5, 50)):
            simulation.after(random.randrange(pause), partial(process.call, 1))

    chances: dict[Callable[[], object], int] = {
        crash: 2,
        set_the_clock: 2,
        demand: 15,
        process.drain: 5,
        partial(process.reserve, tuple(random.randint(1, limit.quota // 4) for limit in limits)): 6,
        partial(process.hoard, random.choice((5, 20, 100, 1000))): 15,
        partial(process.ambush, list(everyone)): 35,
        partial(process.call, random.choice((1, tuple(random.randint(0, 5) for _ in limits)))): 20,
    }
    random.choices(list(chances), list(chances.values()))[0]()
