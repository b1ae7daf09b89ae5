"""Decides about requests, for ASGI and WSGI: identifies the client, finds the category, charges it.

Nothing here waits or awaits; calls that may have to be awaited are yielded as steps.

    path, method ──► RequestTarget: CategoryLimiter, cost ─┐
    peer, headers ─► RequestClient: key ───────────────────┴► decide ──► Decision ──► record_decision ──► allow or deny

The middlewares run this sequence inline for common requests, because every request pays for it. `check_flow` is the
complete version: blocked clients, custom keys, several categories, charges that depend on the response.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, RateLimitError
from tidegate.inbound.client.address import UNKNOWN
from tidegate.inbound.client.identify import ClientIdentifier
from tidegate.inbound.client.temporary_list import TemporaryList
from tidegate.inbound.limiting.category_limiter import (
    CategoryCharge,
    CategoryLimiter,
    ResponseCharge,
    cancel_flow,
    charge_flow,
    refund_flow,
)
from tidegate.inbound.limiting.options import check_options
from tidegate.inbound.responses.response import ResponseWriter, combine_decisions
from tidegate.inbound.rules.model import ADMIN_PATH, MESSAGE_METHOD
from tidegate.inbound.rules.reload import RulesSource
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.observe import Record
from tidegate.observe.logs import BURST, DecisionLog, LogThrottle
from tidegate.stores.opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tidegate.clock import Clock
    from tidegate.flow import CallFlow
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.category_limiter import Counts
    from tidegate.inbound.rules.model import Match, Rules
    from tidegate.inbound.rules.path_readings import Route
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.inbound")

MAX_CACHED_TARGETS: Final = 4096  # the cache is cleared when it is full
MAX_CACHED_PATH_LENGTH: Final = 256  # targets of longer paths are not cached
MISSING: Final[Any] = object()


class RequestTarget(NamedTuple):
    """The categories and costs that a request is charged to, and whether it is for the admin endpoint."""

    category_limiter: CategoryLimiter | None
    cost: Cost
    special: bool = False  # needs the slow path: charged by its response, several categories, or admin
    admin: bool = False
    more: tuple[tuple[CategoryLimiter, Cost], ...] = ()

    @property
    def charges(self) -> tuple[tuple[CategoryLimiter, Cost], ...]:
        """All categories and costs."""
        return self.more if self.category_limiter is None else ((self.category_limiter, self.cost), *self.more)


class LimitOutcome(NamedTuple):
    """Whether a request is allowed, and the decision, if there was one; the category that denied it."""

    allowed: bool
    decision: Decision | None = None
    key: Key = UNKNOWN
    response_charge: ResponseCharge | None = None
    kind: Kind = "quota-exceeded"
    category_limiter: CategoryLimiter | None = None


class RequestLimiter:
    """The logic that both middlewares share."""

    def __init__(
        self,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style = "x",
        clock: Clock | None = None,
        *,
        tasks: bool = False,
        **options: Any,  # noqa: ANN401 - Options, passed by the middlewares
    ) -> None:
        """Read the configuration and open the store; raises ConfigError. `tasks`: the caller awaits the limiters."""
        check_options(options)
        get = options.get
        self._counts: Mapping[str, Counts] = get("count") or {}
        self._source = RulesSource(config)
        self._check_counts(self._source.rules)
        self.response_writer: ResponseWriter = ResponseWriter(
            headers, expose=get("expose", False), denied=get("denied")
        )
        client_options = {name: options[name] for name in ("ipv6_prefix", "unknown", "key") if name in options}
        self.client_identifier: ClientIdentifier = ClientIdentifier(
            trusted_proxies, self._source.rules, **client_options
        )
        self.root_path: str = get("root_path", "")
        self.drops_messages: bool = get("on_message", "close") == "drop"
        admin = get("admin", True)
        self.admin_path: str | None = ADMIN_PATH if admin is True else admin or None
        self.admin_token: str | None = get("admin_token")
        self.opened_store: OpenedStore = OpenedStore.open(store, clock=clock, lease=get("lease"))
        self.store: Store = self.opened_store.store
        self._sets_max_entries = isinstance(store, str) and "max_entries" not in store
        if self.opened_store.owned:
            self.store.limit_groups(self.client_identifier.group_of)
        self.own_clock: Clock | None = clock if clock is not self.store.clock else None
        self.clock: Clock = clock or self.store.clock
        self._tasks = tasks and not self.store.instant
        every = get("log_every", 0)
        self.log: DecisionLog = DecisionLog(log, every=every, burst=get("log_burst", BURST))
        self._throttle = LogThrottle(get("log_burst") or BURST)  # at least some errors are logged
        self.observer: Observer | None = get("observer")
        self.observed = self.observer is not None or every > 0
        self.blocked_clients: TemporaryList = TemporaryList()
        self.allowed_clients: TemporaryList = TemporaryList()
        # Whether every request needs the slow path: custom keys, clients on temporary lists.
        self.special: bool = self.client_identifier.key_function is not None
        self._maintenance_interval = round(get("reload", 1.0) * SECOND)
        self.maintenance_due: int = 0  # the time of the next maintenance
        self.fast_path_until: int = 0  # the fast path is used before this time; 0: never, because of observers
        self._last_maintenance = 0
        self.category_limiters: dict[str, CategoryLimiter] = {}
        self.update_rules(self._source.rules)
        self._next_cleanup_line = 0  # set by the first maintenance
        names = ", ".join(self.category_limiters) or "none"
        if config is None:
            log.info("rate limiter initialized with the default limits, because it has no config: categories %s", names)
        else:
            log.info("rate limiter initialized: categories %s", names)

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _check_counts(self, rules: Rules) -> None:
        """Raise ConfigError if the rules lack a category that the options name."""
        unknown = sorted(self._counts.keys() - {category.name for category in rules.categories})
        if unknown:
            names = ", ".join(category.name for category in rules.categories)
            raise ConfigError(f"unknown category {unknown[0]!r}: expected one of {names}", field="count")

    def update_rules(self, rules: Rules) -> None:
        """Use these rules from now on; clients keep their usage."""
        category_limiters = {}
        for category in rules.categories:
            category_limiter = self.category_limiters.get(category.name)
            if category_limiter is None:
                kind = AsyncLimiter if self._tasks else Limiter
                limiter = kind(category.policy, store=self.store, clock=self.own_clock)
                category_limiter = CategoryLimiter(
                    category, limiter, self.response_writer, self._counts.get(category.name), rules.max_entries
                )
            else:
                category_limiter.update_category(category)
                category_limiter.recent_clients.resize(rules.max_entries)
            category_limiters[category.name] = category_limiter
        self.rules = rules
        self.by_method: bool = rules.by_method  # cached here for speed
        self.category_limiters = category_limiters
        self.idle: bool = self._source.is_file and not rules.enabled  # no decisions, but the file may change
        if self._sets_max_entries:
            self.store.limit_entries(rules.max_entries)
        self.client_identifier.update_rules(rules)
        self.known_clients: dict[str | None, RequestClient] = self.client_identifier.by_peer  # cached here for speed
        self.targets: dict[object, RequestTarget | None] = {}  # a new one: see ClientIdentifier.update_rules

    def run_maintenance(self, now: int) -> None:
        """Reload the file if it has changed, and remove expired clients."""
        self.maintenance_due = now + self._maintenance_interval
        self.fast_path_until = 0 if self.observed else self.maintenance_due
        self.log.flush(now)
        # All clients are checked once per interval, a few at a time, so that no request waits for a full scan.
        fraction = (now - self._last_maintenance) / SECOND / self.rules.cleanup_interval
        self._last_maintenance = now
        for category_limiter in self.category_limiters.values():
            category_limiter.recent_clients.check_some(now, fraction)
        self._log_cleanup(now)
        self.blocked_clients.remove_expired(now)
        self.allowed_clients.remove_expired(now)
        self.update_special()
        if self._source.is_file:
            self._reload(self._source.changed())

    def _log_cleanup(self, now: int) -> None:
        """Log the number of active clients once per cleanup interval."""
        if now < self._next_cleanup_line:
            return
        if self._next_cleanup_line and log.isEnabledFor(logging.INFO):
            recent = (each.recent_clients.last_decisions for each in self.category_limiters.values())
            log.info("rate limit cleanup: %d active entries", sum(map(len, recent)))
        self._next_cleanup_line = now + round(self.rules.cleanup_interval * SECOND)

    def run_idle_maintenance(self) -> None:
        """Check the file while limits are disabled, so that it can enable them again."""
        now = self.now()
        if now >= self.maintenance_due:
            self.run_maintenance(now)

    def update_special(self) -> None:
        """Update whether requests need the slow path; they do not while the temporary lists are empty."""
        has_listed_clients = bool(self.blocked_clients or self.allowed_clients)
        self.special = has_listed_clients or self.client_identifier.key_function is not None

    def reload(self) -> str | None:
        """Reload the file now; return the error, or None."""
        self._reload(self._source.read())
        return self._source.error

    def _reload(self, rules: Rules | None) -> None:
        if rules is None:
            return
        try:
            self._check_counts(rules)
        except ConfigError as error:
            self._source.reject(error)
        else:
            self.update_rules(rules)

    # ---- targets -----------------------------------------------------------------------------------------------------

    def find_target(
        self, cache_key: tuple[str | None, ...], methods: tuple[str, ...], routes: Sequence[Route], template: str | None
    ) -> RequestTarget | None:
        """Find the target of a request and cache it under `cache_key`; None if the request is not limited."""
        found = self._match_target(methods, routes, template)
        if sum(map(len, filter(None, cache_key))) <= MAX_CACHED_PATH_LENGTH:
            if len(self.targets) >= MAX_CACHED_TARGETS:
                self.targets.clear()
            self.targets[cache_key] = found
        return found

    def _match_target(
        self, methods: tuple[str, ...], routes: Sequence[Route], template: str | None
    ) -> RequestTarget | None:
        target = self._make_target(self.rules.matches(routes, methods, template))
        path, prefixes, _ = routes[0]
        if self.admin_path is None or self.admin_path not in (path, *(prefix + path for prefix in prefixes)):
            return target
        # The admin endpoint is limited only if the rules name its default path; at another path it never is.
        if target is None or self.admin_path != ADMIN_PATH:
            return RequestTarget(None, 0, special=True, admin=True)
        return target._replace(special=True, admin=True)

    def find_message_target(self, routes: Sequence[Route]) -> RequestTarget | None:
        """Find the target of the messages of a websocket; None if they are not limited."""
        return self._make_target(self.rules.message_matches(routes))

    def _make_target(self, matches: tuple[Match, ...]) -> RequestTarget | None:
        if not matches:
            return None
        (category_limiter, cost), *more = [
            (self.category_limiters[match.category.name], match.cost) for match in matches
        ]
        return RequestTarget(category_limiter, cost, special=category_limiter.reserves or bool(more), more=tuple(more))

    # ---- decisions ---------------------------------------------------------------------------------------------------

    def record_decision(
        self, category_limiter: CategoryLimiter, key: Key, cost: Cost, decision: Decision, method: str, path: str
    ) -> bool:
        """Record a decision; return whether the request is allowed.

        The middlewares do this inline on the fast path: a known client is allowed, without observers and before
        `fast_path_until`.
        """
        category_limiter.recent_clients.record(key, decision)
        now = decision.at
        if now >= self.maintenance_due:
            self.run_maintenance(now)
        allowed = self.is_allowed(key, decision)
        if allowed:
            category_limiter.allowed += 1
        else:
            category_limiter.denied += 1
        if decision.allowed == allowed and (self.observed or not decision.within_limits):
            self.notify(category_limiter.limiter.policy, key, cost, decision, method, path)
        return allowed

    def is_allowed(self, key: Key, decision: Decision) -> bool:
        """Return whether a request is allowed: always, for clients without an address if `unknown` is "allow"."""
        return decision.allowed or (key is UNKNOWN and self.client_identifier.allows_unknown)

    def notify(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Pass a decision to the log and the observer."""
        if self.observer is None and not log.isEnabledFor(logging.INFO if decision.within_limits else logging.WARNING):
            return  # nothing to notify; keeps floods of denials cheap
        costs = policy.one if cost == 1 else policy.costs(cost)
        record = Record("acquire", policy, key, costs, decision, f"{method} {path}")
        self.log(record)
        if self.observer is not None:
            self.observer(record)

    def check_flow(self, request: Request, target: RequestTarget, client: RequestClient) -> CallFlow[LimitOutcome]:
        """Decide about a request, with all special cases."""
        key = self.client_identifier.choose_key(request, client.key or UNKNOWN)
        if target.category_limiter is not None and (self.blocked_clients or self.allowed_clients or client.blocked):
            now = self.now()
            if self.allowed_clients.expires_at(key, client.address, now):
                return LimitOutcome(allowed=True, key=key)
            until = self._blocked_until(key, client, now)
            if until:
                return self._deny_blocked(request, target.category_limiter, key, now, until)
        charged: list[CategoryCharge] = []
        for category_limiter, cost in target.charges:
            try:
                charge = yield from charge_flow(
                    category_limiter, key, cost, reserve=category_limiter.reserves or bool(target.more)
                )
            except RateLimitError as error:
                outcome = self.handle_store_error(category_limiter, error)
                if outcome.allowed:
                    continue
                yield from cancel_flow(charged)
                return outcome
            if not self.is_allowed(key, charge.decision):
                yield from cancel_flow(charged)
                self.record_decision(category_limiter, key, cost, charge.decision, request.method, request.path)
                return LimitOutcome(allowed=False, decision=charge.decision, key=key, category_limiter=category_limiter)
            charged.append(charge)
        for charge in charged:
            self.record_decision(
                charge.category_limiter, key, charge.cost, charge.decision, request.method, request.path
            )
        if not charged:
            return LimitOutcome(allowed=True, key=key)
        decision = combine_decisions([charge.decision for charge in charged])
        open_charges = [charge for charge in charged if charge.reservation is not None]
        response_charge = ResponseCharge(open_charges, key, request) if open_charges else None
        return LimitOutcome(allowed=True, decision=decision, key=key, response_charge=response_charge)

    def check_message_flow(self, target: RequestTarget, client: RequestClient, key: Key, path: str) -> CallFlow[bool]:
        """Decide about a message of a websocket; the lists may have changed since it was opened."""
        if self.blocked_clients or self.allowed_clients:
            now = self.now()
            if self.allowed_clients.expires_at(key, client.address, now):
                return True
            if self.blocked_clients.expires_at(key, client.address, now):
                return False
        charged: list[CategoryCharge] = []
        for category_limiter, cost in target.charges:
            try:
                charge = yield from charge_flow(category_limiter, key, cost, reserve=False)
            except RateLimitError as error:
                if self.handle_store_error(category_limiter, error).allowed:
                    continue
            else:
                if self.record_decision(category_limiter, key, cost, charge.decision, MESSAGE_METHOD, path):
                    charged.append(charge)
                    continue
            yield from refund_flow(charged, key)
            return False
        return True

    def _blocked_until(self, key: Key, client: RequestClient, now: int) -> int:
        until = self.blocked_clients.expires_at(key, client.address, now) or 0
        # Clients blocked by the file stay blocked until the file changes.
        return max(until, now + round(self.rules.cleanup_interval * SECOND)) if client.blocked else until

    def _deny_blocked(
        self, request: Request, category_limiter: CategoryLimiter, key: Key, now: int, until: int
    ) -> LimitOutcome:
        limits = category_limiter.category.policy.limits
        decision = Decision.of_views(now, limits, ((0, until - now, until - now),) * len(limits), within_limits=False)
        category_limiter.denied += 1
        self.notify(category_limiter.limiter.policy, key, {}, decision, request.method, request.path)
        return LimitOutcome(
            allowed=False, decision=decision, key=key, kind="abnormal-usage-detected", category_limiter=category_limiter
        )

    def handle_store_error(self, category_limiter: CategoryLimiter, error: Exception) -> LimitOutcome:
        """Handle a store error in a category."""
        return self.handle_policy_store_error(category_limiter.category.policy, error)._replace(
            category_limiter=category_limiter
        )

    def handle_policy_store_error(self, policy: Policy, error: Exception) -> LimitOutcome:
        """Log a store error; allow or deny by the policy's `on_store_error`."""
        self.log_throttled(logging.ERROR, "%s: the store could not decide: %s", policy.name, error)
        if policy.on_store_error != "deny":
            return LimitOutcome(allowed=True)
        again = ((0, SECOND, SECOND),) * len(policy.limits)
        return LimitOutcome(
            allowed=False, decision=LocalDecision.of_views(self.now(), policy.limits, again, within_limits=False)
        )

    def log_throttled(self, level: int, message: str, *args: object) -> None:
        """Log a message that any client can cause, at a limited rate."""
        now = self.now()
        self._log_suppressed(now)
        if self._throttle.may_write((level, message), now):
            log.log(level, message, *args)

    def _log_suppressed(self, now: int | None) -> None:
        for name, lines in self._throttle.unwritten(now):
            level, message = name if isinstance(name, tuple) else (logging.WARNING, "other messages")
            log.log(level, "%s: %d more within one second", message.replace("%s", "…"), lines)

    def flush(self) -> None:
        """Log the number of suppressed lines."""
        self.log.flush()
        self._log_suppressed(None)

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return self.clock.ns() // 1000
