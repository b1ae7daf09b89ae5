"""The options and rules of a middleware: what they become, how the file is reloaded, and the regular maintenance."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidegate._limiter.limiter import Limiter
from tidegate._policy import Policy
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError
from tidegate.inbound._client.denial_blocks import DenialBlocks
from tidegate.inbound._client.identify import ClientIdentifier
from tidegate.inbound._client.temporary_list import TemporaryList
from tidegate.inbound._limiting.category_limiter import CategoryLimiter, RouteLimiters
from tidegate.inbound._limiting.matched_route import RouteFinder
from tidegate.inbound._limiting.options import check_combinations, check_options
from tidegate.inbound._limiting.plan_limiters import PlanLimiters
from tidegate.inbound._limiting.request_targets import RequestTargets
from tidegate.inbound._limiting.throttled_log import ThrottledLog
from tidegate.inbound._limiting.worker_processes import count_workers
from tidegate.inbound._responses.response import ResponseWriter
from tidegate.inbound._rules.block_rule import read_block
from tidegate.inbound._rules.closed_limit import is_closed
from tidegate.inbound._rules.extra_limits import ExtraLimits
from tidegate.inbound._rules.model import ADMIN_PATH, APPLICATION_LIMITS, DEFAULT_LIMITS, Category
from tidegate.inbound._rules.reload import RulesSource
from tidegate.observe.logs import DEFAULT_LOG_BURST, DecisionLog
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tidegate._runtime.clock import Clock
    from tidegate.headers import Style
    from tidegate.inbound._client.address import TrustedProxies
    from tidegate.inbound._limiting.category_limiter import Counts
    from tidegate.inbound._limiting.route_limit import RouteLimit
    from tidegate.inbound._rules.extra_limits import OneOrMoreLimits
    from tidegate.inbound._rules.model import ResetTime, Rules
    from tidegate.observe import Observer
    from tidegate.stores import Store

log: logging.Logger = logging.getLogger("tidegate.inbound")

EXTRA_LIMITS: Final = (APPLICATION_LIMITS, DEFAULT_LIMITS)


def _describe(category_limiter: CategoryLimiter) -> str:
    """Return a category with its limits, for the log."""
    limits = " and ".join(f"{limit.quota}/{limit.period}" for limit in category_limiter.limits)
    return f"{category_limiter.category.name} ({limits})"


class ConfiguredLimiter:
    """What a middleware is configured to do; `RequestLimiter` decides about requests.

    Both are one object, because the middlewares read its attributes at every request.
    """

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
        check_options(options, coroutines=tasks)
        check_combinations(options, headers)
        get = options.get
        self.plan_limiters: PlanLimiters = PlanLimiters(get("plan"))
        self._block_option = read_block(get("block_after"), get("block_for"))
        self._reset_option: ResetTime | None = get("reset_time")
        self.denial_blocks: DenialBlocks | None = None
        self.disabled: bool = False  # by `tidegate.inbound.testing`
        # `application_limits` and `default_limits` that are given as `limit(…)`, by the name of the option.
        self.middleware_limits: dict[str, RouteLimit] = {
            name: options[name].for_middleware(name, coroutines=tasks)
            for name in EXTRA_LIMITS
            if getattr(get(name), "limits_routes", False)
        }
        self._counts: Mapping[str, Counts] = self._read_counts(get("count") or {})
        extra = ExtraLimits(*(self._category_option(name, get(name)) for name in EXTRA_LIMITS))
        self._source = RulesSource(config, extra)
        self._check_counts(self._source.rules)
        self.response_writer: ResponseWriter = ResponseWriter(headers, denied=get("denied"))
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
        self._prepare_store()
        self.own_clock: Clock | None = clock if clock is not self.store.clock else None
        self.clock: Clock = clock or self.store.clock
        self.tasks: bool = tasks and not self.store.instant
        self.raw: bool = raw
        every = get("log_every", 0)
        self.log: DecisionLog = DecisionLog(log, every=every, burst=get("log_burst", DEFAULT_LOG_BURST))
        burst = get("log_burst") or DEFAULT_LOG_BURST  # at least some errors are logged
        self.throttle: ThrottledLog = ThrottledLog(burst, self.now)
        self.observer: Observer | None = get("observer")
        self.observed = self.observer is not None or every > 0
        self.blocked_clients: TemporaryList = TemporaryList()
        self.allowed_clients: TemporaryList = TemporaryList()
        self.denied_by_limit: Counter[str] = Counter()  # by the name of the policy: a category, or a route
        self.special: bool = False  # the same as `has_special_clients`, cached for speed
        self._maintenance_interval = round(get("reload", 1.0) * SECOND)
        self.maintenance_due: int = 0  # the time of the next maintenance
        self._last_maintenance = 0
        self.category_limiters: dict[str, CategoryLimiter] = {}
        self.routes: RouteFinder = RouteFinder()  # of the application; the middleware replaces it
        self.update_rules(self._source.rules)
        self._next_cleanup_line = 0  # set by the first maintenance
        self._log_start(has_config=config is not None or bool(extra))

    def _prepare_store(self) -> None:
        """Let the store report outages as this middleware does, and limit the share of each network."""
        self.store.log_outages(log)
        if self.opened_store.owned:
            self.store.limit_groups(self.client_identifier.group_of)

    def _read_counts(self, counts: Mapping[str, Counts]) -> dict[str, Counts]:
        """Return the functions that decide whether a response counts; raises ConfigError if there are two for one."""
        own = {name: limit.count for name, limit in self.middleware_limits.items() if limit.count is not None}
        for name in own.keys() & counts.keys():
            raise ConfigError(f"{name} has a `count` of its own: remove one of them", field="count")
        return {**counts, **own}

    def _category_option(self, name: str, limits: OneOrMoreLimits | None) -> OneOrMoreLimits | Category | None:
        limit = self.middleware_limits.get(name)
        return limits if limit is None else limit.category

    def _log_start(self, *, has_config: bool) -> None:
        """Log the categories and their limits, and which of them are defaults that the configuration does not name."""
        names, defaulted = ", ".join(map(_describe, self.category_limiters.values())) or "none", self.rules.defaulted
        if not has_config:
            log.info("rate limiter initialized with the default limits, because it has no config: categories %s", names)
        elif defaulted:
            message = "rate limiter initialized: categories %s; with their default limits: %s"
            log.info(message, names, ", ".join(defaulted))
        else:
            log.info("rate limiter initialized: categories %s", names)
        if not self.rules.enabled:
            log.warning("rate limiter disabled: `enabled` is false, so no request is limited")
            return
        for name, category_limiter in self.category_limiters.items():
            if is_closed(category_limiter.limits):
                log.warning("the limit of category %s is 0: all of its requests are denied", name)
        if self.opened_store.owned and self.store.instant:
            self._warn_of_workers(count_workers())

    @staticmethod
    def _warn_of_workers(workers: int) -> None:
        """Warn if several processes count in memory, each for itself."""
        if workers > 1:
            log.warning(
                "each of the %d worker processes of this server counts in its own memory, so together they allow up to "
                "%d times each limit; to share the counts, set store='redis://…', 'postgresql://…' or 'sqlite:///…'",
                workers,
                workers,
            )

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
        # Headers show when the next permit is available: every decision finds that out.
        self.shows_next_permit: bool = (self._reset_option or rules.reset_time) == "next"
        category_limiters = {}
        for category in (*rules.categories, *rules.extra_categories):
            category_limiter = self._make_category_limiter(category, rules.max_entries)
            if category.name in self.category_limiters:
                category_limiter.replace(self.category_limiters[category.name])
            category_limiters[category.name] = category_limiter
        self.rules = rules
        self.route_limiters: RouteLimiters = RouteLimiters(rules.default_limits, self._make_limiter)
        self.by_method: bool = rules.by_method  # cached here for speed
        self.category_limiters = category_limiters
        self.idle: bool = self._source.is_file and not rules.enabled  # no decisions, but the file may change
        if self._sets_max_entries:
            self.store.limit_entries(rules.max_entries)
        self.client_identifier.update_rules(rules)
        # A new one: see ClientIdentifier.update_rules.
        # What blocked clients are shown if only routes are limited.
        self.blocked_category: CategoryLimiter = CategoryLimiter(
            Category("routes", Policy("routes", "1/1s")), self._make_limiter
        )
        self.targets: RequestTargets = RequestTargets(rules, category_limiters, self.route_limiters, self.admin_path)
        self.plan_limiters.update(
            category_limiters, partial(self._make_category_limiter, max_clients=rules.max_entries)
        )
        # Whether functions of the application are called for every request.
        self.needs_request: bool = bool(self.client_identifier.key_function or self._exempt_when or self.plan_limiters)
        block = self._block_option or rules.block
        if block is None:
            self.denial_blocks = None
        elif self.denial_blocks is None:
            self.denial_blocks = DenialBlocks(block, self._make_limiter)
        else:
            self.denial_blocks.update(block)
        self.update_special()

    def _make_limiter(self, policy: Policy) -> Limiter:
        return Limiter(policy, store=self.store, clock=self.own_clock)

    def _make_category_limiter(self, category: Category, max_clients: int) -> CategoryLimiter:
        count = self._counts.get(category.name)
        return CategoryLimiter(category, self._make_limiter, count, max_clients)

    def run_maintenance(self, now: int) -> None:
        """Reload the file if it has changed, and remove expired clients."""
        self.maintenance_due = now + self._maintenance_interval
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
        if self.routes.update():
            self.targets.clear()
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
        """Cache whether a client may be blocked, or exempted for a time; call it after a change of the lists."""
        self.special = self.has_special_clients

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

    def has_default_limits(self) -> bool:
        """Return whether there are default limits, whose counts depend on the route."""
        return bool(self.route_limiters)

    def disable(self, *, disabled: bool = True) -> None:
        """Disable all limits, or enable them again; `tidegate.inbound.testing` does this."""
        self.disabled = disabled
        self.update_rules(self._source.rules)

    def limiters_of(self, category: str) -> tuple[CategoryLimiter, ...]:
        """Return the limiters of a category: its own and those of its plans."""
        return (self.category_limiters[category], *self.plan_limiters.of(category))

    def all_limiters_of(self, category: str) -> list[Limiter]:
        """Return all limiters of a category: of plans, of routes if it has the default limits, of a `limit(…)`."""
        routes = self.route_limiters.limiters if category == DEFAULT_LIMITS else ()
        given = self.middleware_limits.get(category)
        return [*(each.limiter for each in self.limiters_of(category)), *routes, *(given.limiters if given else ())]

    def metrics(self) -> dict[str, int]:
        """Return the number of recently seen clients by category: those whose windows have not ended."""
        now = self.now()
        return {name: each.recent_clients.remove_expired(now) for name, each in self.category_limiters.items()}

    def flush(self) -> None:
        """Log the number of suppressed lines."""
        self.log.flush()
        self.throttle.flush()

    def now(self) -> int:
        """Return the time in microseconds since 1970."""
        return self.clock.ns() // 1000
