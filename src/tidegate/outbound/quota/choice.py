"""How a call is charged if it has several candidates (the members of a pool), or ceilings beyond its account.

Chooser.choose_flow     one step of the store charges the first candidate with room, all or nothing, in order of
                        preference; if none has room, the call waits for the first that will
candidates left out     members whose key is suspended, and members that were refused, until they may be asked
changed candidates      if the files change, or a key is rejected, while a call waits, `CandidatesChanged` ends its
                        wait; the gate finds its candidates again, and the call is queued by the time of its arrival
wait queues             FIFO, one for each set of accounts and ceilings: calls of a team whose ceiling is reached do
                        not hold up others
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.bounds import MAX_DURATION, SECOND
from tidegate.core.decision import join_decisions
from tidegate.errors import Denied
from tidegate.joint import soonest
from tidegate.limiter import seconds
from tidegate.observe import Record
from tidegate.outbound.quota.charge import CallLabel, Charge
from tidegate.outbound.quota.joint_charge import JointCharge
from tidegate.policy.key import normal_key
from tidegate.stores.base import Alternatives
from tidegate.waiting import Places, Sleep, Waiter, WaitQueues, wait_flow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.clock import Clock, Signal
    from tidegate.core import Decision
    from tidegate.flow import CallFlow
    from tidegate.limiter import AsyncLimiter, Limiter
    from tidegate.observe import Observer
    from tidegate.outbound.providers.provider import Provider
    from tidegate.outbound.quota.account import Account
    from tidegate.outbound.quota.cost import CallPlan
    from tidegate.outbound.quota.exchange import RequestOptions
    from tidegate.policy import Cost, Key
    from tidegate.stores import Store
    from tidegate.stores.base import Ask

AGEING = 5 * SECOND  # of waiting that counts as much as one step of priority, as in Limiter


class CallCeiling(NamedTuple):
    """A ceiling that a call is charged to: its limiter, the key, and the money that is reserved."""

    limiter: Limiter | AsyncLimiter
    key: Key
    money: int

    @property
    def cost(self) -> dict[str, int]:
        """The cost by unit."""
        return {self.limiter.policy.limits[0].unit: self.money}


class Candidate(NamedTuple):
    """An account that a call may be charged to, with what is reserved there, and the ceilings."""

    provider: Provider
    account: Account
    plan: CallPlan
    ceilings: tuple[CallCeiling, ...] = ()

    @property
    def model(self) -> str:
        """The model that the call asks for; empty: not known."""
        request = self.plan.request
        return "" if request is None else request.model or ""

    @property
    def plain(self) -> bool:
        """Whether its charge can be corrected even if it was made with `acquire` instead of `hold`."""
        return self.account.plain and all(c.limiter.policy.limits[0].rules.movable for c in self.ceilings)

    def repeated(self, times: int) -> Candidate:
        """Return a candidate for this many such calls at once."""
        cost = self.plan.cost
        many: Cost = {unit: each * times for unit, each in cost.items()} if isinstance(cost, Mapping) else cost * times
        ceilings = tuple(each._replace(money=each.money * times) for each in self.ceilings)
        return self._replace(plan=self.plan._replace(cost=many), ceilings=ceilings)

    def asks(self) -> list[Ask]:
        """Return what is asked of the store."""
        account, policy = self.account, self.account.limiter.policy
        found = [(policy, normal_key(account.key), policy.costs(self.plan.cost))]
        for ceiling in self.ceilings:
            policy = ceiling.limiter.policy
            found.append((policy, normal_key(ceiling.key), policy.costs(ceiling.cost)))
        return found

    def charge(self, decisions: Sequence[Decision]) -> Charge:
        """Return the charge that decisions have made."""
        charge = Charge(self.account.limiter, self.account.key, self.plan.cost, decisions[0])
        if not self.ceilings:
            return charge
        others = zip(self.ceilings, decisions[1:], strict=True)
        return JointCharge(charge, [Charge(c.limiter, c.key, c.cost, decision) for c, decision in others])

    def wait(self) -> int:
        """Return for how many microseconds its account gets no calls, because the provider refused one."""
        return self.account.store.frozen_for(self.account.provider.policy.name)


class CallCandidates(list[Candidate]):
    """The candidates of one call, the preferred one first.

    Each member is tried at most once in an attempt. `changes` is how often the provider files had changed when they
    were found, `failed` the members that could not send this call, `refused` those that refused it in this attempt, and
    `rejected` those whose accounts have responded to it with 401 or 403.
    """

    __slots__ = ("_found", "changes", "failed", "refused", "rejected")

    def __init__(self, found: list[Candidate], changes: int) -> None:
        """Start with the candidates that were found."""
        super().__init__(found)
        self._found = found
        self.changes: int = changes
        self.failed: tuple[str, ...] = ()
        self.refused: tuple[str, ...] = ()
        self.rejected: tuple[tuple[Candidate, int], ...] = ()  # with the status

    def drop(self, candidate: Candidate) -> None:
        """Do not try a member again for this call."""
        self.remove(candidate)
        self.failed += (candidate.provider.member,)

    def refuse(self, candidate: Candidate) -> None:
        """Do not try a member again in this attempt."""
        self.remove(candidate)
        self.refused += (candidate.provider.member,)

    def begin_attempt(self) -> None:
        """Try members again that have refused this call."""
        self.refused = ()
        self.renew(self._found, self.changes)

    def renew(self, found: list[Candidate], changes: int) -> None:
        """Replace them: the files have changed, or a key was suspended."""
        tried = {*self.failed, *self.refused}
        self[:] = [each for each in found if each.provider.member not in tried] or found
        self._found, self.changes = found, changes


class ChoiceQueues(WaitQueues):
    """The wait queues of choices. A queue is woken by permits of any of its accounts and ceilings."""

    def __init__(self) -> None:
        """Create empty queues."""
        super().__init__()
        self.keys: dict[Key, frozenset[Key]] = {}  # of each queue: what its calls wait for

    def wake(self, key: Key) -> None:
        """Wake the first waiter of each queue that waits for the key."""
        for queue, waited_for in tuple(self.keys.items()):
            if key in waited_for:
                super().wake(queue)


class CandidatesChanged(Exception):  # noqa: N818 - not an error: the call continues with other candidates
    """The candidates of a waiting call have changed."""


class Choice:
    """One call that chooses between candidates."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        apply: Callable[..., Any],
        observers: Sequence[Observer],
        check: Callable[[], bool] | None = None,
    ) -> None:
        """Choose between candidates, in order of preference; `apply` calls the store, awaited or not.

        `check` returns whether the candidates are still those of the files.
        """
        self._candidates = candidates
        self._apply = apply
        self._observers = observers
        self._check = check
        self.verb: str = "acquire" if all(candidate.plain for candidate in candidates) else "hold"
        self.chosen: tuple[Candidate, Charge] | None = None

    def ask_flow(self, verb: str, _: Sequence[int]) -> CallFlow[Decision]:
        """Ask, as a flow; the call stands in one queue for all candidates."""
        decision: Decision = yield partial(self.ask, verb)
        return decision

    def ask(self, verb: str) -> Any:  # noqa: ANN401 - a Decision, or an awaitable of one
        """Ask the store for the first candidate with room; raises CandidatesChanged."""
        if self._check is not None:
            suspended = [candidate.account.key_rejected for candidate in self._candidates]
            if (any(suspended) and not all(suspended)) or not self._check():
                raise CandidatesChanged
        ready: list[Candidate] = []
        waits: list[Decision] = []
        for candidate in self._candidates:
            candidate.account.recover()
            if candidate.wait():  # its own store denies this without asking
                policy, key, costs = candidate.asks()[0]
                waits.append(candidate.account.store.apply_one("peek", policy, key, costs))
            else:
                ready.append(candidate)
        if not ready:
            return soonest(waits)
        asks = Alternatives.of(candidate.asks() for candidate in ready)
        result = self._apply(verb, asks)
        finish = partial(self._finish, verb, ready, waits, asks)
        return _await_then(result, finish) if hasattr(result, "__await__") else finish(result)

    def _finish(
        self,
        verb: str,
        ready: list[Candidate],
        waits: list[Decision],
        asks: Alternatives,
        decisions: Sequence[Decision],
    ) -> Decision:
        for observer in self._observers:
            for (policy, key, costs), decision in zip(asks, decisions, strict=False):
                observer(Record(verb, policy, key, costs, decision))
        groups = asks.split(decisions)
        last = groups[-1]
        if all(decision.within_limits for decision in last):
            if verb != "peek":
                candidate = ready[len(groups) - 1]
                self.chosen = candidate, candidate.charge(last)
            return join_decisions(last)
        own = zip(ready, asks.split(tuple(asks)), groups, strict=False)
        return soonest([*waits, *(_denial_of(*each) for each in own)])


