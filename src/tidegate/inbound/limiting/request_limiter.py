"""Decides about requests, for ASGI and WSGI: identifies the client, finds the category, charges it.

Nothing here waits or awaits; calls that may have to be awaited are yielded as steps.

    path, method ──► RequestTarget: CategoryLimiter, cost ─┐
    peer, headers ─► RequestClient: key ───────────────────┴► decide ──► Decision ──► record_decision ──► allow or deny

The middlewares run this sequence inline for common requests, because its cost is added to every request. `check_flow`
is the complete version: blocked clients, custom keys, several categories, charges that depend on the response.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from operator import call
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError
from tidegate.flow import run, run_async
from tidegate.inbound.client.address import UNKNOWN
from tidegate.inbound.limiting.category_limiter import CategoryLimiter, ResponseCharge, open_charges
from tidegate.inbound.limiting.charges import RequestCharge, charge_all_flow
from tidegate.inbound.limiting.client_check import check_client_flow
from tidegate.inbound.limiting.configured_limiter import ConfiguredLimiter
from tidegate.inbound.limiting.reset import reset_all_flow
from tidegate.inbound.responses.response import BlockedDecision
from tidegate.inbound.rules.model import MESSAGE_METHOD
from tidegate.observe import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.flow import CallFlow
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.charges import ChargeResult, DecidedCharge
    from tidegate.inbound.limiting.request_targets import MessageTarget, RequestTarget
    from tidegate.policy import Cost, Key, Policy

log: logging.Logger = logging.getLogger("tidegate.inbound")

ABNORMAL_USAGE: Final = "abnormal-usage-detected"  # the kind of denials of blocked clients


class LimitOutcome(NamedTuple):
    """Whether a request is allowed, and the decision, if there was one; the category that denied it."""

    allowed: bool
    decision: Decision | None = None
    response_charge: ResponseCharge | None = None
    kind: Kind = "quota-exceeded"
    category_limiter: CategoryLimiter | None = None
    made: Sequence[DecidedCharge] = ()


def make_response_charge(result: ChargeResult, request: Request) -> ResponseCharge | None:
    """Return the charges of an allowed request that its response may change; None if there are none."""
    charges = open_charges(result.decided)
    return ResponseCharge(charges, request) if charges else None


class RequestLimiter(ConfiguredLimiter):
    """The logic that both middlewares share."""

    def record_decision(
        self, category_limiter: CategoryLimiter, key: Key, cost: Cost, decision: Decision, method: str, path: str
    ) -> bool:
        """Record a decision; return whether the request is allowed.

        The middlewares do this inline on the fast path: a known client is allowed, without observers and before
        `fast_path_until`.
        """
        category_limiter.recent_clients.record(key, decision)
        allowed = self.is_allowed(key, decision)
        if allowed:
            category_limiter.allowed += 1
        else:
            category_limiter.denied += 1
        if decision.allowed == allowed and (self.observed or not decision.within_limits):
            self.notify(category_limiter.limiter.policy, key, cost, decision, method, path)
        if decision.at >= self.maintenance_due:
            self.run_maintenance(decision.at)
        return allowed

    def is_allowed(self, key: Key, decision: Decision) -> bool:
        """Return whether a request is allowed: always, for clients without an address if `unknown` is "allow"."""
        return decision.allowed or (key is UNKNOWN and self.client_identifier.allows_unknown)

    def notify(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Count a denial, and pass a decision to the log and the observer."""
        if not decision.allowed:
            self.denied_by_limit[policy.name] += 1
        if self.observer is None and not log.isEnabledFor(logging.INFO if decision.within_limits else logging.WARNING):
            return  # nothing to notify; keeps floods of denials cheap
        try:
            costs = policy.one if cost == 1 else policy.costs(cost)
        except ConfigError:  # limits that a function has chosen may count other units than the category
            costs = policy.one
        record = Record("acquire", policy, key, costs, decision, f"{method} {path}")
        self.log(record)
        if self.observer is not None:
            self.observer(record)

    def exempt_client(self, request: Request, client: RequestClient) -> RequestClient:
        """Return the client of a request, without a key if `exempt_when` exempts the request from all limits."""
        if self._exempt_when is None or not self._exempt_when(request):
            return client
        return replace(client, key=None, special=True)

    def prepare_flow(
        self, request: Request, target: RequestTarget, client: RequestClient
    ) -> CallFlow[LimitOutcome | tuple[RequestCharge, ...]]:
        """Return what a request is to be charged, or the outcome if its client is exempted for a time or blocked."""
        key = self.client_identifier.choose_key(request, client.key or UNKNOWN)
        if target.category_limiter is not None and (self.has_special_clients or client.blocked):
            known = yield from self.special_client_flow(request, target.category_limiter, client, key)
            if known is not None:
                return known
        charges = self.make_charges(self.plan_limiters.choose(request, target), key)
        if not self.middleware_limits:
            return charges
        return (yield from self._apply_options_flow(charges, request, client, key))

    def _apply_options_flow(
        self, charges: Sequence[RequestCharge], request: Request, client: RequestClient, key: Key
    ) -> CallFlow[tuple[RequestCharge, ...]]:
        """Return the charges as the options of the middleware's own `limit(…)` change them; some may not apply."""
        chosen = replace(client, key=key)
        found = []
        for charge in charges:
            category_limiter = charge.category_limiter
            assert category_limiter is not None  # noqa: S101 - as `make_charges` has made it
            limit = self.middleware_limits.get(category_limiter.category.name)
            if limit is None:
                found.append(charge)
                continue
            sender = client if limit.by_address else chosen
            made = yield from limit.make_charge_flow(request, request, self, sender, limit.name, tasks=self.tasks)
            if made is not None:
                found.append(made._replace(category_limiter=category_limiter, route_limit=None, native=None))
        return tuple(found)

    def make_charges(self, target: RequestTarget, key: Key) -> tuple[RequestCharge, ...]:
        """Return what a request to a target is to be charged."""
        return tuple(
            RequestCharge(self, category.limiter, key, cost, category, None, category.reserves)
            for category, cost in target.charges
        )

    def check_flow(self, request: Request, target: RequestTarget, client: RequestClient) -> CallFlow[LimitOutcome]:
        """Decide about a request, with all special cases."""
        prepared = yield from self.prepare_flow(request, target, client)
        if isinstance(prepared, LimitOutcome):
            return prepared
        result = yield from charge_all_flow(prepared, tasks=self.tasks)
        result.record(request.method, request.path)
        if not result.allowed:
            key = prepared[0].key
            if self.middleware_limits:  # a limit may have a key of its own
                key = self.client_identifier.choose_key(request, client.key or UNKNOWN)
            result = yield from self.count_denial_flow(result, key)
            category_limiter = result.denials[0].charge.category_limiter
            return LimitOutcome(allowed=False, decision=result.decision, category_limiter=category_limiter)
        return LimitOutcome(
            allowed=True,
            decision=result.decision,
            response_charge=make_response_charge(result, request),
            made=result.decided,
        )

    def check_message_flow(self, messages: MessageTarget, client: RequestClient, key: Key, path: str) -> CallFlow[bool]:
        """Decide about a message of a websocket; the rules and lists may have changed since it was opened."""
        target = messages.find(self.targets, self.plan_limiters)
        if target is None:
            return True
        if self.has_special_clients:
            now = self.now()
            if self.allowed_clients.expires_at(key, client.address, now):
                return True
            if (yield from self.blocked_until_flow(key, client, now)):
                return False
        charges = [charge._replace(reserves=False) for charge in self.make_charges(target, key)]
        result = yield from charge_all_flow(charges, tasks=self.tasks)
        result.record(MESSAGE_METHOD, path)
        if not result.allowed:
            yield from self.count_denial_flow(result, key)
        return result.allowed

    def count_denial_flow(self, result: ChargeResult, key: Key) -> CallFlow[ChargeResult]:
        """Count a denied request of a client; return the result, with the block if the client is blocked now."""
        if self.denial_blocks is None or not any(each.verb for each in result.denials):  # a store error is not a denial
            return result
        until = yield from self.denial_blocks.count_denial_flow(key)
        if not until:
            return result
        return result._replace(block=BlockedDecision.until(self.now(), result.denials[0].charge.policy.limits, until))

    def blocked_until_flow(self, key: Key, client: RequestClient, now: int) -> CallFlow[int]:
        """Return until when a client is blocked: by an administrator, or for its denials; 0 if it is not."""
        until = self.blocked_clients.expires_at(key, client.address, now) or 0
        if not until and self.denial_blocks is not None:
            until = yield from self.denial_blocks.blocked_until_flow(key)
        return until

    def special_client_flow(
        self, request: Request, category_limiter: CategoryLimiter, client: RequestClient, key: Key
    ) -> CallFlow[LimitOutcome | None]:
        """Return the outcome for clients that are exempted for a time or blocked; None for all others."""
        now, limits = self.now(), category_limiter.category.policy.limits
        if self.allowed_clients.expires_at(key, client.address, now):
            return LimitOutcome(allowed=True)
        until = yield from self.blocked_until_flow(key, client, now)
        decision: Decision = BlockedDecision.until(now, limits, until)
        if client.blocked:  # by the file, until it changes: the end of the block is unknown
            until = max(until, now + round(self.rules.cleanup_interval * SECOND))
            decision = Decision(BlockedDecision.until(now, limits, until))
        if not until:
            return None
        category_limiter.denied += 1
        self.notify(category_limiter.limiter.policy, key, {}, decision, request.method, request.path)
        return LimitOutcome(allowed=False, decision=decision, kind=ABNORMAL_USAGE, category_limiter=category_limiter)

    def handle_store_error(self, category_limiter: CategoryLimiter, error: Exception) -> LimitOutcome:
        """Handle a store error in a category."""
        return self.handle_policy_store_error(category_limiter.category.policy, error)._replace(
            category_limiter=category_limiter
        )

    def handle_policy_store_error(self, policy: Policy, error: Exception) -> LimitOutcome:
        """Log a store error; allow or deny by the policy's `on_store_error`."""
        self.throttle.log_throttled(logging.ERROR, "%s: the store could not decide: %s", policy.name, error)
        if policy.on_store_error != "deny":
            return LimitOutcome(allowed=True)
        again = ((0, SECOND, SECOND),) * len(policy.limits)
        return LimitOutcome(
            allowed=False, decision=LocalDecision.of_views(self.now(), policy.limits, again, within_limits=False)
        )

    def check(self, address: str | None, category: str, cost: Cost = 1) -> Decision:
        """Charge a client in a category, without an HTTP request; see `check_client_flow`.

        Raises ConfigError for an unknown category, and if this limiter awaits its store: use `check_async` then.
        """
        if self.tasks:
            raise ConfigError("this middleware awaits its store: use `await check_async(…)` instead of `check(…)`")
        return run(check_client_flow(self, address, category, cost), call)

    async def check_async(self, address: str | None, category: str, cost: Cost = 1) -> Decision:
        """Charge a client as `check` does, without blocking the event loop."""
        if not self.tasks and not self.store.instant:
            raise ConfigError("this middleware does not await its store: use `check(…)` instead of `check_async(…)`")
        return await run_async(check_client_flow(self, address, category, cost), call)

    def reset_all(self) -> None:
        """Reset the usage of all clients, and unblock clients that were denied too often; see `reset_all_flow`."""
        run(reset_all_flow(self, self.store.apply), call)

    def reset_all_flow(self) -> CallFlow[int]:
        """Reset all clients as `reset_all` does; the caller awaits the steps if it awaits the limiters."""
        return reset_all_flow(self, self.store.apply_async if self.tasks else self.store.apply)
