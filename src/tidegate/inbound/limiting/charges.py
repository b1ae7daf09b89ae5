"""Charges all limits of a request together: all or nothing, in one step of the store.

    pending category charges ─┐
    limits of the route ──────┴► charge_all_flow ──► every limit is charged, or none
                                                     later, if another limit denies: give_back_flow

Limits in different stores, or in different slots of a Redis Cluster, cannot be decided in one step. They are charged
one after another; if one denies, the earlier charges are refunded. Limits in shadow mode never deny, so each is
decided by itself, after the others.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.core.algorithms import NEVER
from tidegate.core.decision import LocalDecision, shadow
from tidegate.errors import ConfigError, RateLimitError
from tidegate.flow import complete_flow
from tidegate.inbound.client.address import UNKNOWN
from tidegate.inbound.responses.next_permit import with_next_permits
from tidegate.inbound.responses.response import combine_decisions
from tidegate.limiter import Limiter
from tidegate.reservation import charged_at
from tidegate.stores.cancellation import corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core.algorithms import View
    from tidegate.core.decision import Decision
    from tidegate.flow import CallFlow
    from tidegate.inbound.limiting.category_limiter import CategoryLimiter
    from tidegate.inbound.limiting.request_limiter import RequestLimiter
    from tidegate.inbound.limiting.route_limit import RouteLimit
    from tidegate.limiter import AsyncLimiter
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores import Store
    from tidegate.stores.base import Ask

    Correcting = tuple[Store, int | None, list[Ask], int | None]  # store, time, asks, time of the charge

log: logging.Logger = logging.getLogger("tidegate.inbound")


class RequestCharge(NamedTuple):
    """What a request is to be charged: one policy, of a category or of a route limit."""

    request_limiter: RequestLimiter
    limiter: Limiter | AsyncLimiter
    key: Key
    cost: Cost
    category_limiter: CategoryLimiter | None = None
    route_limit: RouteLimit | None = None
    reserves: bool = False  # the response may change the cost
    native: object = None  # the framework's request

    @property
    def policy(self) -> Policy:
        """The policy that is charged."""
        return self.limiter.policy

    @property
    def store(self) -> Store:
        """The store that is charged."""
        return self.limiter.store

    @property
    def can_deny(self) -> bool:
        """Whether the decision can deny the request: not in shadow mode, nor of a limit that only reports."""
        return (
            self.limiter.policy.mode == "enforce"
            and self.blocks
            and not (self.key is UNKNOWN and self.request_limiter.client_identifier.allows_unknown)
        )

    @property
    def is_plain(self) -> bool:
        """Whether this is a charge of 1 to a category, of a known client, which the response does not change."""
        category_limiter = self.category_limiter
        if category_limiter is None or category_limiter.limiter is not self.limiter:  # of a route: default limits
            return False
        return self.cost == 1 and not self.reserves and self.key is not UNKNOWN

    @property
    def blocks(self) -> bool:
        """Whether the limit denies requests, rather than only reporting them."""
        return self.route_limit is None or self.route_limit.blocks

    def now(self) -> int | None:
        """Return the time to decide at; None: the store's."""
        clock = self.request_limiter.own_clock
        return None if clock is None else clock.ns() // 1000


class DecidedCharge(NamedTuple):
    """A charge and the decision about it."""

    charge: RequestCharge
    decision: Decision
    verb: str = "acquire"  # empty if the store could not decide

    @property
    def denies(self) -> bool:
        """Whether this is one of the limits that denied the request."""
        return self.charge.can_deny and not self.decision.within_limits and any(view[1] for view in self.decision.views)


