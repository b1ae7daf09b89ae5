"""Decides about all charges of a request together: all or nothing, one call for each store.

`decide_flow` takes charges that were made for one request. A `ChargeSet` has those that all requests to a target have
in common, and only needs their keys: it makes the same decision with fewer objects, in memory without a flow.

Limits in different slots of a Redis Cluster, or in different stores, cannot be decided in one step: they are charged
one after another; if one denies, the earlier charges are refunded. Limits in shadow mode never deny.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.joint import LimiterAsk, charge_flow
from tidegate.core._decision import shadow
from tidegate.errors import RateLimitError
from tidegate.inbound._limiting.charges import ALLOWED, ChargeResult, MadeCharge, has_slots, refills
from tidegate.inbound._limiting.settle import find_next_permits_flow, refund_flow
from tidegate.inbound._responses.response import BlockedDecision

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.flow import Flow
    from tidegate.core._decision import Decision
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.charges import Reporter, RequestCharge
    from tidegate.inbound._limiting.route_limit import RouteLimit
    from tidegate.inbound._responses.prepared_fields import FieldWriter
    from tidegate.stores import Store


MAX_WRITERS: Final = 64  # writers of header fields for other charges that follow


class ChargeSet:
    """What all requests to a target are charged; only the keys differ."""

    __slots__ = (
        "_categories",
        "_clock",
        "_costs",
        "_key_limits",
        "_observed",
        "_policies",
        "_raw",
        "_reporters",
        "_shadow",
        "_store",
        "_writers",
        "at_once",
        "charges",
        "holds_slots",
        "reserves",
        "size",
        "verb",
        "write",
    )

    def __init__(
        self,
        charges: Sequence[RequestCharge],
        key_limits: Sequence[RouteLimit | None] = (),
        *,
        more: bool = False,
        raw: bool = False,
    ) -> None:
        """Prepare charges; their keys do not matter. Raises ConfigError for a cost that a policy does not count.

        `key_limits` has, for each charge, the limit that chooses its key; None: the key of the client. With `more`,
        limits that are decided later may deny the request. `raw`: header fields are written as bytes.
        """
        limiters = [charge.limiter for charge in charges]
        first = charges[0]
        self.charges: tuple[RequestCharge, ...] = tuple(charges)
        self.size: int = len(charges)
        self._key_limits = tuple(key_limits) if any(key_limits) else ()
        self._policies = tuple([limiter.policy for limiter in limiters])
        self._costs = tuple([charge.policy.costs(charge.cost) for charge in charges])
        self._store: Store = first.limiter.store
        self._clock = first.reporter.own_clock
        self._shadow: bool = self._policies[0].mode == "shadow"  # of the only one
        one_store = all(limiter.store is self._store for limiter in limiters)
        enforced = self.size == 1 or all(policy.mode == "enforce" for policy in self._policies)
        # Whether a store in memory can decide in one step, and the decision is all that has to be known.
        self.at_once: bool = one_store and self._store.instant and enforced and not first.reporter.shows_next_permit
        self.verb: str = choose_verb(charges, more=more)
        self.reserves: bool = any(charge.reserves for charge in charges)
        self.holds_slots: bool = any(charge.reserves and has_slots(charge.policy) for charge in charges)
        self._observed: bool = any(charge.reporter.observed for charge in charges)
        self._reporters: tuple[Reporter, ...] = tuple(dict.fromkeys(charge.reporter for charge in charges))
        # The owners of the first charges; limits of routes follow, which have no statistics.
        self._categories: tuple[Any, ...] = tuple(
            [charge.owner for charge in charges if not charge.owner.limits_routes]
        )
        self._raw = raw
        self._writers: dict[ChargeSet, FieldWriter] = {}
        self.write: FieldWriter = first.reporter.response_writer.tightest_writer(self._policies, raw=raw)

    def write_after(self, before: ChargeSet, decisions: Sequence[Decision]) -> list[Any]:
        """Return the header fields of a request that was charged others before; `decisions` are about both."""
        writer = before._writers.get(self)
        if writer is None:
            writer = before._join(self)
        return writer(decisions)

    def _join(self, later: ChargeSet) -> FieldWriter:
        if len(self._writers) >= MAX_WRITERS:
            self._writers.clear()
        policies = (*self._policies, *later._policies)
        writer = self.charges[0].reporter.response_writer.tightest_writer(policies, raw=self._raw)
        self._writers[later] = writer
        return writer

    def keys_of(self, native: object, mapping: Any, client: RequestClient, key: Key) -> Sequence[Key]:  # noqa: ANN401 - of any framework
        """Return the keys of a request; `key` is the one that the middleware has chosen for the client.

        `native` is the request for key functions, and `mapping` keeps what these have returned.
        """
        if not self._key_limits:
            return (key,) * self.size
        return [
            key if limit is None else limit.choose_key(native, mapping, client, key, charge.reporter)  # type: ignore[misc]  # the client is limited
            for limit, charge in zip(self._key_limits, self.charges, strict=True)
        ]

    def decide(self, keys: Sequence[Key], method: str, path: str) -> ChargeResult:
        """Decide at once, and record the decisions; only if `at_once`."""
        now = None if self._clock is None else self._clock.ns() // 1000
        try:
            if self.size == 1:
                decisions = [self._store.apply_one(self.verb, self._policies[0], keys[0], self._costs[0], now)]
            else:
                decisions = self._store.apply(self.verb, [*zip(self._policies, keys, self._costs, strict=True)], now)
        except RateLimitError as error:
            result = result_without_store(self._charges_at(keys), error)
        else:
            if decisions[0][0]:
                return self.allow(keys, decisions, method, path)
            if self._shadow:
                decisions = [shadow(decision) for decision in decisions]
            result = result_of(self._charges_at(keys), decisions, self.verb)
        result.record(method, path)
        return result

    def allow(self, keys: Sequence[Key], decisions: Sequence[Decision], method: str, path: str) -> ChargeResult:
        """Return the result of charges that no limit has denied, and record it."""
        for category, key, decision in zip(self._categories, keys, decisions, strict=False):  # first of the charges
            if key in category.last_decisions:  # `CategoryLimiter.record`, inlined
                category.last_decisions[key] = decision
                category.allowed += 1
            else:
                category.record(key, decision)
        if self._observed:
            for (limiter, _, cost, _, reporter, *_), key, decision in zip(self.charges, keys, decisions, strict=True):
                if reporter.observed:
                    reporter.notify(limiter.policy, key, cost, decision, method, path)
        at = decisions[0][1]
        for reporter in self._reporters:
            if at >= reporter.maintenance_due:
                reporter.run_maintenance(at)
        result = ChargeResult()
        result.prepared, result.keys, result.decisions = self, keys, decisions
        return result

    def decide_flow(self, keys: Sequence[Key], method: str, path: str) -> Flow[Any, ChargeResult]:
        """Decide in one call of the store, or in one for each store or slot, and record the decisions."""
        if self.at_once:
            return self.decide(keys, method, path)
        store, charges = self._store, self._charges_at(keys)
        if any([charge.limiter.store is not store for charge in charges]):  # noqa: C419 - a generator costs more
            result = yield from decide_flow(charges)
        else:
            result = yield from self._ask_flow(charges, method, path)
        if result.prepared is None:
            result.record(method, path)
        return result

    def _ask_flow(self, charges: Sequence[RequestCharge], method: str, path: str) -> Flow[Any, ChargeResult]:
        try:
            decisions = yield from charge_all_flow(charges, self.verb)
        except RateLimitError as error:
            return result_without_store(charges, error)
        if self.charges[0].reporter.shows_next_permit:
            return (yield from _with_next_permits_flow(result_of(charges, decisions, self.verb)))
        known = [decision for decision in decisions if decision is not None and decision[0]]
        if len(known) == self.size:
            return self.allow([charge.key for charge in charges], known, method, path)
        return result_of(charges, decisions, self.verb)

    def _charges_at(self, keys: Sequence[Key]) -> list[RequestCharge]:
        return [charge.at(key) for charge, key in zip(self.charges, keys, strict=True)]


def choose_verb(charges: Iterable[RequestCharge], *, more: bool) -> str:
    """Return `hold` if a charge may be corrected that only a marked state can correct exactly.

    In memory, only buckets need the mark. `more`: limits that are decided later may deny the request.
    """
    for charge in charges:
        if charge.reserves or more:
            store, policy = charge.limiter.store, charge.limiter.policy
            if refills(policy) or (charge.reserves and not store.instant):
                return "hold"
    return "acquire"


def decide_flow(charges: Sequence[RequestCharge], *, more: bool = False) -> Flow[Any, ChargeResult]:
    """Charge all limits of a request or none. `more`: limits that are decided later may deny the request."""
    if not charges:
        return ALLOWED
    for charge in charges:
        if charge.blocks is not None and charge.blocks.until:
            limits = charge.policy.limits
            return ChargeResult.of_block(
                charge, BlockedDecision.until(charge.reporter.now(), limits, charge.blocks.until)
            )
    store = charges[0].limiter.store
    if any([charge.limiter.store is not store for charge in charges]):  # noqa: C419 - a generator costs more
        return (yield from _decide_stores_flow(charges))
    verb = choose_verb(charges, more=more)
    try:
        decisions = yield from charge_all_flow(charges, verb)
    except RateLimitError as error:
        return result_without_store(charges, error)
    result = result_of(charges, decisions, verb)
    if charges[0].reporter.shows_next_permit:
        result = yield from _with_next_permits_flow(result)
    return result if result.allowed else (yield from _count_denials_flow(result))


def _count_denials_flow(result: ChargeResult) -> Flow[Any, ChargeResult]:
    """Count a denial for the limits that block clients; return it with the block, if the client is blocked now."""
    for charge, _, _ in result.denials:
        if charge.blocks is not None:
            until = yield from charge.blocks.denial_blocks.count_denial_flow(charge.key)
            if until:
                now = charge.reporter.now()
                result = result.replace(block=BlockedDecision.until(now, charge.policy.limits, until))
    return result


def charge_all_flow(charges: Sequence[RequestCharge], verb: str) -> Flow[Any, Sequence[Decision | None]]:
    """Charge limits of one store, all or nothing; the decision of a limit is None if another one denied before it."""
    asked = [LimiterAsk(charge.limiter, charge.key, charge.cost) for charge in charges]
    charged = yield from charge_flow(verb, asked)
    if len(charged.decisions) == len(charges):
        return charged.decisions
    decided = zip(charged.asks, charged.decisions, strict=True)
    found = {(id(limiter), ask[1]): decision for (limiter, ask), decision in decided}
    return [found.get((id(charge.limiter), charge.key)) for charge in charges]


def result_of(
    charges: Sequence[RequestCharge], decisions: Sequence[Decision | None], verb: str = "acquire"
) -> ChargeResult:
    """Return the result of charges that were decided together; None: not asked, because an earlier one denied."""
    decided = []
    allowed = True
    for charge, decision in zip(charges, decisions, strict=True):
        if decision is not None:
            decided.append(MadeCharge(charge, decision, verb))
            allowed = allowed and decision.allowed
    if allowed:
        return ChargeResult.of(decided)
    denials = [each for each in decided if each.denies]
    return ChargeResult.of(decided, denials or decided)


def _decide_stores_flow(charges: Sequence[RequestCharge]) -> Flow[Any, ChargeResult]:
    """Charge store after store; if one denies, refund those before it. One that fails does not disable the others."""
    stores: dict[int, list[RequestCharge]] = {}
    for charge in charges:
        stores.setdefault(id(charge.limiter.store), []).append(charge)
    made: list[MadeCharge] = []
    try:
        for group in stores.values():
            result = yield from decide_flow(group, more=True)
            if not result.allowed:
                yield from refund_flow(made)
                return result.replace(decided=[*made, *result.decided])
            made += result.decided
    except BaseException as raised:
        if not isinstance(raised, GeneratorExit):
            yield from refund_flow(made)
        raise
    return ChargeResult.of(made)


def result_without_store(charges: Sequence[RequestCharge], error: Exception) -> ChargeResult:
    """Return the denial of the first policy that denies requests while the store fails; otherwise allow them."""
    for charge in charges:
        denial = charge.reporter.deny_without_store(charge.policy, error)
        if denial is not None and charge.policy.mode == "enforce":
            made = [MadeCharge(charge, denial, "")]
            return ChargeResult.of(made, made)
    return ALLOWED


def _with_next_permits_flow(result: ChargeResult) -> Flow[Any, ChargeResult]:
    """Return a result whose decisions also say when each limit has its next permit."""
    shown: dict[int, MadeCharge] = {}
    try:
        for each in result.decided:
            decision = yield from find_next_permits_flow(each.charge, each.decision, each.charge.cost)
            shown[id(each)] = each._replace(decision=decision)
    except BaseException as raised:
        if result.allowed and not isinstance(raised, GeneratorExit):
            yield from refund_flow(result.decided)
        raise
    denials = None if result.allowed else [shown[id(each)] for each in result.denials]
    return ChargeResult.of([*shown.values()], denials, result.block)
