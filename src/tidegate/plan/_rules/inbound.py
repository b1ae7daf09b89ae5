"""Replays requests against the rules of a middleware: the middleware's own `RequestLimiter` decides.

Each request is decided as a middleware decides it, at once or by the flow; charges that depend on the response are
settled when it ended.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from tidegate._runtime.flow import run
from tidegate.errors import ConfigError
from tidegate.inbound._client.request import Request
from tidegate.inbound._limiting.charges import perform
from tidegate.inbound._limiting.options import MAX_RELOAD_SECONDS
from tidegate.inbound._limiting.request_limiter import RequestLimiter
from tidegate.inbound._limiting.settle import final_costs, settle_flow
from tidegate.inbound._rules.config import load_rules
from tidegate.inbound._rules.path_readings import wsgi_routes
from tidegate.plan._rules.base import MAX_SUBJECTS, UNLIMITED, Outcome, PolicyDecision
from tidegate.plan._rules.endpoints import endpoint_name
from tidegate.plan._uncertainty import shift_rules
from tidegate.stores._memory.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tidegate.core._limit import Limit
    from tidegate.inbound._client.identify import ClientIdentifier, RequestClient
    from tidegate.inbound._limiting.charges import MadeCharge
    from tidegate.inbound._limiting.request_targets import RequestTarget
    from tidegate.inbound._rules.model import Category
    from tidegate.plan._clock import ReplayClock
    from tidegate.plan._logs.batch import LogSender, LogSubject

MAX_KEYS: Final = 50_000_000  # as in a shared store: no key shares the count of another because there is no room
ALLOWED_STATUS: Final = 200  # of a request that was answered 429 and that the rules allow
TOO_MANY_REQUESTS: Final = 429


class InboundRules:
    """The rules of a middleware."""

    def __init__(
        self,
        config: str | Path | Mapping[str, object] | None,
        clock: ReplayClock,
        *,
        trusted_proxies: Iterable[str] = (),
        has_durations: bool = True,
        shift: int = 0,
    ) -> None:
        """Read the configuration as a middleware does; raises ConfigError. `shift`: see `plan.uncertainty`."""
        self.clock: ReplayClock = clock
        rules = load_rules(config)
        if not has_durations and any(
            limit.rules.holds_slots for category in rules.categories for limit in category.policy.limits
        ):
            raise ConfigError(
                "a limit of concurrent requests can only be replayed from a log with durations, such as $request_time",
                file=str(config) if not isinstance(config, dict) else None,
            )
        store = MemoryStore(clock=clock, max_entries=MAX_KEYS)
        plan: dict[str, Any] = {"plan": no_plan} if any(category.plans for category in rules.categories) else {}
        self.limiter: RequestLimiter = RequestLimiter(
            config,
            store,
            list(trusted_proxies),
            log_burst=0,
            reload=MAX_RELOAD_SECONDS,
            admin=False,
            **plan,
        )
        if shift:
            self.limiter.update_rules(shift_rules(self.limiter.rules, shift))
        self.client_identifier: ClientIdentifier = self.limiter.client_identifier
        self.limits: Mapping[str, tuple[Limit, ...]] = {
            category.name: category.policy.limits for category in (*rules.categories, *rules.extra_categories)
        }
        self.patterns: dict[str, list[str]] = {each.name: patterns_of(each) for each in rules.categories}
        self.notes: list[str] = []
        if plan:
            self.notes.append("the log does not say which plan a client has: the limits without a plan were used")
        if not rules.enabled:
            self.notes.append("the rules are disabled (enabled: false): nothing is limited")
        self._subjects: dict[LogSubject, InboundSubject] = {}
        self._unsettled: list[tuple[int, int, Sequence[MadeCharge], Request, int]] = []
        self._order = count()

    def find_key(self, sender: LogSender) -> RequestClient:
        """Return the client, as the middleware identifies it."""
        headers = [("x-forwarded-for", sender.forwarded)] if sender.forwarded else []
        return self.client_identifier.find(sender.name or None, headers)

    def name_of(self, key: object) -> str:
        """Return the key of a client for people."""
        client: RequestClient = key  # type: ignore[assignment]  # as `find_key` returns it
        return str(client.key if client.key is not None else client.address)

    def find(self, subject: LogSubject) -> InboundSubject:
        """Return what a method and a path are charged."""
        found = self._subjects.get(subject)
        if found is None:
            if len(self._subjects) >= MAX_SUBJECTS:
                self._subjects.clear()
            found = self._subjects[subject] = InboundSubject(self, subject)
        return found

    @property
    def due(self) -> int | None:
        """When the next response ends whose charges have to be settled."""
        return self._unsettled[0][0] if self._unsettled else None

    def settle(self) -> None:
        """Settle the charges of responses that have ended."""
        now = self.clock.steady()
        while self._unsettled and self._unsettled[0][0] <= now:
            settle_charges(*heapq.heappop(self._unsettled)[2:])

    def settle_later(self, made: Sequence[MadeCharge], request: Request, status: int, duration: int) -> None:
        """Settle charges when the response has ended; without a duration, at once."""
        if status in (0, TOO_MANY_REQUESTS):
            status = ALLOWED_STATUS
        if duration <= 0:
            settle_charges(made, request, status)
        else:
            heapq.heappush(self._unsettled, (self.clock.steady() + duration, next(self._order), made, request, status))

    def close(self) -> None:
        """Close the store."""
        self.limiter.store.close()


class InboundSubject:
    """A method and a path: its target, and the names of the categories that it is charged to."""

    def __init__(self, rules: InboundRules, subject: LogSubject) -> None:
        """Find the target, as a middleware does."""
        method, path = subject
        self._rules = rules
        self._limiter = rules.limiter
        self._method, self._path = method, path
        self._target: RequestTarget | None = rules.limiter.targets.find(
            (method, path), (method,), wsgi_routes(path, ""), None
        )
        self.limited: bool = self._target is not None
        categories = () if self._target is None else self._target.categories
        self.policies: tuple[str, ...] = tuple(each.category.name for each, _ in categories)
        self.endpoint: str = endpoint_name(method, path, [each.category for each, _ in categories])

    def decide(self, key: object, status: int, duration: int, cost: Mapping[str, int] | int) -> Outcome:
        """Decide about a request as a middleware does; its cost is what the rules say."""
        del cost
        client: RequestClient = key  # type: ignore[assignment]  # as `find_key` returns it
        target = self._target
        if target is None:
            return UNLIMITED
        result = self._limiter.decide_now(target, client, self._method, self._path, None)
        if result is None:
            request = self._request(client)
            result = run(self._limiter.check_flow(request, target, client), perform)
        prepared = result.prepared
        if prepared is None:
            made = [PolicyDecision(each.charge.policy.name, each.decision) for each in result.decided]
            reserves = result.allowed and any(each.charge.reserves for each in result.decided)
        else:
            made, reserves = list(map(PolicyDecision, self.policies, result.decisions)), prepared.reserves
        if reserves:
            self._rules.settle_later(result.decided, self._request(client), status, duration)
        if result.allowed:
            return Outcome(True, made)  # noqa: FBT003 - by position: this runs for every request
        denied = [PolicyDecision(each.charge.policy.name, each.decision) for each in result.denials]
        blocked = result.block is not None and not result.decided
        return Outcome(allowed=False, charged=made, denied_by=denied, blocked=blocked)

    def _request(self, client: RequestClient) -> Request:
        return Request(self._method, self._path, client.address, {}, lambda _: None, {})


def settle_charges(made: Sequence[MadeCharge], request: Request, status: int) -> None:
    """Settle the charges of a request whose response had this status."""
    run(settle_flow(made, final_costs([each.charge for each in made], request, status)), perform)


def patterns_of(category: Category) -> list[str]:
    """Return the endpoints of a category, each with its method; `*` stands for all methods."""
    return [f"{method} {endpoint.path}" for endpoint in category.endpoints for method in endpoint.methods or ("*",)]


def no_plan(_request: Request) -> None:
    """Return that a client has no plan: a log does not say it."""
