"""Decides about requests, for ASGI, WSGI and aiohttp: identifies the client, finds what it is charged, charges it.

    path, method ──► RequestTarget: categories, limits of the route ─┐
    peer, headers ─► RequestClient: key ─────────────────────────────┴► check_flow ──► ChargeResult ──► allow or deny

Nothing here waits or awaits; calls that may have to be awaited are yielded as steps. `decide_now` is `check_flow`
without steps: for a store in memory, if nothing else has to be asked for.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.flow import run, run_async
from tidegate._runtime.suggestions import did_you_mean
from tidegate.core._algorithms import View
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision, LocalDecision
from tidegate.errors import ConfigError
from tidegate.inbound._client.address import UNKNOWN
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import (
    ALLOWED,
    ChargeResult,
    RequestCharge,
    has_slots,
    perform,
    perform_async,
)
from tidegate.inbound._limiting.configured_limiter import ConfiguredLimiter
from tidegate.inbound._limiting.decide import ChargeSet, decide_flow
from tidegate.inbound._limiting.request_targets import MISSING
from tidegate.inbound._responses.response import BlockedDecision, ListedDecision
from tidegate.inbound._rules.model import DEFAULT_LIMITS, MESSAGE_METHOD
from tidegate.observe import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate._policy import Cost, Key, Policy
    from tidegate._runtime.flow import Flow
    from tidegate.inbound._client.identify import RequestClient
    from tidegate.inbound._limiting.category_limiter import CategoryLimiter
    from tidegate.inbound._limiting.request_targets import MessageTarget, RequestTarget
    from tidegate.inbound._limiting.route_limit import RouteLimit

    Categories = tuple[tuple[CategoryLimiter, Cost], ...]

log: logging.Logger = logging.getLogger("tidegate.inbound")

CHECK_METHOD: Final = "CHECK"  # the method in log lines and records of checks: there is no request


class RequestLimiter(ConfiguredLimiter):
    """The logic that all middlewares share."""

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

    def decide_now(
        self, target: RequestTarget, client: RequestClient, method: str, path: str, request: Request | None
    ) -> ChargeResult | None:
        """Decide about a request at once; None: `check_flow` decides, because something has to be asked for first.

        `request` is needed if functions of the application or limits of the route read it.
        """
        key = client.key
        if key is None or (target.admin and not target.categories):
            return ALLOWED
        if client.special or self.special:
            return None
        if request is None:
            prepared = target.unplanned
            if prepared is not None:
                return prepared.decide((key,) * prepared.size, method, path)
        prepared = self._prepared(target, method, request)
        if prepared is None or not prepared.at_once:
            return None
        if request is None:
            target.unplanned = prepared  # from now on, nothing has to be asked for
            return prepared.decide((key,) * prepared.size, method, path)
        key = self.client_identifier.choose_key(request, key)
        return prepared.decide(prepared.keys_of(request, request.mapping, client, key), method, path)

    def check_flow(
        self, request: Request, target: RequestTarget, client: RequestClient, native: object = None
    ) -> Flow[Any, ChargeResult]:
        """Decide about a request to a target; `native` is the framework's request, for functions of its route."""
        if client.key is None or (target.admin and not target.categories):
            return ALLOWED
        key = self.client_identifier.choose_key(request, client.key)
        prepared = None if client.special else self._prepared(target, request.method, request)
        charges: Sequence[RequestCharge] = () if prepared is None else prepared.charges
        if prepared is None:
            charges = yield from self._make_charges_flow(request, target, client, key, native)
        if self.has_special_clients or client.blocked:
            first = charges[0]._replace(key=key) if charges else self._any_charge(target, key)
            known = yield from self.special_client_flow(request, first, client, key)
            if known is not None:
                return known
        if prepared is None:
            result = yield from decide_flow(charges, more=target.route is not None and bool(target.route.late))
            result.record(request.method, request.path)
        else:
            keys = prepared.keys_of(request, request.mapping, client, key)
            result = yield from prepared.decide_flow(keys, request.method, request.path)
        return result if result.allowed else (yield from self.count_denial_flow(result, key))

    def _prepared(self, target: RequestTarget, method: str, request: Request | None) -> ChargeSet | None:
        """Return what requests to a target are charged, without their keys; None if it differs between requests."""
        plan = None
        if self.plan_limiters and request is not None:
            plan = self.plan_limiters.find_plan(request, target.categories)
        found: ChargeSet | None = target.prepared.get(plan, MISSING)
        if found is MISSING:
            found = target.prepared[plan] = self._prepare(target, method, plan)
        return found

    def _prepare(self, target: RequestTarget, method: str, plan: str | None) -> ChargeSet | None:
        route = target.route
        charges: list[RequestCharge] = []
        key_limits: list[RouteLimit | None] = []
        categories = self.plan_limiters.replace(target.categories, plan)
        for charge in self.make_charges(categories, UNKNOWN, None if route is None else route.name, observes=False):
            owner: Any = charge.owner
            if owner.category.name in self.middleware_limits:
                return None
            charges.append(charge)
            key_limits.append(None)
        for use in () if route is None else route.uses:
            if use.limit.has_functions or not use.limit.is_fixed:
                return None
            made = use.limit.prepare_charge(use.limit.request_limiter_for(self), use.policy_name, method)
            if made is not None:
                charges.append(made)
                key_limits.append(use.limit if use.limit.has_key else None)
        if not charges:
            return None
        more = route is not None and bool(route.late)
        return ChargeSet(charges, key_limits, more=more, raw=self.raw)

    def _make_charges_flow(
        self, request: Request, target: RequestTarget, client: RequestClient, key: Key, native: object
    ) -> Flow[Any, list[RequestCharge]]:
        """Return what a request is to be charged."""
        route = None if target.route is None else target.route.name
        native = request if native is None else native  # functions that only read headers take either
        charges = self.make_charges(self.plan_limiters.choose(request, target.categories), key, route)
        if self.middleware_limits:
            charges = yield from self._apply_options_flow(charges, request, client, key, route)
        for use in () if target.route is None else target.route.uses:
            limiter = use.limit.request_limiter_for(self)
            charge = yield from use.limit.make_charge_flow(request, native, limiter, client, key, use.policy_name)
            if charge is not None:
                charges.append(charge)
        return charges

    def make_charges(
        self, categories: Categories, key: Key, route: str | None = None, *, observes: bool | None = None
    ) -> list[RequestCharge]:
        """Return the charges of a client in categories; default limits count by route.

        `observes`: it is counted and never denied (default: if it has no address, and such clients are allowed).
        """
        if observes is None:
            observes = key is UNKNOWN and self.client_identifier.allows_unknown
        charges = []
        for category, cost in categories:
            limiter = category.observing if observes else category.limiter
            if route is not None and category.category.name == DEFAULT_LIMITS:
                limiter = self.route_limiters.at_route(limiter.policy, route)
            charges.append(RequestCharge(limiter, key, cost, category, self, category.reserves))
        return charges

    def _apply_options_flow(
        self, charges: Sequence[RequestCharge], request: Request, client: RequestClient, key: Key, route: str | None
    ) -> Flow[Any, list[RequestCharge]]:
        """Return the charges as the options of the middleware's own `limit(…)` change them; some may not apply."""
        found = []
        for charge in charges:
            category: Any = charge.owner
            limit = self.middleware_limits.get(category.category.name)
            if limit is None:
                found.append(charge)
                continue
            made = yield from limit.make_charge_flow(request, request, self, client, key, limit.name)
            if made is not None:
                limiter = made.limiter
                if route is not None and limit.name == DEFAULT_LIMITS:
                    limiter = self.route_limiters.at_route(limiter.policy, route)
                found.append(made._replace(limiter=limiter, owner=category, native=None))
        return found

    def _any_charge(self, target: RequestTarget, key: Key) -> RequestCharge:
        """Return a charge that is never made: the denial of a blocked client shows its limits."""
        for category, cost in (*target.categories, *target.dropped):
            return RequestCharge(category.limiter, key, cost, category, self)
        return RequestCharge(self.blocked_category.limiter, key, 1, self.blocked_category, self)

    def check_message_flow(
        self, messages: MessageTarget, client: RequestClient, key: Key, path: str
    ) -> Flow[Any, bool]:
        """Decide about a message of a websocket; the rules and lists may have changed since it was opened."""
        categories = messages.find(self.targets, self.plan_limiters)
        if not categories:
            return True
        if self.has_special_clients:
            now = self.now()
            if self.allowed_clients.expires_at(key, client.address, now):
                return True
            if (yield from self.blocked_until_flow(key, client, now)):
                return False
        charges = [charge._replace(reserves=False) for charge in self.make_charges(categories, key)]
        result = yield from decide_flow(charges)
        result.record(MESSAGE_METHOD, path)
        yield from self.count_denial_flow(result, key)
        return result.allowed

    def count_denial_flow(self, result: ChargeResult, key: Key) -> Flow[Any, ChargeResult]:
        """Count a denied request of a client; return the result, with the block if the client is blocked now."""
        if result.allowed or self.denial_blocks is None or not any(each.verb for each in result.denials):
            return result  # a store error is not a denial
        until = yield from self.denial_blocks.count_denial_flow(key)
        if not until:
            return result
        return result.replace(block=BlockedDecision.until(self.now(), result.denials[0].charge.policy.limits, until))

    def blocked_until_flow(self, key: Key, client: RequestClient, now: int) -> Flow[Any, int]:
        """Return until when a client is blocked: by an administrator, or for its denials; 0 if it is not."""
        until = self.blocked_clients.expires_at(key, client.address, now) or 0
        if not until and self.denial_blocks is not None:
            until = yield from self.denial_blocks.blocked_until_flow(key)
        return until

    def special_client_flow(
        self, request: Request, charge: RequestCharge, client: RequestClient, key: Key
    ) -> Flow[Any, ChargeResult | None]:
        """Return the result for clients that are exempted for a time or blocked; None for all others."""
        now, limits = self.now(), charge.policy.limits
        if self.allowed_clients.expires_at(key, client.address, now):
            return ALLOWED
        until = yield from self.blocked_until_flow(key, client, now)
        decision: Decision = BlockedDecision.until(now, limits, until)
        if client.blocked:  # by the file, until it changes: the end of the block is unknown
            until = max(until, now + round(self.rules.cleanup_interval * SECOND))
            decision = ListedDecision.until(now, limits, until)
        if not until:
            return None
        if not charge.owner.limits_routes:
            category: Any = charge.owner
            category.denied_requests += 1
        self.notify(charge.policy, key, {}, decision, request.method, request.path)
        return ChargeResult.of_block(charge, decision)

    def deny_without_store(self, policy: Policy, error: Exception) -> Decision | None:
        """Log a store error; return the denial of a policy that denies meanwhile, None if requests are allowed."""
        self.throttle.log_throttled(logging.ERROR, "%s: the store could not decide: %s", policy.name, error)
        if policy.on_store_error != "deny":
            return None
        again = (View((0, SECOND, SECOND)),) * len(policy.limits)
        return LocalDecision.of_views(self.now(), policy.limits, again, within_limits=False)

    def check(self, address: str | None, category: str, cost: Cost = 1) -> Decision:
        """Charge a client in a category, without an HTTP request.

        The lists of exempt and blocked clients and `block_after` apply. Functions of a request (`key`, `plan`,
        `exempt_when`) and limits of other categories do not. Raises ConfigError for an unknown category, and if this
        limiter awaits its store: use `check_async` then.
        """
        if self.tasks:
            raise ConfigError("this middleware awaits its store: use `await check_async(…)` instead of `check(…)`")
        return run(self._check_client_flow(address, category, cost), perform)

    async def check_async(self, address: str | None, category: str, cost: Cost = 1) -> Decision:
        """Charge a client as `check` does, without blocking the event loop."""
        if not self.tasks and not self.store.instant:
            raise ConfigError("this middleware does not await its store: use `check(…)` instead of `check_async(…)`")
        return await run_async(self._check_client_flow(address, category, cost), perform_async)

    def _check_client_flow(self, address: str | None, category: str, cost: Cost) -> Flow[Any, Decision]:
        if self.idle:
            self.run_idle_maintenance()  # first: it may replace the rules
        category_limiter = self._find_category(category)
        category_limiter.policy.costs(cost)  # raises ConfigError: in a charge, it would be an error of the store
        client = self.client_identifier.find(address, ())
        if not self.rules.enabled or client.key is None:
            return self._allow_freely(category_limiter)
        charges = self.make_charges(((category_limiter, cost),), client.key)
        request = Request(CHECK_METHOD, category, client.address, {}, lambda _: None)
        result = None
        if self.has_special_clients or client.blocked:
            result = yield from self.special_client_flow(request, charges[0], client, client.key)
        if result is None:
            result = yield from decide_flow(charges)
            result.record(CHECK_METHOD, category)
            result = yield from self.count_denial_flow(result, client.key)
        decision = result.decision
        return self._allow_freely(category_limiter) if decision is None else decision

    def _find_category(self, name: str) -> CategoryLimiter:
        """Return the limiter of a category; raises ConfigError if there is none, or if it needs a request."""
        names = [category.name for category in self.rules.categories]
        if name not in names:
            expected = did_you_mean(name, names) or f"expected one of {', '.join(names)}"
            raise ConfigError(f"unknown category {name!r}: {expected}", field="category")
        found = self.category_limiters[name]
        if has_slots(found.policy):
            raise ConfigError(
                f"category {name!r} limits concurrent requests, which hold a slot until their response ends: "
                "a check has no response",
                field="category",
            )
        return found

    def _allow_freely(self, category_limiter: CategoryLimiter) -> Decision:
        """Return a decision that allows a check without a charge: the limits are unused."""
        limits = category_limiter.limits
        views = [View((limit.burst, 0, 0)) for limit in limits]
        return Decision.of_views(self.now(), limits, views, within_limits=True)

    def reset_all(self) -> None:
        """Reset the usage of all clients, and unblock clients that were denied too often; see `reset_all_flow`."""
        run(self.reset_all_flow(), perform)

    def reset_all_flow(self) -> Flow[Any, int]:
        """Reset the usage of all clients and unblock clients that were denied too often; return how many were known.

        A memory store that the middleware opened is cleared, including the counts of route limits. In other stores, the
        clients that this process has seen recently are reset, in all categories.
        """
        known = 0
        blocks = self.denial_blocks
        now = self.now() if self.own_clock is not None else None  # None: by the store's clock
        cleared = self.opened_store.owned and self.store.clear()
        for name, base in self.category_limiters.items():
            policies = [limiter.policy for limiter in self.all_limiters_of(name)]
            policies += blocks.policies if blocks is not None else ()
            keys = tuple(base.last_decisions)
            base.last_decisions.clear()
            known += len(keys)
            for key in () if cleared else keys:
                for policy in policies:
                    yield ApplyStep(self.store, "reset", ((policy, key, (0,) * len(policy.limits)),), now)
        if blocks is not None:
            blocks.listed.clear()
        return known