def _denial_of(candidate: Candidate, asks: Sequence[Ask], decisions: Sequence[Decision]) -> Decision:
    """Return why a candidate has no room; if only its reduced capacity is too small, until when."""
    first = candidate.account.store.with_retry_time(decisions[0], *asks[0])
    return join_decisions((first, *decisions[1:]))


async def _await_then(result: Any, finish: Callable[[Any], Decision]) -> Decision:  # noqa: ANN401 - an awaitable
    return finish(await result)


class Chooser:
    """Charges calls to the first of their candidates with room, and lets them wait. One for each gate."""

    def __init__(
        self,
        store: Store,
        apply: Callable[..., Any],
        wait: Callable[[Signal, int | None], Any],
        make_signal: Callable[[], Signal],
        observers: Sequence[Observer],
        check_at: Callable[[], int | None],
    ) -> None:
        """Use a store; `apply` calls it, and `wait` waits for a signal, awaited or not.

        `check_at` returns when the files are read next, by the monotonic clock; None: never.
        """
        self._check_at = check_at
        self._store = store
        self._clock: Clock = store.clock
        self._apply = apply
        self._wait = wait
        self._make_signal = make_signal
        self._observers = observers
        self._queues = ChoiceQueues()
        store.wait_queues.add(self._queues)

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._queues)

    def waiting_for(self, candidates: Sequence[Candidate]) -> int:
        """Return the number of calls that wait for the same accounts and ceilings."""
        return self._queues.waiting(find_queue(candidates)[1])

    def close(self) -> None:
        """Wake waiting calls with Closed."""
        self._queues.close()

    def wake_all(self) -> None:
        """Wake waiting calls: the files have changed."""
        self._queues.wake_all()

    def choose_flow(
        self,
        candidates: Sequence[Candidate],
        options: RequestOptions,
        timeout: float | None,
        began: int,
        check: Callable[[], bool],
    ) -> CallFlow[Any]:
        """Charge the first candidate with room, and return it with its charge; raises Denied after the timeout.

        `began` is when the call arrived; `check` as in Choice.
        """
        choice = Choice(candidates, self._apply, self._observers, check)
        waited_for, queue = find_queue(candidates)
        timeout = None if timeout is None else seconds("timeout", timeout)
        if queue not in self._queues:
            decision = yield partial(choice.ask, choice.verb)
            if choice.chosen is None and (decision.retry == NEVER or (timeout is not None and timeout <= 0)):
                raise denial(candidates, decision, timeout)
        if choice.chosen is None:
            rank = began - round(options.priority * AGEING)
            decision = yield from self._wait_flow(choice, candidates, queue, waited_for, rank, timeout)
        if choice.chosen is None:
            raise denial(candidates, decision, timeout)
        return choice.chosen

    def _wait_flow(
        self,
        choice: Choice,
        candidates: Sequence[Candidate],
        queue: tuple[str, ...],
        waited_for: frozenset[Key],
        rank: int,
        timeout: float | None,
    ) -> CallFlow[Any]:
        """Wait in the queue until a candidate has room, or until the deadline; returns the last decision."""
        steady = self._clock.steady
        deadline = None if timeout is None else steady() + round(timeout * SECOND)
        # As in Limiter: another process may return permits, and cannot wake this one.
        returned = any(each.account.settles for each in candidates)
        max_sleep = SECOND if returned and not self._store.instant else MAX_DURATION
        places, waiter = Places([[(self._queues, queue)]]), Waiter(rank, self._make_signal())
        self._queues.keys[queue] = waited_for
        flow = wait_flow(places, waiter, choice.verb, choice.ask_flow, deadline, max_sleep, steady)
        try:
            step = flow.send(None)
            while True:
                try:
                    value = yield self._to_call(step, candidates, is_first=bool(places.open_to(waiter)))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001 - the flow leaves its queue, and raises it again
                    step = flow.throw(error)
                else:
                    step = flow.send(value)
        except StopIteration as done:
            return done.value
        finally:
            flow.close()
            if queue not in self._queues:
                self._queues.keys.pop(queue, None)

    def _to_call(self, step: Any, candidates: Sequence[Candidate], *, is_first: bool) -> Callable[[], Any]:  # noqa: ANN401 - an Ask or a Sleep
        """Return the function that executes a step of the wait: a sleep also ends when a member recovers."""
        if not isinstance(step, Sleep):
            found: Callable[[], Any] = step
            return found
        dues = [due for each in candidates if (due := each.account.account_capacity.due()) is not None]
        check_at = self._check_at() if is_first else None
        if check_at is not None:  # the first waiter reads the files
            dues.append(max(check_at, self._clock.steady() + SECOND))
        until = min(dues, default=None) if step.until is None else min((step.until, *dues))
        return partial(self._wait, step.signal, until)