class ChargeResult(NamedTuple):
    """Whether a request is allowed, and the decisions about it; `denials`: those that denied it."""

    allowed: bool
    decided: list[DecidedCharge]
    denials: list[DecidedCharge]
    block: Decision | None = None  # the client is blocked: before the decision, or because of this denial

    @property
    def decision(self) -> Decision | None:
        """All decisions combined, or the block of the client; None if nothing was decided."""
        if self.block is not None:
            return self.block
        if not self.decided:
            return None
        decision = combine_decisions([each.decision for each in self.decided])
        lost = any(isinstance(each.decision, LocalDecision) for each in self.denials)
        return LocalDecision(decision) if lost else decision

    def record(self, method: str, path: str) -> None:
        """Record the decisions of an allowed request; of a denied one, those that denied it."""
        for charge, decision, verb in self.decided if self.allowed else self.denials:
            request_limiter, policy = charge.request_limiter, charge.policy
            if charge.category_limiter is not None and verb:
                request_limiter.record_decision(
                    charge.category_limiter, charge.key, charge.cost, decision, method, path
                )
            elif verb and (request_limiter.observed or not decision.within_limits):
                request_limiter.notify(policy, charge.key, charge.cost, decision, method, path)


def charge_all_flow(charges: Sequence[RequestCharge], *, tasks: bool, more: bool = False) -> CallFlow[ChargeResult]:
    """Charge all limits of a request or none. `tasks`: the caller awaits; `more`: other limits may be charged later."""
    result = yield from _charge_groups_flow(charges, tasks=tasks, more=more)
    if not any(charge.request_limiter.shows_next_permit for charge in charges):
        return result
    shown: dict[int, DecidedCharge] = {}
    try:
        for each in result.decided:
            decision = yield from find_next_permits_flow(each.charge, each.decision, each.charge.cost, tasks=tasks)
            shown[id(each)] = each._replace(decision=decision)
    except BaseException as raised:
        if result.allowed and not isinstance(raised, GeneratorExit):
            yield from give_back_flow(result.decided, tasks=tasks)
        raise
    return result._replace(decided=[*shown.values()], denials=[shown[id(each)] for each in result.denials])


def _charge_groups_flow(charges: Sequence[RequestCharge], *, tasks: bool, more: bool) -> CallFlow[ChargeResult]:
    """Charge the limits of a request group by group; if one denies, refund the groups before it."""
    groups = group_charges(charges)
    more = more or len(groups) > 1
    decided: list[DecidedCharge] = []
    while groups:
        group = groups.pop(0)
        made: list[DecidedCharge] = []
        try:
            made = yield from _charge_group_flow(group, tasks=tasks, more=more)
            denied = any(each.charge.can_deny and not each.decision.allowed for each in made)
        except RateLimitError as error:
            if isinstance(error, ConfigError) and len(group) > 1:
                # The store cannot decide these keys together: a Redis Cluster, if they are in different slots.
                groups, more = [*([charge] for charge in group), *groups], True
                continue
            try:
                made = _handle_store_error(group, error)
            except RateLimitError:
                yield from give_back_flow(decided, tasks=tasks)
                raise
            denied = bool(made)
        except BaseException as raised:
            if not isinstance(raised, GeneratorExit):
                yield from give_back_flow(decided, tasks=tasks)
            raise
        if denied:
            yield from give_back_flow(decided, tasks=tasks)
            denials = [each for each in made if each.denies] or made
            return ChargeResult(allowed=False, decided=[*decided, *made], denials=denials)
        decided += made
    return ChargeResult(allowed=True, decided=decided, denials=[])


def group_charges(charges: Sequence[RequestCharge]) -> list[list[RequestCharge]]:
    """Return the charges that are decided together: by store; charges that never deny are decided one by one."""
    together: dict[int, list[RequestCharge]] = {}
    alone: list[list[RequestCharge]] = []
    for charge in charges:
        if charge.can_deny:
            together.setdefault(id(charge.store), []).append(charge)
        else:
            alone.append([charge])
    return [*together.values(), *alone]


def _charge_group_flow(group: list[RequestCharge], *, tasks: bool, more: bool) -> CallFlow[list[DecidedCharge]]:
    """Charge a group in one step."""
    first = group[0]
    verb = "hold" if any(charge.reserves or (more and refills(charge.policy)) for charge in group) else "acquire"
    if len(group) == 1 and verb == "acquire" and (tasks or isinstance(first.limiter, Limiter)):
        decision = yield partial(first.limiter.try_acquire, first.key, first.cost)
        return [DecidedCharge(first, decision)]
    asks = [(charge.policy, charge.key, charge.policy.costs(charge.cost)) for charge in group]
    decisions = yield partial(apply_of(first.store, tasks=tasks), verb, asks, first.now())
    return [
        DecidedCharge(charge, shadow(decision) if charge.policy.mode == "shadow" else decision, verb)
        for charge, decision in zip(group, decisions, strict=True)
    ]


