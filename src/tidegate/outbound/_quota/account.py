"""An Account: one quota at a provider, how much of it may be used now, and what was learned from its responses.

**When a permit counts.** See `arrival`: no window of the provider exceeds its limit, whatever the network delays.

**Refusals.** See `account_capacity`.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.reservation import ReservedCharge, charged_at
from tidegate._limiter.waiting import Places
from tidegate._policy import Policy
from tidegate._policy.units import is_money
from tidegate._runtime.flow import complete_flow
from tidegate._runtime.fork import fork_safe
from tidegate.adaptive import RecoverySettings
from tidegate.adaptive._gated_store import deny_paused
from tidegate.core._bounds import MAX_INTEGER, SECOND, ceil_div
from tidegate.errors import StoreUnavailable
from tidegate.outbound._capacity.account_capacity import AccountCapacity
from tidegate.outbound._capacity.learned_quotas import LearnedQuotas, with_quota
from tidegate.outbound._capacity.learning import LimitCorrection, ProviderCharge, ProviderCharges, find_corrections
from tidegate.outbound._capacity.shared_notices import SharedNotices
from tidegate.outbound._providers.profile import TOKEN_UNITS
from tidegate.outbound._providers.provider import CONCURRENCY_UNIT, REQUESTS_UNIT
from tidegate.outbound._quota.arrival import ArrivalDelays
from tidegate.outbound._quota.charge import Charge
from tidegate.outbound._quota.key_trouble import KeyTrouble
from tidegate.outbound._quota.request_tokens import largest_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tidegate._limiter.limiter import AsyncLimiter, Limiter
    from tidegate._policy import Cost, Key
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import CallFlow
    from tidegate.core import Decision, Limit
    from tidegate.headers import Advice
    from tidegate.outbound._capacity.account_capacity import CurrentCapacity
    from tidegate.outbound._capacity.shared_capacity import SharedCapacity
    from tidegate.outbound._capacity.shared_notices import StoreCalls
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.gate_call import Candidate
    from tidegate.outbound._quota.request_tokens import RequestTokens
    from tidegate.stores import Store

RECOVERY_STEP_PERIODS: Final = 4  # periods between two recovery steps
SMALL_QUOTA_PERIODS: Final = (
    200  # a small quota recovers more slowly: a step too far costs a refusal, which should stay rare
)
IDLE_AFTER: Final = 600 * SECOND
MAX_RECOVERY_STEP: Final = 900 * SECOND
MAX_REFUSED_CHARGES: Final = 1_000  # that are subtracted from what the provider has let through


def recovery_settings(provider: Provider) -> RecoverySettings:
    """Return how the capacity of a provider recovers."""
    limit = provider.limits[narrowest_index(provider.limits)]
    interval = limit.length * max(RECOVERY_STEP_PERIODS, ceil_div(SMALL_QUOTA_PERIODS, limit.quota))
    return RecoverySettings(Fraction(1, 2), Fraction(21, 20), min(interval, max(MAX_RECOVERY_STEP, limit.length)))


def narrowest_index(limits: tuple[Limit, ...]) -> int:
    """Return the index of the limit that a refusal most likely concerns: the shortest that counts requests.

    A limit that counts slots or money is chosen only if there is no other.
    """

    def rank(limit: Limit) -> tuple[bool, bool, bool, int]:
        return limit.unit != REQUESTS_UNIT, is_money(limit.unit), limit.unit == CONCURRENCY_UNIT, limit.length

    return min(range(len(limits)), key=lambda index: rank(limits[index]))


class Account:
    """One quota: its own limiter, whose capacity follows the responses of the provider."""

    def __init__(
        self,
        provider: Provider,
        key: Key,
        resource: str,
        store: Store,
        shared_capacity: SharedCapacity,
        limiter: Limiter | AsyncLimiter,
        calls: StoreCalls,
    ) -> None:
        """Share a store with other accounts."""
        self.key = key
        self.resource = resource
        self.store = store
        self.clock: Clock = store.clock
        self._paused_until = 0
        self._calls = calls
        self._apply = calls.apply
        self._lock = fork_safe(threading.RLock())
        self.last_used: int = self.clock.steady()  # when it was last used
        self.refused: int = 0  # responses with status 429 or 503
        self.spent: int = 0  # what its calls cost, in micros, in this process
        self.warned_unsettled: bool = False  # that a permit with a slot was never settled
        self._key_trouble = KeyTrouble()
        self._refused_charges: deque[tuple[int, int]] = deque(maxlen=MAX_REFUSED_CHARGES)  # when charged, and how much
        self._provider_charges = ProviderCharges()
        self.configured: Provider = provider  # as its file says; `provider` has the quotas that were learned
        self._learned = LearnedQuotas(provider.limits)
        self._set_provider(provider)
        self.delays: ArrivalDelays = ArrivalDelays(provider.limits, self._narrowest, self.clock, self.refresh)
        self.limiter: Any = limiter
        self.places: Places = Places((((limiter.queues, key),),))  # where its calls wait
        self.account_capacity: AccountCapacity = AccountCapacity(
            resource, self._narrowest, shared_capacity, self._make_notices, self.clock, self.refresh
        )
        self.account_capacity.register()
        self.refresh()

    def paused_for(self) -> int:
        """Return for how many microseconds nothing is sent, because the provider refused a call."""
        return max(0, self._paused_until - self.clock.steady()) if self._paused_until else 0

    def is_paused(self) -> bool:
        """Return whether nothing is sent now, after a recovery step that is due."""
        due = self.account_capacity.due()
        if due is not None and self.clock.steady() >= due:
            self.refresh()
        return self._paused_until > 0 and self.paused_for() > 0

    def deny_paused(self, cost: Cost) -> Decision:
        """Return the decision on a call while nothing is sent."""
        policy = self.limiter.policy
        return deny_paused(policy, policy.costs(cost), self.paused_for(), self.clock.ns() // 1000)

    def recovery_wait(self, cost: Cost) -> int | None:
        """Return when a cost that is too large for the reduced capacity may fit, in microseconds; None: never."""
        due = self.account_capacity.due()
        if due is None or not self.can_fit_costs(self.provider.policy.costs(cost)):
            return None
        return max(1, due - self.clock.steady())

    def can_fit_costs(self, costs: Sequence[int]) -> bool:
        """Return whether the costs at each limit can ever be allowed."""
        return all(cost <= limit.burst for limit, cost in zip(self.provider.limits, costs, strict=True))

    def _make_notices(self, length: int) -> SharedNotices:
        names = tuple(limit.name for limit in self.configured.limits)
        return SharedNotices(self.configured.domain, self.key, self._calls, length, names)

    def _set_provider(self, provider: Provider) -> None:
        self.provider = provider
        limits = provider.limits
        self._index = narrowest_index(limits)
        self._narrowest = limits[self._index]
        estimated = TOKEN_UNITS if provider.prices is None else (*TOKEN_UNITS, provider.prices.unit)
        self.holds_slots: bool = any(limit.rules.holds_slots for limit in limits)
        counts_tokens = any(limit.unit in TOKEN_UNITS for limit in limits)
        self.settles: bool = provider.prices is not None or self.holds_slots or counts_tokens
        # The reservation of a plain account's charge is created only if it is corrected.
        self.plain: bool = all(limit.rules.movable for limit in limits)
        self.units: frozenset[str] = frozenset(limit.unit for limit in limits)
        self.limits_money: bool = provider.prices is not None and (
            bool(provider.ceilings) or provider.prices.unit in self.units
        )
        self.estimated: tuple[str, ...] = tuple(unit for unit in estimated if unit in self.units)
        # the most that can ever be allowed, by unit
        self.bursts: dict[str, int] = {
            unit: min(limit.burst for limit in limits if limit.unit == unit) for unit in self.units
        }
        self.fixed_cost: Cost | None = self._compute_fixed_cost()
        self.same_call: Candidate | None = None  # see `CallPlanner.candidates`
        self._unbounded = self._without_maximum(limits)

    def _without_maximum(self, limits: tuple[Limit, ...]) -> Policy:
        """Return the same limits without a maximum, for charges that must be made whether they fit or not."""
        unbounded = [replace(each, quota=MAX_INTEGER, burst=0) if each.rules.movable else each for each in limits]
        return Policy(self.provider.policy.name, tuple(unbounded), "enforce", self.provider.policy.on_store_error)

    def _compute_fixed_cost(self) -> Cost | None:
        """Return the cost of every request; None: it depends on the request."""
        policy, cost = self.provider.policy, self.fit(self.provider.cost(None))
        if self.provider.endpoints or self.estimated or self.provider.prices is not None:
            return None
        return 1 if policy.counted and policy.costs(cost) == policy.one else cost

    def update_provider(self, provider: Provider) -> None:
        """Apply a changed provider file."""
        with self._lock:
            before, self.configured = self.configured, provider
            if provider.limits != before.limits:
                self._learned = LearnedQuotas(provider.limits)
                self._provider_charges.clear()
                self.account_capacity.open_notices()
            self._apply_provider()

    def _apply_provider(self) -> None:
        """Apply the provider file, with the quotas that were learned."""
        limits = self.provider.limits
        self._set_provider(self._narrowed(self.configured))
        if self.provider.limits != limits:
            self.delays = ArrivalDelays(
                self.provider.limits, self._narrowest, self.clock, self.refresh, self.delays.in_flight
            )
        self.account_capacity.set_limit(self._narrowest)
        self.limiter.update(self.provider.policy)
        self.refresh()

    def _narrowed(self, provider: Provider) -> Provider:
        """Return the provider with the quotas that were learned; each endpoint must still fit."""
        if not any(self._learned.quotas):
            return provider
        costs = [provider.policy.costs(provider.cost(endpoint)) for endpoint in provider.endpoints]
        minimum = [max(each) for each in zip(*costs, strict=True)] or [1] * len(provider.limits)
        return replace(provider, limits=self._learned.apply(provider.limits, minimum))

    def refresh(self) -> None:
        """Apply the current capacity; of two threads, the second reads it after the first has finished."""
        with self._lock:
            current = self.account_capacity.current()
            if current is not None:
                self._apply_capacity(current)

    def _apply_capacity(self, current: CurrentCapacity) -> None:
        self._paused_until = current.frozen_until
        limits = self.delays.stretched()
        self._unbounded_stretched = self._without_maximum(tuple(limits))
        if current.quota < self._narrowest.quota:
            minimum = max((costs[self._index] for costs in self._costs()), default=1)  # each endpoint must still fit
            limits[self._index] = with_quota(limits[self._index], max(current.quota, minimum))
        if self.limiter.policy.limits != tuple(limits):
            self.limiter.update(replace(self.provider.policy, limits=tuple(limits)))

    @property
    def key_rejected(self) -> bool:
        """Whether the key is suspended, because the provider rejected it; a changed file ends this."""
        return self._key_trouble.is_suspended(self.configured, self.clock.steady())

    @property
    def key_accepted(self) -> bool:
        """Whether the provider has accepted the key lately."""
        return self._key_trouble.was_accepted(self.configured, self.clock.steady())

    def is_key_doubted(self, model: str) -> bool:
        """Return whether other members are preferred for a model."""
        return self._key_trouble.is_doubted(self.configured, model, self.clock.steady())

    def doubt_key(self, model: str) -> bool:
        """Prefer other members for a model for a while, unless the key was accepted for it lately.

        Returns whether that begins now.
        """
        return self._key_trouble.doubt(self.configured, model, self.clock.steady())

    def suspend_key(self) -> int:
        """Record a 401 for a call that another key could send; returns the microseconds of pause.

        0: it was suspended already, or the key was accepted lately.
        """
        return self._key_trouble.suspend(self.configured, self.clock.steady())

    def accept_key(self, model: str) -> None:
        """Record that the provider has accepted the key, for a call of a model."""
        self._key_trouble.accept(self.configured, model, self.clock.steady())

    def idle(self) -> bool:
        """Return whether it can be dropped without loss: nothing is in flight, reduced or recently used."""
        now = self.clock.steady()
        idle_after = max(
            IDLE_AFTER, 2 * max(limit.length for limit in self.provider.limits)
        )  # includes leases of slots
        if now - self.last_used < idle_after or self.limiter.waiting or self.delays.busy:
            return False
        return self.account_capacity.is_whole

    def _costs(self) -> list[tuple[int, ...]]:
        return [self.provider.policy.costs(self.provider.cost(endpoint)) for endpoint in self.provider.endpoints]

    @property
    def capacity(self) -> int:
        """The current capacity of the narrowest limit."""
        return self.account_capacity.quota

    def can_fit(self, cost: Mapping[str, int]) -> bool:
        """Return whether a cost can ever be allowed."""
        return all(cost.get(limit.unit, 0) <= limit.burst for limit in self.provider.limits)

    def fit(self, cost: Mapping[str, int]) -> Cost:
        """Reduce an estimate to what can ever be allowed; requests are not reduced."""
        return {
            unit: min(amount, self.bursts[unit]) if unit in self.estimated else amount
            for unit, amount in cost.items()
            if unit in self.units
        }

    def output_limits(self, request: RequestTokens) -> list[Limit]:
        """Return the limits that count output."""
        return [limit for limit in self.provider.limits if "output" in request.profile.counts.get(limit.unit, ())]

    def largest_output(self, request: RequestTokens, input_tokens: int, paid_input: int) -> int:
        """Return the tokens of the longest output that the limits can ever allow; `paid_input` is for money."""
        limits = (*self.provider.limits, *(ceiling.limit for ceiling in self.provider.ceilings))
        return largest_output(request, limits, input_tokens, paid_input)

    # ---- after a response --------------------------------------------------------------------------------------------

    def recharge_if_late_flow(self, charge: Charge) -> CallFlow[Any]:
        """Charge a permit again from now on, if its response was slow."""
        yield from self.recharge_late_flow(charge, self.delays.recharge_costs(charge))

    def recharge_late_flow(self, charge: Charge, costs: tuple[int, ...]) -> CallFlow[Any]:
        """Charge these costs again from now on."""
        if costs:
            with suppress(StoreUnavailable):  # keep the first charge
                yield from self._recharge_flow(charge, costs)

    def recharge_written_flow(self, charge: Charge) -> CallFlow[Any]:
        """Charge a permit again from now on: its request has been written late."""
        costs = () if charge.settled else self.delays.written_costs(charge)
        if any(costs):
            with suppress(StoreUnavailable):  # keep the first charge
                if (yield from self._recharge_flow(charge, costs)):
                    charge.since = self.clock.steady()

    def _recharge_flow(self, charge: Charge, costs: tuple[int, ...]) -> CallFlow[Any]:
        """Charge again and return the first charge; returns whether that succeeded."""
        if not costs:
            return True
        (recharged,) = yield self._store_call("acquire", costs)
        if charged_at(recharged, self._unbounded_stretched) is None:
            return False
        if charge.settled:  # settled in the meantime, with its first charge
            parts = [(recharged.at, costs)]
        else:
            kept = tuple(map(min, costs, charge.costs))  # a part may have been returned in the meantime
            surplus = tuple(cost - left for cost, left in zip(costs, kept, strict=True))
            parts = [*charge.parts(kept), (recharged.at, surplus)]
            charge.move(kept, recharged)
        yield from complete_flow(*(self._give_back_flow(part, at) for at, part in parts if any(part)))
        return True

    def renew_flow(self, charge: Charge, at: int) -> CallFlow[Any]:
        """Charge a request in flight again, while the delay allowance lasts; returns whether it was charged.

        It must count at the same time as a permit that was charged `at`.
        """
        if not self.delays.untrack(charge):
            return True  # another thread does it
        costs = self.delays.recharge_costs(charge, at)
        try:
            charged = yield from self._recharge_flow(charge, costs)
        except BaseException:
            self.delays.track_again(charge)
            raise
        if not charged:  # with on_store_error "deny", the next permit is not used either
            self.delays.track_again(charge)
            return self.provider.policy.on_store_error == "deny"
        if costs or charge.window_end < MAX_INTEGER:  # else the allowance is used up, and no window ends
            charge.since = self.clock.steady()
            self.delays.track(charge)
        return bool(costs)

    def charge_pieces_flow(self, pieces: Sequence[tuple[Mapping[str, int], int]]) -> CallFlow[Any]:
        """Charge what has been used, whether it fits or not: amounts, each from an instant of the monotonic clock on.

        Only a log can be charged for a past instant: the amount is added to its next entry, and the last piece adds an
        entry now. Other limits are charged now. Returns the instants by the store's clock.
        """
        limits = self.provider.limits
        costs = [[amounts.get(limit.unit, 0) for limit in limits] for amounts, _ in pieces]
        last = [
            own[-1] if limit.rules.rolling else sum(own)
            for limit, own in zip(limits, zip(*costs, strict=True), strict=True)
        ]
        now = self.clock.steady()
        (decision,) = yield self._store_call("acquire", tuple(last))
        # What has been used has arrived at the provider: it need not count longer than a period.
        earlier = now + min(
            (limit.margin for limit in self._unbounded_stretched.limits if limit.rules.rolling), default=0
        )
        instants = [decision.at - (earlier - since) for _, since in pieces[:-1]]
        for at, own in zip(instants, costs, strict=False):
            past = tuple(cost if limit.rules.rolling else 0 for limit, cost in zip(limits, own, strict=True))
            if any(past):
                yield self._store_call("adjust", past, at)
        return [*instants, decision.at]

    def hold_flow(self, amounts: Mapping[str, int]) -> CallFlow[Any]:
        """Charge these amounts, whether they fit or not; returns the charge, or None if nothing was charged."""
        costs = tuple(amounts.get(limit.unit, 0) for limit in self.provider.limits)
        (decision,) = yield self._store_call("acquire", costs)
        return None if charged_at(decision, self._unbounded_stretched) is None else self._make_charge(costs, decision)

    def _make_charge(self, costs: tuple[int, ...], decision: Decision) -> Charge:
        limiter = self.limiter
        return Charge([ReservedCharge(limiter, limiter.policy_of(decision), self.key, costs, decision)], self.clock)

    def return_flow(self, amounts: Mapping[str, int], at: int) -> CallFlow[Any]:
        """Return a part of what was charged at an instant of the store's clock."""
        yield from self._give_back_flow(tuple(amounts.get(limit.unit, 0) for limit in self.provider.limits), at)

    def shrink_flow(self, charge: Charge, surplus: Mapping[str, int]) -> CallFlow[Any]:
        """Return a part of a charge that will not be used."""
        reserved = charge.amounts
        left = {
            unit: max(0, reserved[unit] - amount) for unit, amount in surplus.items() if amount and unit in reserved
        }
        if left:
            with suppress(StoreUnavailable):  # it counts until its period ends
                yield from charge.shrink_flow(left)

    def charge_unsettled_flow(self, amount: int, earlier: int | None) -> CallFlow[Any]:
        """Charge requests of which it is unknown whether and when they arrived, as if they arrived now.

        Replaces the charge made `earlier` for them, if any. Returns the instant of the charge.
        """
        pairs = ((limit.rules.movable, limit.unit == REQUESTS_UNIT) for limit in self.provider.limits)
        costs = tuple(amount if all(pair) else 0 for pair in pairs)
        if not any(costs):
            return None
        (decision,) = yield self._store_call("acquire", costs)
        if charged_at(decision, self._unbounded_stretched) is None:
            return earlier
        if earlier is not None:
            yield from self._give_back_flow(costs, earlier)
        return decision.at

    def learn_flow(self, advice: Advice) -> CallFlow[Any]:
        """Apply the remaining quota that the provider reports if it is lower than ours; else undo corrections."""
        changed = yield from self._learn_quotas_flow(advice)
        reported = find_corrections(self.provider.limits, advice)
        if not reported:
            return changed
        peeked = yield from self._peek_flow()
        for each in reported:
            limit = self.provider.limits[each.limit_index]
            if limit.rules.movable and peeked is not None:
                changed += yield from self._correct_flow(
                    each, limit.burst - self._used(peeked, each.limit_index), peeked.at
                )
            if not each.remaining and each.reset:
                self.account_capacity.exhaust(each.reset)
        return changed

    def learn_refused_flow(self, told: Advice, advice: Advice) -> CallFlow[Any]:
        """Learn from a refusal: quotas that its headers report, and what its body says."""
        changed = yield from self._learn_quotas_flow(advice)
        return changed + (yield from self.learn_flow(told)) if told.limits else changed

    def _learn_quotas_flow(self, advice: Advice) -> CallFlow[int]:
        """Use lower quotas than configured if a response reports them; returns whether they changed."""
        changed = self._learned.report(advice, self.clock.steady())
        if self._learned.quotas != self.account_capacity.shared_quotas:
            yield from self.account_capacity.share_quotas_flow(self._learned.quotas)
        if changed:
            yield from self._apply_quotas_flow()
        return int(changed)

    def check_flow(self, at: int) -> CallFlow[Any]:
        """Check what other processes were refused or learned; returns whether that changes what may be sent.

        `at` is the time now by the store's clock.
        """
        outdated = yield from self.account_capacity.check_flow(at)
        if self.provider.learn == "off" or not self._learned.receive(self.account_capacity.shared_quotas):
            return outdated
        yield from self._apply_quotas_flow()
        return True

    def _apply_quotas_flow(self) -> CallFlow[Any]:
        """Apply learned quotas; what was charged because less remained than configured is returned."""
        taken = [each for index in range(len(self.provider.limits)) for each in self._provider_charges.take(index)]
        with self._lock:
            self._apply_provider()
        for index, amount, at in taken:
            costs = tuple(amount if place == index else 0 for place in range(len(self.provider.limits)))
            with suppress(StoreUnavailable):
                yield from self._give_back_flow(costs, at)

    def _correct_flow(self, reported: LimitCorrection, left: int, now: int) -> CallFlow[Any]:
        costs = [0] * len(self._unbounded.limits)
        self._provider_charges.drop_expired(self.provider.limits, now)
        try:
            if reported.remaining < left:
                costs[reported.limit_index] = left - reported.remaining
                (decision,) = yield self._store_call("acquire", tuple(costs))
                at = charged_at(decision, self._unbounded_stretched)
                if at is not None:
                    self._provider_charges.add(ProviderCharge(reported.limit_index, left - reported.remaining, at))
                return int(at is not None)
            for provider_charge in self._provider_charges.take(reported.limit_index, reported.remaining - left):
                costs[reported.limit_index] = provider_charge.amount
                yield from self._give_back_flow(tuple(costs), provider_charge.at)
        except StoreUnavailable:
            pass  # if others use the quota, the provider will refuse, and we learn from that
        return 0

    def _peek_flow(self) -> CallFlow[Any]:
        """Read the usage of all processes that share the store; None: it is unavailable."""
        try:
            (peeked,) = yield partial(
                self._apply, "peek", ((self._unbounded, self.key, (0,) * len(self._unbounded.limits)),)
            )
        except StoreUnavailable:
            return None
        return peeked

    def _used(self, peeked: Decision, index: int) -> int:
        limit = peeked.policy_limits[index]
        return limit.burst - peeked.views[index].remaining if index < len(peeked.views) else 0

    def handle_refusal_flow(self, status: int, charge: Charge, sent: int, retry_after: float | None) -> CallFlow[Any]:
        """Reduce the capacity and pause; other processes are informed through the store and over the bus."""
        self.refused += 1
        at = charge.at + self.clock.steady() - charge.since
        return self.account_capacity.refuse_flow(status, sent, retry_after, at, self._let_through_flow(charge))

    def _let_through_flow(self, charge: Charge) -> CallFlow[Any]:
        """Return how much of the narrowest limit the provider had let through when it refused a request.

        That is the usage when the request was charged, without what was refused before. But if usage is much lower now,
        other requests were refused with it.
        """
        own, charged = charge.costs[self._index], self._used(charge.decision, self._index)
        peeked = yield from self._peek_flow()
        now = charged if peeked is None else self._used(peeked, self._index)
        began = self.clock.steady() - self._narrowest.length
        if self._narrowest.rules.windowed and peeked is not None and len(peeked.views) > self._index:
            began += peeked.views[self._index][2]
        refused = [each for each in self._refused_charges if each[0] >= began]
        charged -= sum(cost for since, cost in refused if since <= charge.since)
        now -= sum(cost for _, cost in refused)
        if self._narrowest.unit == REQUESTS_UNIT:
            self._refused_charges.append((charge.since, own))
        return max(0, (charged if charged * 7 <= now * 8 else now) - own)

    # ---- store calls -------------------------------------------------------------------------------------------------

    def _store_call(self, verb: str, costs: tuple[int, ...], at: int | None = None) -> Callable[[], Any]:
        return partial(self._apply, verb, ((self._unbounded_stretched, self.key, costs),), None, at)

    def _give_back_flow(self, costs: tuple[int, ...], at: int) -> CallFlow[Any]:
        yield self._store_call("adjust", tuple(-cost for cost in costs), at)
        self.store.wait_queues.wake(self.key)