def find_queue(candidates: Sequence[Candidate]) -> tuple[frozenset[Key], tuple[str, ...]]:
    """Return the keys of the accounts and ceilings that a call waits for, and the name of their queue."""
    waited_for = frozenset(key for candidate in candidates for _, key, _ in candidate.asks())
    return waited_for, tuple(sorted(map(str, waited_for)))


def denial(candidates: Sequence[Candidate], decision: Decision, timeout: float | None) -> Denied:
    """Return the error of a call that no candidate had room for."""
    name, names = candidates[0].provider.name, ", ".join(decision.violated)
    if decision.retry == NEVER:
        message = f"the cost exceeds what {names} can ever allow"
    elif decision.retry:
        message = f"no permit within {timeout} s: {names} would allow it in {decision.retry_after} s"
    else:
        message = f"no permit within {timeout} s: other calls are ahead in the queue"
    members = f" (all {len(candidates)} members)" if len(candidates) > 1 else ""
    return Denied(f"provider {name}{members}: {message}", decision)


def label_of(candidate: Candidate, options: RequestOptions) -> CallLabel | None:
    """Return what the cost of a call is recorded under; None: the provider has no prices."""
    provider, request = candidate.provider, candidate.plan.request
    if provider.prices is None:
        return None
    model = (request.model if request is not None else options.model) or ""
    money = candidate.plan.money
    return CallLabel(provider.name, provider.member, model, options.team, options.tag, provider.prices.unit, money)
