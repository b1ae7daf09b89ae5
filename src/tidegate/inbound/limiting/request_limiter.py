"""Decides about requests, for ASGI and WSGI: identifies the client, finds the category, charges it.

Nothing here waits or awaits; calls that may have to be awaited are yielded as steps.

    path, method ──► RequestTarget: CategoryLimiter, cost ─┐
    peer, headers ─► RequestClient: key ───────────────────┴► decide ──► Decision ──► record_decision ──► allow or deny

The middlewares run this sequence inline for common requests, because its cost is added to every request. `check_flow`
is the complete version: blocked clients, custom keys, several categories, charges that depend on the response.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from operator import call
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError
from tidegate.flow import run
from tidegate.inbound.client.address import UNKNOWN
from tidegate.inbound.client.denial_blocks import DenialBlocks
from tidegate.inbound.client.identify import ClientIdentifier
from tidegate.inbound.client.temporary_list import TemporaryList
from tidegate.inbound.limiting.category_limiter import CategoryLimiter, ResponseCharge, open_charges
from tidegate.inbound.limiting.charges import RequestCharge, charge_all_flow
from tidegate.inbound.limiting.options import check_options
from tidegate.inbound.limiting.plan_limiters import PlanLimiters
from tidegate.inbound.limiting.reset import reset_all_flow
from tidegate.inbound.limiting.route_limiters import RouteLimiters
from tidegate.inbound.responses.response import BlockedDecision, ResponseWriter
from tidegate.inbound.rules.block_rule import read_block
from tidegate.inbound.rules.extra_limits import ExtraLimits
from tidegate.inbound.rules.model import ADMIN_PATH, DEFAULT_LIMITS, MESSAGE_METHOD
from tidegate.inbound.rules.reload import RulesSource
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.observe import Record
from tidegate.observe.logs import DEFAULT_LOG_BURST, DecisionLog, LogThrottle
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
    from tidegate.inbound.limiting.charges import ChargeResult, DecidedCharge
    from tidegate.inbound.limiting.route_hooks import RouteHooks
    from tidegate.inbound.responses.prepared_fields import FieldWriter
    from tidegate.inbound.rules.model import Category, Match, Rules
    from tidegate.inbound.rules.path_readings import Route
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores import Store
    from tidegate.stores.base import AcquireTogether

log: logging.Logger = logging.getLogger("tidegate.inbound")

MAX_CACHED_TARGETS: Final = 4096  # the cache is cleared when it is full
MAX_CACHED_PATH_LENGTH: Final = 256  # targets of longer paths are not cached
METHOD_AND_PATH: Final = 2  # the length of the cache key of most requests
MISSING: Final[Any] = object()
ABNORMAL_USAGE: Final = "abnormal-usage-detected"  # the kind of denials of blocked clients


@dataclass(frozen=True, slots=True)
class RequestTarget:
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
    response_charge: ResponseCharge | None = None
    kind: Kind = "quota-exceeded"
    category_limiter: CategoryLimiter | None = None
    made: Sequence[DecidedCharge] = ()


def make_response_charge(result: ChargeResult, request: Request) -> ResponseCharge | None:
    """Return the charges of an allowed request that its response may change; None if there are none."""
    charges = open_charges(result.decided)
    return ResponseCharge(charges, request) if charges else None


def charge_nothing(keys: Sequence[Key]) -> None:
    """Charge nothing and return None: used where there is no fast path."""
    del keys


class RequestLimiter:
    """The logic that both middlewares share."""

    def __init__(
        self,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style | Mapping[str, str] = "x",
        clock: Clock | None = None,
        *,
        tasks: bool = False,
        raw: bool = False,
        **options: Any,  # noqa: ANN401 - Options, passed by the middlewares
    ) -> None:
        """Read the configuration and open the store; raises ConfigError.

        `tasks`: the caller awaits the limiters; `raw`: it writes header fields as bytes.
        """
        check_options(options)
        get = options.get
        self._counts: Mapping[str, Counts] = get("count") or {}
        self.plan_limiters: PlanLimiters = PlanLimiters(get("plan"))
        self._block_option = read_block(get("block_after"), get("block_for"))
        self.denial_blocks: DenialBlocks | None = None
        self.disabled: bool = False  # by `tidegate.inbound.testing`
        extra = ExtraLimits(get("application_limits"), get("default_limits"))
        self._source = RulesSource(config, extra)
        self._check_counts(self._source.rules)
        self.response_writer: ResponseWriter = ResponseWriter(
            headers, expose=get("expose", False), denied=get("denied"), html=get("html")
        )
        client_options = {
            name: options[name] for name in ("ipv4_prefix", "ipv6_prefix", "unknown", "key") if name in options
        }
        self.client_identifier: ClientIdentifier = ClientIdentifier(
            trusted_proxies, self._source.rules, **client_options
        )
        self._exempt_when = get("exempt_when")
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
        self.tasks: bool = tasks and not self.store.instant
        self.raw: bool = raw
        self.write: FieldWriter = self.response_writer.raw_fields if raw else self.response_writer.fields
        every = get("log_every", 0)
        self.log: DecisionLog = DecisionLog(log, every=every, burst=get("log_burst", DEFAULT_LOG_BURST))
        self._throttle = LogThrottle(get("log_burst") or DEFAULT_LOG_BURST)  # at least some errors are logged
        self.observer: Observer | None = get("observer")
        self.observed = self.observer is not None or every > 0
        self.blocked_clients: TemporaryList = TemporaryList()
        self.allowed_clients: TemporaryList = TemporaryList()
        self.denied_by_limit: Counter[str] = Counter()  # by the name of the policy: a category, or a route
        self.special: bool = False  # whether every request needs the slow path: see update_special
        self._maintenance_interval = round(get("reload", 1.0) * SECOND)
        self.maintenance_due: int = 0  # the time of the next maintenance
        self.fast_path_until: int = 0  # the fast path is used before this time; 0: never, because of observers
        self._last_maintenance = 0
        self.category_limiters: dict[str, CategoryLimiter] = {}
        self.route_hooks: RouteHooks | None = None  # of the application; they depend on the rules
        self.update_rules(self._source.rules)
        self._next_cleanup_line = 0  # set by the first maintenance
        self._log_start(has_config=config is not None or bool(extra))

    def _log_start(self, *, has_config: bool) -> None:
        """Log the categories, and which of them are defaults that the configuration does not name."""
        names, defaulted = ", ".join(self.category_limiters) or "none", self.rules.defaulted
        if not has_config:
            log.info("rate limiter initialized with the default limits, because it has no config: categories %s", names)
        elif defaulted:
            message = "rate limiter initialized: categories %s; with their default limits: %s"
            log.info(message, names, ", ".join(defaulted))
        else:
            log.info("rate limiter initialized: categories %s", names)

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _check_counts(self, rules: Rules) -> None:
        """Raise ConfigError if the rules lack a category that the options name, or need an option."""
        self.plan_limiters.check(rules)
        extra = (rules.application_limits, rules.default_limits)
        known = [category.name for category in (*rules.categories, *extra) if category is not None]
        unknown = sorted(self._counts.keys() - set(known))
        if unknown:
            raise ConfigError(f"unknown category {unknown[0]!r}: expected one of {', '.join(known)}", field="count")

    def update_rules(self, rules: Rules) -> None:
        """Use these rules from now on; clients keep their usage."""
        if self.disabled:
            rules = replace(rules, enabled=False)
        category_limiters = {}
        for category in (*rules.categories, *rules.extra_categories):
            category_limiter = self.category_limiters.get(category.name)
            if category_limiter is None:
                category_limiter = self._make_category_limiter(category, rules.max_entries)
            else:
                category_limiter.update_category(category)
                category_limiter.recent_clients.resize(rules.max_entries)
            category_limiters[category.name] = category_limiter
        self.rules = rules
        self.route_limiters: RouteLimiters = RouteLimiters(rules.default_limits, self._make_limiter)
        self.by_method: bool = rules.by_method  # cached here for speed
        self.category_limiters = category_limiters
        self.idle: bool = self._source.is_file and not rules.enabled  # no decisions, but the file may change
        if self._sets_max_entries:
            self.store.limit_entries(rules.max_entries)
        self.client_identifier.update_rules(rules)
        # New ones: see ClientIdentifier.update_rules. `plain_targets` are those of requests that need nothing special.
        self.targets: dict[object, RequestTarget | None] = {}
        self.plain_targets: dict[tuple[str | None, ...], RequestTarget] = {}
        self.plan_limiters.update(
            category_limiters, partial(self._make_category_limiter, max_clients=rules.max_entries)
        )
        block = self._block_option or rules.block
        if block is None:
            self.denial_blocks = None
        elif self.denial_blocks is None:
            self.denial_blocks = DenialBlocks(block, self._make_limiter)
        else:
            self.denial_blocks.update(block)
        self.update_special()
        if self.route_hooks is not None:
            self.route_hooks.invalidate()

    def _make_limiter(self, policy: Policy) -> Limiter | AsyncLimiter:
        return (AsyncLimiter if self.tasks else Limiter)(policy, store=self.store, clock=self.own_clock)

    def _make_category_limiter(self, category: Category, max_clients: int) -> CategoryLimiter:
        count = self._counts.get(category.name)
        limiter = self._make_limiter(category.policy)
        return CategoryLimiter(category, limiter, self.prepare_fast_path, count, max_clients)

    def prepare_fast_path(self, *policies: Policy) -> tuple[AcquireTogether, FieldWriter]:
        """Return what charges a key of each policy in one step, and what writes the header fields of that.

        A store that cannot do this, or an observer, needs the complete path: then the function always returns None.
        """
        acquire = None
        if self.store.instant and self.own_clock is None and not self.observed:
            acquire = self.store.fast_together(policies)
        if acquire is None or any(policy.mode != "enforce" for policy in policies):
            acquire = charge_nothing
        return acquire, self.response_writer.tightest_writer(policies, raw=self.raw)

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
        if self.route_hooks is not None:
            self.route_hooks.update()
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
        """Update whether requests need the slow path: custom keys, plans, blocks, clients on temporary lists."""
        has_functions = self.client_identifier.key_function is not None or bool(self.plan_limiters)
        self.special = self.has_special_clients or has_functions or self._exempt_when is not None
        # The clients that the middlewares may pass to the fast path: none if every request needs the slow path.
        self.plain_clients: dict[str, RequestClient] = {} if self.special else self.client_identifier.by_peer

    @property
    def has_special_clients(self) -> bool:
        """Whether a client may be blocked, or exempted for a time."""
        return bool(self.blocked_clients or self.allowed_clients) or self.denial_blocks is not None

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
                self.plain_targets.clear()
            self.targets[cache_key] = found
            is_plain = found is not None and not found.special and not self.by_method
            if found is not None and is_plain and len(cache_key) == METHOD_AND_PATH:
                self.plain_targets[cache_key] = found
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
        return replace(target, special=True, admin=True)

    def find_message_target(self, routes: Sequence[Route]) -> RequestTarget | None:
        """Find the target of the messages of a websocket; None if they are not limited."""
        return self._make_target(self.rules.message_matches(routes))

    def _make_target(self, matches: tuple[Match, ...]) -> RequestTarget | None:
        if not matches:
            return None
        (category_limiter, cost), *more = [
            (self.category_limiters[match.category.name], match.cost) for match in matches
        ]
        by_route = category_limiter.category.name == DEFAULT_LIMITS  # its count is not known yet
        special = category_limiter.reserves or by_route or bool(more)
        return RequestTarget(category_limiter, cost, special=special, more=tuple(more))

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
        """Count a denial, and pass a decision to the log and the observer."""
        if not decision.allowed:
            self.denied_by_limit[policy.name] += 1
        if self.observer is None and not log.isEnabledFor(logging.INFO if decision.within_limits else logging.WARNING):
            return  # nothing to notify; keeps floods of denials cheap
        costs = policy.one if cost == 1 else policy.costs(cost)
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
        return self.make_charges(self.plan_limiters.choose(request, target), key)

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
            result = yield from self.count_denial_flow(result, prepared[0].key)
            category_limiter = result.denials[0].charge.category_limiter
            return LimitOutcome(allowed=False, decision=result.decision, category_limiter=category_limiter)
        return LimitOutcome(
            allowed=True,
            decision=result.decision,
            response_charge=make_response_charge(result, request),
            made=result.decided,
        )

    def check_message_flow(self, target: RequestTarget, client: RequestClient, key: Key, path: str) -> CallFlow[bool]:
        """Decide about a message of a websocket; the lists may have changed since it was opened."""
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

    def disable(self, *, disabled: bool = True) -> None:
        """Disable all limits, or enable them again; `tidegate.inbound.testing` does this."""
        self.disabled = disabled
        self.update_rules(self._source.rules)

    def reset_all(self) -> None:
        """Reset the usage of all clients, and unblock clients that were denied too often; see `reset_all_flow`."""
        run(reset_all_flow(self, self.store.apply), call)

    def reset_all_flow(self) -> CallFlow[int]:
        """Reset all clients as `reset_all` does; the caller awaits the steps if it awaits the limiters."""
        return reset_all_flow(self, self.store.apply_async if self.tasks else self.store.apply)

    def limiters_of(self, category: str) -> tuple[CategoryLimiter, ...]:
        """Return the limiters of a category: its own and those of its plans."""
        return (self.category_limiters[category], *self.plan_limiters.of(category))

    def all_limiters_of(self, category: str) -> list[Limiter | AsyncLimiter]:
        """Return all limiters of a category: of its plans, and of routes if it has the default limits."""
        routes = self.route_limiters.limiters if category == DEFAULT_LIMITS else ()
        return [*(each.limiter for each in self.limiters_of(category)), *routes]

    def flush(self) -> None:
        """Log the number of suppressed lines."""
        self.log.flush()
        self._log_suppressed(None)

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return self.clock.ns() // 1000
