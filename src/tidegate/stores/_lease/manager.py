"""The logic of the leased store, as flows (see `tidegate._runtime.flow`) that a thread, a task or a test runs.

A flow yields StoreRequests and receives a list of Decisions for each. Nothing here blocks. The lock is held only
between requests, in methods `with_token`; methods whose docstring says "Requires the lock." are called by those.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from tidegate.core._decision import VERBS, Decision
from tidegate.errors import StoreUnavailable
from tidegate.stores._base import Alternatives
from tidegate.stores._lease.alternatives import choose_flow
from tidegate.stores._lease.key_lease import LeaseState
from tidegate.stores._lease.policy_leases import PolicyLeases
from tidegate.stores._lease.share import NO_SHARE, LeasedShare
from tidegate.stores._lease.steps import DeferredCall, Renewal, StoreRequest, with_policy_limits
from tidegate.stores._lease.terms import share_lifetime
from tidegate.stores._merged_asks import merge
from tidegate.stores._token import Token, make_token, with_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tidegate._policy import Key, Policy
    from tidegate.stores._base import Ask
    from tidegate.stores._lease.key_lease import KeyLease
    from tidegate.stores._lease.policy_leases import Leftover
    from tidegate.stores._lease.share import Costs
    from tidegate.stores._lease.steps import LeaseFlow
    from tidegate.stores._lease.terms import Lease
    from tidegate.stores._merged_asks import MergedAsks
    from tidegate.stores._values import Write

SWEEP_PER_CALL: Final = 8  # due key leases that one call sweeps at most
SWEEP_PER_JOB: Final = 256  # due key leases of a policy that one background job sweeps at most


class LeaseManager:
    """Keeps shares of keys and decides from them; requests more shares, and returns unused permits.

    It uses only the steady clock of this process. A lease starts when its request is *sent*, so a late reply only
    makes it shorter. Work that no caller has to wait for is appended to `jobs`.
    """

    def __init__(
        self, lease: Lease, steady: Callable[[], int], lost: Callable[[], bool] | None = None, *, alternatives: bool
    ) -> None:
        """Start without shares. `lost` returns whether the store is unavailable and a fallback decides instead.

        `alternatives` says whether the store accepts Alternatives.
        """
        self.lease = lease
        self.steady = steady
        self.store_lost: Callable[[], bool] = lost or bool  # never
        self.guarded: bool = lost is not None
        self.alternatives = alternatives
        self.token: Token = make_token()
        self.by_policy: dict[str, PolicyLeases] = {}
        self.jobs: deque[Renewal | DeferredCall | Leftover] = deque()
        self.totals: Counter[str] = Counter()

    # ---- the verbs ---------------------------------------------------------------------------------------------------

    def apply_flow(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> LeaseFlow:
        """Apply a verb, as `Store.apply` does."""
        if isinstance(asks, Alternatives):
            return choose_flow(self, verb, asks, now, at)
        if len(asks) == 1:
            return self.apply_together_flow(verb, asks, now, at)
        return self.apply_merged_flow(merge(asks), verb, now, at)

    def write_flow(
        self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None, writes: Sequence[Write]
    ) -> LeaseFlow:
        """Apply a verb and write values: permits come from the store, not from a share, in the step that writes."""
        yield from self.release_flow(verb, asks)
        strict = [(self.find_policy_leases(policy).strict, key, costs) for policy, key, costs in asks]
        sent = asks.replace(strict) if isinstance(asks, Alternatives) else strict
        decisions = yield StoreRequest(verb, sent, now, at, writes=writes)
        return [with_policy_limits(policy, found) for (policy, _, _), found in zip(asks, decisions, strict=False)]

    def apply_merged_flow(self, merged: MergedAsks, verb: str, now: int | None, at: int | None) -> LeaseFlow:
        """Apply a verb to several asks: policies of one name are combined before their limits are made stricter."""
        return merged.split((yield from self.apply_together_flow(verb, merged.asks, now, at)))

    def apply_together_flow(self, verb: str, asks: Sequence[Ask], now: int | None, at: int | None) -> LeaseFlow:
        """Apply a verb to asks that are decided together."""
        traits = VERBS[verb]
        if len(asks) == 1:
            policy, key, costs = asks[0]
            leases = self.find_policy_leases(policy)
            if leases.length and now is None and any(costs):
                if traits.marks:
                    return [(yield from self.exact_flow(verb, leases, key, costs))]
                if traits.charges:
                    return [(yield from self.acquire_flow(leases, key, costs))]
                if not traits.changes and (seen := self.peek_locally(leases, key, costs)) is not None:
                    return [seen]
        if not (traits.corrects and at is not None):  # a correction of the store's own charge concerns no share
            try:
                yield from self.release_flow(verb, asks)
            except CancelledError:
                if not traits.asks:
                    self.jobs.append(DeferredCall(verb, asks, now, at))
                raise
        elif len(asks) == 1:
            self.forget_denial(self.find_policy_leases(asks[0][0]), asks[0][1])
        strict_asks = [(self.find_policy_leases(policy).strict, key, costs) for policy, key, costs in asks]
        decisions = yield StoreRequest(verb, strict_asks, now, at)
        return [with_policy_limits(policy, decision) for (policy, _, _), decision in zip(asks, decisions, strict=True)]

    @with_token
    def decide_held(self, verb: str, asks: Sequence[Ask], given: int | None) -> Decision | None:
        """Decide one ask from the share or the cached denial of its key; None if the store has to be asked."""
        traits = VERBS[verb]
        if len(asks) != 1 or not traits.charges or traits.marks or given is not None:
            return None
        policy, key, costs = asks[0]
        leases, now = self.by_policy.get(policy.name), self.steady()
        if leases is None or leases.policy != policy or not any(costs):
            return None
        self.sweep(leases, now, SWEEP_PER_CALL)
        key_lease = leases.key_leases.get(key)
        return None if key_lease is None else self.decide_locally(leases, key_lease, costs, now)

    def may_hold(self, asks: Sequence[Ask]) -> bool:
        """Return whether a share or a cached denial may decide an alternative."""
        policy, key, _ = asks[0]
        leases = self.by_policy.get(policy.name)
        key_lease = None if leases is None or len(asks) > 1 else leases.key_leases.get(key)
        return key_lease is not None and (key_lease.share is not NO_SHARE or key_lease.denial is not None)

    def acquire_flow(self, leases: PolicyLeases, key: Key, costs: Costs) -> LeaseFlow:
        """Acquire permits for a call: from the share, or from the store together with a new share."""
        begun = self.begin_acquire(leases, key, costs)
        if isinstance(begun, Decision):
            return begun
        key_lease, amounts, now = begun
        if key_lease is not None and len(amounts) > 1:
            result = None
            try:
                result = yield from self.fetch_flow(leases, key_lease, amounts, now, costs)
            except StoreUnavailable:
                if not self.guarded:
                    raise
            if result is not None:
                return result
        return (yield from self.exact_flow("acquire", leases, key, costs))

    @with_token
    def begin_acquire(
        self, leases: PolicyLeases, key: Key, costs: Costs
    ) -> Decision | tuple[KeyLease | None, list[Costs], int]:
        """Decide a call locally, or return the key lease, the amounts to request from the store, and the time."""
        now = self.steady()
        self.sweep(leases, now, SWEEP_PER_CALL)
        key_lease = leases.find_or_add(key, now)
        amounts = [costs]
        if key_lease is not None:  # None: the policy has `max_keys` key leases already
            result = self.decide_locally(leases, key_lease, costs, now)
            if result is not None:
                return result
            if key_lease.is_pending(now):
                key_lease.add_missed(costs)
            elif not self.store_lost():
                amounts = key_lease.plan_request(costs, now, leases.strict, leases.length, self.lease.spread)
                if len(amounts) > 1:
                    key_lease.request(now, leases.length)
                else:
                    key_lease.gather(now, leases.length)
            key_lease.last_call = now
        return key_lease, amounts, now

    def decide_locally(self, leases: PolicyLeases, key_lease: KeyLease, costs: Costs, now: int) -> Decision | None:
        """Decide from the share or the denial of a key; None if these do not suffice. Requires the lock."""
        self.schedule_returns(leases.retire(key_lease.key, key_lease.advance(now)))
        share, denial, limits = key_lease.share, key_lease.denial, leases.policy.limits
        if now < share.ends and share.take(costs):
            if share.units <= share.renew_below or now >= share.renew_at:
                self.schedule_renewal(leases, key_lease, now)
            return share.decision(limits, now)
        if denial is None:
            return None
        if now >= denial.until:
            if self.store_lost() or not denial.gathers:
                key_lease.lapse()
            elif key_lease.is_pending(now):
                key_lease.gather(now, leases.length)
        return denial.decide(costs, now, limits)

    def fetch_flow(
        self, leases: PolicyLeases, key_lease: KeyLease, amounts: list[Costs], sent: int, costs: Costs
    ) -> LeaseFlow:
        """Request a share, the first of these amounts that the store has, and take the permits of a call from it.

        Returns None if the call has to ask the store for its own cost.
        """
        if not self.alternatives:
            amounts = amounts[:1]
        asks: Sequence[Ask] = [(leases.strict, key_lease.key, amount) for amount in amounts]
        asks = asks if len(asks) == 1 else Alternatives.of([ask] for ask in asks)
        try:
            decisions = yield StoreRequest("hold", asks, share=True)
        except CancelledError:  # the store refunds the charge
            self.end_request(key_lease)
            raise
        except BaseException:
            self.count_lost(leases, key_lease, amounts[0])
            raise
        return self.receive(leases, key_lease, amounts[len(decisions) - 1], sent, costs, decisions[-1])

    @with_token
    def end_request(self, key_lease: KeyLease) -> None:
        """Allow the next call of a key to request a share."""
        key_lease.end_request()

    @with_token
    def count_lost(self, leases: PolicyLeases, key_lease: KeyLease, amount: Costs) -> None:
        """Count a share as lost: whether the store charged it is unknown."""
        key_lease.end_request()
        leases.count("granted", amount)

    @with_token
    def receive(
        self, leases: PolicyLeases, key_lease: KeyLease, amount: Costs, sent: int, costs: Costs, decision: Decision
    ) -> Decision | None:
        """Use a granted share, after taking the permits of a call from it; None if the call has to ask by itself."""
        received = self.steady()
        self.read_reply(leases, key_lease, amount, decision, received)
        if not decision.within_limits:
            if key_lease.denial is not None:
                key_lease.deny()
            key_lease.end_request()
            final = amount == costs and key_lease.share is NO_SHARE
            return as_denied_in_memory(leases, key_lease, costs, decision, received) if final else None
        leases.count("granted", amount)
        lifetime = share_lifetime(leases.strict.limits, amount, decision.views, leases.length)
        share = LeasedShare(leases.policy.one, amount, decision, sent, received, lifetime)
        share.take(costs)
        result = share.decision(leases.policy.limits, received)
        if key_lease.state is LeaseState.DROPPED:
            leases.count("used", share.used)  # reset, before the charge or after it, so nothing may be returned
        elif leases.closed:
            self.schedule_returns(leases.retire(key_lease.key, [share]))
        else:
            self.schedule_returns(leases.retire(key_lease.key, key_lease.install(share, received)))
        key_lease.notify()  # the calls that wait need the lock to continue
        return result

    def read_reply(
        self, leases: PolicyLeases, key_lease: KeyLease, costs: Costs, decision: Decision, received: int
    ) -> None:
        """Remember what a decision of the store says about later calls. Requires the lock."""
        one, spread = leases.policy.one, self.lease.spread
        key_lease.read_reply(leases.strict, one, costs, decision, received, leases.length, spread)

    def exact_flow(self, verb: str, leases: PolicyLeases, key: Key, costs: Costs) -> LeaseFlow:
        """Ask the store for exactly these costs. A denial is final only if this process holds no permits of the key."""
        while True:
            (decision,) = yield StoreRequest(verb, [(leases.strict, key, costs)])
            result = self.record(leases, key, costs, decision)
            if isinstance(result, Decision):
                # A hold asks the store each time, so it may be retried when the store says.
                return with_policy_limits(leases.policy, decision) if VERBS[verb].marks else result
            yield from result

    @with_token
    def record(
        self, leases: PolicyLeases, key: Key, costs: Costs, decision: Decision, *, add: bool = False
    ) -> Decision | LeaseFlow:
        """Record a decision of the store and return it; if it denies, and there is a share, return a flow instead.

        This flow returns the share to the store; then the call has to ask again. With `add`, the key gets a lease.
        """
        received = self.steady()
        key_lease = leases.find_or_add(key, received) if add else leases.key_leases.get(key)
        if key_lease is None or self.store_lost():
            return with_policy_limits(leases.policy, decision)
        if not decision.within_limits:
            leftovers = leases.retire(key, key_lease.release_share())
            if leftovers:
                return self.return_flow(leftovers)
        self.read_reply(leases, key_lease, costs, decision, received)
        if key_lease.denial is not None:
            key_lease.deny()
        return as_denied_in_memory(leases, key_lease, costs, decision, received)

    @with_token
    def peek_locally(self, leases: PolicyLeases, key: Key, costs: Costs) -> Decision | None:
        """Decide a peek from a share that has enough permits; None if none has."""
        key_lease, now = leases.key_leases.get(key), self.steady()
        if key_lease is None:
            return None
        share, denial = key_lease.share, key_lease.denial
        if now < share.ends and (left := share.remaining_after(costs)) is not None:
            return share.decision(leases.policy.limits, now, left)
        return None if denial is None else denial.decide(costs, now, leases.policy.limits)

    def release_flow(self, verb: str, asks: Sequence[Ask]) -> LeaseFlow:
        """Return the shares of the keys before the store is asked about them; a reset discards them."""
        keys = [(self.find_policy_leases(policy), key) for policy, key, _ in asks]
        yield from self.release(keys, forget=VERBS[verb].clears)

    @with_token
    def release(self, keys: list[tuple[PolicyLeases, Key]], *, forget: bool) -> LeaseFlow:
        """Remove the shares of keys; returns a flow that returns them to the store, unless `forget` is set."""
        leftovers: list[Leftover] = []
        for leases, key in keys:
            key_lease = leases.key_leases.get(key)
            if key_lease is not None:
                left = leases.retire(key, key_lease.release_share())
                if forget:
                    key_lease.drop()
                    del leases.key_leases[key]
                else:
                    leftovers += left
        return self.return_flow(leftovers)

    @with_token
    def forget_denial(self, leases: PolicyLeases, key: Key) -> None:
        """Discard the denial of a key: permits may have been refunded."""
        key_lease = leases.key_leases.get(key)
        if key_lease is not None:
            key_lease.lapse()

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def schedule_renewal(self, leases: PolicyLeases, key_lease: KeyLease, now: int) -> None:
        """Schedule a request for the share that follows the current one. Requires the lock."""
        key_lease.share.renew_no_more()  # scheduled once
        if key_lease.state is LeaseState.HOLDING:
            key_lease.request(now, leases.length)
            self.jobs.append(Renewal(leases, key_lease))

    def renew_flow(self, leases: PolicyLeases, key_lease: KeyLease) -> LeaseFlow:
        """Request the next share before it is needed."""
        amounts, sent = self.plan_renewal(leases, key_lease)
        if amounts:
            yield from self.fetch_flow(leases, key_lease, amounts, sent, (0,) * len(amounts[0]))

    def request_shares(self, asks: Sequence[Ask], notify: Callable[[], None]) -> tuple[int, int]:
        """Schedule a request for a share of each key that has no permits left, and recently had a call.

        Returns how many requests are pending, each of which calls `notify` when it has ended, and how long to wait.
        """
        if self.store_lost():
            return 0, 0
        return self.schedule_requests([(self.find_policy_leases(ask[0]), *ask[1:]) for ask in asks], notify)

    @with_token
    def schedule_requests(
        self, asks: list[tuple[PolicyLeases, Key, Costs]], notify: Callable[[], None]
    ) -> tuple[int, int]:
        """Do what `request_shares` does."""
        now, pending, until = self.steady(), 0, 0
        for leases, key, costs in asks:
            key_lease = leases.find_or_add(key, now) if leases.length else None
            if key_lease is None:
                continue
            known = key_lease.called_recently(now, leases.length)
            key_lease.last_call = now
            if not known and key_lease.share is NO_SHARE:
                continue  # the first call of a key: a share might not be used
            denial = key_lease.denial
            if denial is not None and now < denial.until:
                continue
            key_lease.add_missed(costs)
            if not key_lease.is_pending(now):
                key_lease.request(now, leases.length)
                self.jobs.append(Renewal(leases, key_lease))
            pending, until = pending + 1, max(until, key_lease.wait_for_request(notify))
        return pending, until

    @with_token
    def plan_renewal(self, leases: PolicyLeases, key_lease: KeyLease) -> tuple[list[Costs], int]:
        """Return the amounts to request for the next share, none if no share is needed, and the current time."""
        sent, nothing = self.steady(), (0,) * len(leases.policy.limits)
        amounts: list[Costs] = []
        if not (leases.closed or key_lease.state is LeaseState.DROPPED or self.store_lost()):
            planned = key_lease.plan_request(nothing, sent, leases.strict, leases.length, self.lease.spread)
            amounts = [amount for amount in planned if any(amount)]
        if not amounts:
            key_lease.end_request()
        return amounts, sent

    def schedule_returns(self, leftovers: Iterable[Leftover]) -> None:
        """Schedule leftovers to be returned. Requires the lock."""
        self.jobs.extend(leftovers)

    def return_flow(self, leftovers: Iterable[Leftover]) -> LeaseFlow:
        """Return unused permits of shares, as corrections at the time of their charge."""
        rest = deque(leftovers)
        while rest:
            leases, key, share = rest.popleft()
            left = share.left
            try:
                yield StoreRequest(
                    "adjust", [(leases.strict, key, tuple(-permits for permits in left))], None, share.charged
                )
            except CancelledError:  # the store completes a correction that was started
                self.count(leases, "returned", left)
                self.postpone_returns(rest)
                raise
            except Exception:
                self.postpone_returns(rest)
                raise
            self.count(leases, "returned", left)

    @with_token
    def postpone_returns(self, leftovers: Iterable[Leftover]) -> None:
        """Schedule leftovers to be returned later."""
        self.schedule_returns(leftovers)

    @with_token
    def count(self, leases: PolicyLeases, outcome: str, permits: Costs) -> None:
        """Count permits by outcome."""
        leases.count(outcome, permits)

    def sweep(self, leases: PolicyLeases, now: int, max_count: int) -> None:
        """Sweep key leases of a policy that are due. Requires the lock."""
        if leases.due and leases.due[0][0] <= now:
            self.schedule_returns(leases.sweep(now, max_count))

    @with_token
    def next_job(self) -> LeaseFlow | None:
        """Return the flow of the next job, or None."""
        now = self.steady()
        for leases in self.by_policy.values():
            self.sweep(leases, now, SWEEP_PER_JOB)
        if not self.jobs:
            return None
        job = self.jobs.popleft()
        if isinstance(job, Renewal):
            return self.renew_flow(*job)
        return self.apply_flow(*job) if isinstance(job, DeferredCall) else self.return_flow([job])

    @with_token
    def next_due(self) -> int | None:
        """Return the steady time at which the next key lease is due, or None."""
        return min((leases.due[0][0] for leases in self.by_policy.values() if leases.due), default=None)

    # ---- policies ----------------------------------------------------------------------------------------------------

    def find_policy_leases(self, policy: Policy) -> PolicyLeases:
        """Return the leases of a policy; shares of an earlier policy of the same name are returned to the store."""
        leases = self.by_policy.get(policy.name)
        if leases is None or (leases.policy is not policy and leases.policy != policy):
            leases = self.add_policy(policy)
        return leases

    @with_token
    def add_policy(self, policy: Policy) -> PolicyLeases:
        """Add a policy, replacing an earlier one of the same name."""
        # A GuardedStore that decides locally during an outage keeps local shares for these policies itself.
        local = self.guarded and policy.on_store_error == "local"
        leases = PolicyLeases(policy, None if local else self.lease, self.totals)
        before = self.by_policy.get(policy.name)
        if before is not None:
            self.schedule_returns(before.release_all())
        self.by_policy[policy.name] = leases
        return leases

    @with_token
    def return_all(self) -> None:
        """Schedule all shares to be returned."""
        for leases in self.by_policy.values():
            for key_lease in leases.key_leases.values():
                self.schedule_returns(leases.retire(key_lease.key, key_lease.release_share()))

    @with_token
    def close(self) -> None:
        """Schedule all shares to be returned, and keep none from now on."""
        for leases in self.by_policy.values():
            self.schedule_returns(leases.release_all())

    @with_token
    def discard_all(self) -> None:
        """Discard everything, in a forked child: the shares belong to the parent."""
        self.jobs.clear()
        self.totals.clear()
        for leases in self.by_policy.values():
            leases.clear()

    def metrics(self) -> dict[str, int]:
        """Return permits by outcome and unit, and the number of key leases."""
        totals, units = self.count_permits()
        for unit in sorted(units):
            known = ("granted", "used", "returned", "outstanding")
            granted, *kept = (totals[f"lease_{what}_{unit}"] for what in known)
            totals.update({f"lease_{what}_{unit}": 0 for what in known})
            totals[f"lease_lost_{unit}"] = max(0, granted - sum(kept))
        return dict(totals)

    @with_token
    def count_permits(self) -> tuple[Counter[str], set[str]]:
        """Return the totals, including shares still held, and the units that occur."""
        totals = Counter({"lease_keys": sum(len(leases.key_leases) for leases in self.by_policy.values())})
        totals.update(self.totals)
        units: set[str] = set()
        for leases in self.by_policy.values():
            if leases.length:
                units.update(leases.units)
                leases.count_held(totals)
        for job in self.jobs:
            if not isinstance(job, Renewal | DeferredCall):
                leases, _, share = job
                leases.count("outstanding", share.left, totals)
        return totals, units


def as_denied_in_memory(
    leases: PolicyLeases, key_lease: KeyLease, costs: Costs, decision: Decision, now: int
) -> Decision:
    """Return a decision of the store; a denial as it is repeated in memory, which may tell callers to retry later."""
    denied = None
    if not decision.within_limits and key_lease.denial is not None:
        denied = key_lease.denial.decide(costs, now, leases.policy.limits)
    return with_policy_limits(leases.policy, decision) if denied is None else denied