def find_next_permits_flow(charge: RequestCharge, decision: Decision, cost: Cost, *, tasks: bool) -> CallFlow[Decision]:
    """Return a decision about a cost that also says when each limit has its next permit.

    A limit that has permits left has it now, and the denial of one permit says when. For other limits without permits,
    the store is asked; if it fails, the decision is returned as it is.
    """
    policy = charge.policy
    waits = list(map(_known_wait, decision.views, policy.costs(cost)))
    if None in waits:
        asks = [(policy, charge.key, (1,) * len(policy.limits))]
        try:
            (peeked,) = yield partial(apply_of(charge.store, tasks=tasks), "peek", asks, charge.now())
        except RateLimitError:
            return decision
        passed = max(0, peeked.at - decision.at)
        after = (passed + view[1] for view in peeked.views)
        waits = [found if wait is None else wait for wait, found in zip(waits, after, strict=True)]
    return with_next_permits(decision, [wait or 0 for wait in waits])


def _known_wait(view: View, cost: int) -> int | None:
    """Return the time until a limit has its next permit, if its view for this cost says it."""
    remaining, retry, reset = view
    if remaining:
        return 0
    if cost != 1 or not retry:
        return None
    return reset if retry == NEVER else retry  # never: a limit of 0


def _handle_store_error(group: list[RequestCharge], error: Exception) -> list[DecidedCharge]:
    """Return the denial of the first policy that denies requests while the store fails; otherwise nothing."""
    for charge in group:
        outcome = charge.request_limiter.handle_policy_store_error(charge.policy, error)
        if not outcome.allowed and outcome.decision is not None and charge.can_deny:
            return [DecidedCharge(charge, outcome.decision, "")]
    return []


def give_back_flow(made: Sequence[DecidedCharge], *, tasks: bool) -> CallFlow[None]:
    """Refund charges exactly: each step is completed even if the task is cancelled."""
    yield from complete_flow(*(_correct_flow(each, tasks=tasks) for each in _corrections(made)))


def _correct_flow(correcting: Correcting, *, tasks: bool) -> CallFlow[None]:
    """Refund the charges of one step; the store makes the correction even if the task is cancelled."""
    store, now, asks, at = correcting
    try:
        yield partial(apply_of(store, tasks=tasks), "adjust", asks, now, at)
    except RateLimitError as error:
        log.error("could not refund the charge of a denied request: %s", error)  # noqa: TRY400 - the message has all details
    finally:
        store.wake(asks)


def _corrections(made: Sequence[DecidedCharge]) -> list[Correcting]:
    """Return the steps that refund charges: one for each store and time of a charge."""
    steps: dict[tuple[int, int, str], list[DecidedCharge]] = {}
    for each in made:
        if charged_at(each.decision, each.charge.policy) is not None:
            steps.setdefault((id(each.charge.store), each.decision.at, each.verb), []).append(each)
    found: list[Correcting] = []
    for (_, at, verb), group in steps.items():
        first = group[0].charge
        now = first.now()
        passed = max(0, (first.store.clock.ns() // 1000 if now is None else now) - at)
        asks = [(each.charge.policy, each.charge.key, each.charge.policy.costs(each.charge.cost)) for each in group]
        found += [
            (first.store, now, correction.asks, correction.at)
            for correction in corrections(verb, asks, [each.decision for each in group], passed)
        ]
    return found


def apply_of(store: Store, *, tasks: bool) -> Callable[..., Any]:
    """Return the function that applies a verb to the store: from a task, or from a thread."""
    return store.apply_async if tasks and not store.instant else store.apply


def refills(policy: Policy) -> bool:
    """Return whether a limit of the policy refills, so that only a marked charge can be refunded exactly."""
    return any(limit.rules.refills for limit in policy.limits)
