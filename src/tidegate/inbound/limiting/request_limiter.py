"""What stands at the door, for ASGI and WSGI alike: who is the client, which category, what is answered.

Nothing here waits, and only what is handed out as a step may have to be awaited.

    request ─ target ─► Gate and cost ─ client ─► key ─ gate.decide ─► Decision ─ told ─► let in, or denied

The middlewares do the usual case in that order by themselves, since every request pays for it. `admitting` is the same
with everything that may be special about a request: blocked clients, keys of one's own, charges to be corrected.
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
    CategoryLimiter,
    Charged,
    ResponseCharge,
    cancelling,
    charging,
    refunding,
)
from tidegate.inbound.limiting.options import check_options
from tidegate.inbound.responses.response import ResponseWriter, together
from tidegate.inbound.rules.model import ADMIN_PATH, MESSAGE_METHOD
from tidegate.inbound.rules.reload import RulesSource
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.observe import Record
from tidegate.observe.logs import BURST, DecisionLog, LogThrottle
from tidegate.stores import MemoryStore, Store
from tidegate.stores.lease import LeasedStore, read_lease
from tidegate.stores.outage import open_guarded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from tidegate.clock import Clock
    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.address import TrustedProxies
    from tidegate.inbound.client.identify import RequestClient
    from tidegate.inbound.client.request import Request
    from tidegate.inbound.limiting.category_limiter import Counts
    from tidegate.inbound.limiting.flow import Steps
    from tidegate.inbound.rules.model import Match, Rules
    from tidegate.inbound.rules.path_readings import Route
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.lease import Lease

log = logging.getLogger("tidegate.inbound")

MAX_CACHED_TARGETS: Final = 4096  # places that are remembered, so as not to be worked out for each request
MAX_CACHED_PATH_LENGTH: Final = 256  # characters of a path worth remembering
MISSING: Final[Any] = object()


class RequestTarget(NamedTuple):
    """Where a request goes: through a gate, at a cost, and through `more` gates; or (too) to the operator's page."""

    gate: CategoryLimiter | None
    cost: Cost
    special: bool = False  # charged by its response, several times, or for the operator: not the usual way
    admin: bool = False
    more: tuple[tuple[CategoryLimiter, Cost], ...] = ()

    @property
    def charges(self) -> tuple[tuple[CategoryLimiter, Cost], ...]:
        """Every gate, and the cost there."""
        return self.more if self.gate is None else ((self.gate, self.cost), *self.more)


class LimitOutcome(NamedTuple):
    """What becomes of a request, and the decision about it, if there was one; `gate` is the one that said no."""

    let_in: bool
    decision: Decision | None = None
    key: Key = UNKNOWN
    settlement: ResponseCharge | None = None
    kind: Kind = "quota-exceeded"
    gate: CategoryLimiter | None = None


class RequestLimiter:
    """Everything that both middlewares need."""

    def __init__(
        self,
        config: str | Path | Mapping[str, object] | None = None,
        store: str | Store = "memory://",
        trusted_proxies: TrustedProxies | Iterable[str] = (),
        headers: Style = "x",
        clock: Clock | None = None,
        *,
        tasks: bool = False,
        **options: Any,  # noqa: ANN401 - Options, passed on by the middlewares
    ) -> None:
        """Read the configuration and open the store; what is wrong is refused here. `tasks` await their limiters."""
        check_options(options)
        get = options.get
        self._counts: Mapping[str, Counts] = get("count") or {}
        self._source = RulesSource(config)
        self._check(self._source.rules)
        self.answers = ResponseWriter(headers, expose=get("expose", False), denied=get("denied"))
        who = {name: options[name] for name in ("ipv6_prefix", "unknown", "key") if name in options}
        self.clients = ClientIdentifier(trusted_proxies, self._source.rules, **who)
        self.root_path: str = get("root_path", "")
        self.drops_messages = get("on_message", "close") == "drop"
        admin = get("admin", True)
        self.admin_path: str | None = ADMIN_PATH if admin is True else admin or None
        self.admin_token: str | None = get("admin_token")
        self.store, self.owns_store = self._open(store, clock, get("lease"))
        self._sized = isinstance(store, str) and "max_entries" not in store
        if isinstance(store, str) and isinstance(self.store, MemoryStore):
            self.store.share(self.clients.group_of)
        self.own_clock = clock if clock is not self.store.clock else None
        self.clock = clock or self.store.clock
        self._tasks = tasks and not self.store.instant
        every = get("log_every", 0)
        self.log = DecisionLog(log, every=every, burst=get("log_burst", BURST))
        self._lines = LogThrottle(get("log_burst") or BURST)  # errors are never silent
        self.observer: Observer | None = get("observer")
        self.watched = self.observer is not None or every > 0
        self.blocks = TemporaryList()
        self.passes = TemporaryList()
        self.special = self.clients.own_key is not None  # whether nothing is usual: keys of one's own, clients on lists
        self._every = round(get("reload", 1.0) * SECOND)
        self.due = 0  # when chores are to be done
        self.quiet = 0  # until when what is allowed needs no more than a note: until then, or never if it is watched
        self._swept = 0
        self.gates: dict[str, CategoryLimiter] = {}
        self.take_over(self._source.rules)

    def _open(
        self, store: str | Store, clock: Clock | None, lease: bool | float | Lease | None  # noqa: FBT001 - as limiters take it
    ) -> tuple[Store, bool]:  # fmt: skip
        opened = open_guarded(store, clock=clock) if isinstance(store, str) else store
        terms = read_lease(lease)
        if terms is None:
            return opened, isinstance(store, str)
        return LeasedStore(opened, terms, owns=isinstance(store, str)), True

    # ---- rules -------------------------------------------------------------------------------------------------------

    def _check(self, rules: Rules) -> None:
        """Refuse rules that the program's own options do not fit."""
        unknown = sorted(self._counts.keys() - {category.name for category in rules.categories})
        if unknown:
            raise ConfigError(f"there is no category {unknown[0]!r}", field="count")

    def take_over(self, rules: Rules) -> None:
        """Decide by these rules from now on; what clients have consumed stays consumed."""
        gates = {}
        for category in rules.categories:
            gate = self.gates.get(category.name)
            if gate is None:
                kind = AsyncLimiter if self._tasks else Limiter
                limiter = kind(category.policy, store=self.store, clock=self.own_clock)
                gate = CategoryLimiter(
                    category, limiter, self.answers, self._counts.get(category.name), rules.max_entries
                )
            else:
                gate.take_over(category)
                gate.census.resize(rules.max_entries)
            gates[category.name] = gate
        self.rules = rules
        self.by_method = rules.by_method  # at hand for every request
        self.gates = gates
        self.idle = self._source.watched and not rules.enabled  # nobody decides, but the file may change again
        if self._sized and isinstance(self.store, MemoryStore):
            self.store.max_entries = rules.max_entries
        self.clients.take_over(rules)
        self.met = self.clients.direct  # at hand for every request
        self.targets: dict[object, RequestTarget | None] = {}  # a new one: see Clients.take_over

    def chores(self, now: int) -> None:
        """Do what is due: look whether the file has changed, forget clients whose windows are over."""
        self.due = now + self._every
        self.quiet = 0 if self.watched else self.due
        self.log.flush(now)
        # Once in an interval everybody is looked at, a few at a time: no request shall wait for all of them.
        part = (now - self._swept) / SECOND / self.rules.cleanup_interval
        self._swept = now
        for gate in self.gates.values():
            gate.census.sweep(now, part)
        self.blocks.clean(now)
        self.passes.clean(now)
        self.look_at_lists()
        if self._source.watched:
            self._reload(self._source.changed())

    def idle_chores(self) -> None:
        """Look at the file while limits are switched off, so that they can be switched on again."""
        now = self.now()
        if now >= self.due:
            self.chores(now)

    def look_at_lists(self) -> None:
        """Note whether anybody stands on a list: most of the time nobody does, and requests need not be looked up."""
        self.special = self.clients.own_key is not None or bool(self.blocks or self.passes)

    def reload(self) -> str | None:
        """Read the file again now; tell why it was refused, if it was."""
        self._reload(self._source.read())
        return self._source.refused

    def _reload(self, rules: Rules | None) -> None:
        if rules is None:
            return
        try:
            self._check(rules)
        except ConfigError as error:
            self._source.refuse(error)
        else:
            self.take_over(rules)

    # ---- which category ----------------------------------------------------------------------------------------------

    def target(
        self, place: tuple[str | None, ...], methods: tuple[str, ...], routes: Sequence[Route], template: str | None
    ) -> RequestTarget | None:
        """Tell where a request goes, and remember it for all requests of the same place; None: it is not limited."""
        found = self._find(methods, routes, template)
        if sum(map(len, filter(None, place))) <= MAX_CACHED_PATH_LENGTH:
            if len(self.targets) >= MAX_CACHED_TARGETS:
                self.targets.clear()
            self.targets[place] = found
        return found

    def _find(self, methods: tuple[str, ...], routes: Sequence[Route], template: str | None) -> RequestTarget | None:
        through = self._through(self.rules.matches(routes, methods, template))
        path, prefixes, _ = routes[0]
        if self.admin_path is None or self.admin_path not in (path, *(prefix + path for prefix in prefixes)):
            return through
        # The page is not limited unless the configuration names it; elsewhere than usual it is never.
        if through is None or self.admin_path != ADMIN_PATH:
            return RequestTarget(None, 0, special=True, admin=True)
        return through._replace(special=True, admin=True)

    def message_target(self, routes: Sequence[Route]) -> RequestTarget | None:
        """Tell where each message of a websocket goes; None: messages are not limited."""
        return self._through(self.rules.message_matches(routes))

    def _through(self, matches: tuple[Match, ...]) -> RequestTarget | None:
        if not matches:
            return None
        (gate, cost), *more = [(self.gates[match.category.name], match.cost) for match in matches]
        return RequestTarget(gate, cost, special=gate.held or bool(more), more=tuple(more))

    # ---- what was decided --------------------------------------------------------------------------------------------

    def told(self, gate: CategoryLimiter, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> bool:
        """Note a decision; tell whether the request is let in.

        The middlewares do the usual part of this themselves: a client that was met before, allowed, with nobody
        watching and nothing due (`quiet`).
        """
        gate.census.note(key, decision)
        now = decision[1]
        if now >= self.due:
            self.chores(now)
        let_in = self.lets_in(key, decision)
        if let_in:
            gate.allowed += 1
        else:
            gate.denied += 1
        if decision.allowed == let_in and (self.watched or not decision[0]):
            self.watch(gate.limiter.policy, key, cost, decision, method, path)
        return let_in

    def lets_in(self, key: Key, decision: Decision) -> bool:
        """Tell whether a decision lets a request in.

        Clients without an address may be let in whatever was decided; a warning has said so, once.
        """
        return decision.allowed or (key is UNKNOWN and self.clients.lets_unknown_in)

    def watch(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Tell logs and observers of a decision."""
        if self.observer is None and not log.isEnabledFor(logging.INFO if decision[0] else logging.WARNING):
            return  # nobody listens, and a flood of denials should cost little
        costs = policy.one if cost == 1 else policy.costs(cost)
        record = Record("acquire", policy, key, costs, decision, f"{method} {path}")
        self.log(record)
        if self.observer is not None:
            self.observer(record)

    def admitting(self, request: Request, target: RequestTarget, visitor: RequestClient) -> Steps[LimitOutcome]:
        """Decide about a request with something special about it."""
        key = self.clients.key_of(request, visitor.key or UNKNOWN)
        if target.gate is not None and (self.blocks or self.passes or visitor.blocked):
            now = self.now()
            if self.passes.until(key, visitor.address, now):
                return LimitOutcome(let_in=True, key=key)
            until = self._blocked_until(key, visitor, now)
            if until:
                return self._refuse(request, target.gate, key, now, until)
        charged: list[Charged] = []
        for gate, cost in target.charges:
            try:
                charge = yield from charging(gate, key, cost, held=gate.held or bool(target.more))
            except RateLimitError as error:
                outcome = self.lost(gate, error)
                if outcome.let_in:
                    continue
                yield from cancelling(charged)
                return outcome
            if not self.lets_in(key, charge.decision):
                yield from cancelling(charged)
                self.told(gate, key, cost, charge.decision, request.method, request.path)
                return LimitOutcome(let_in=False, decision=charge.decision, key=key, gate=gate)
            charged.append(charge)
        for charge in charged:
            self.told(charge.gate, key, charge.cost, charge.decision, request.method, request.path)
        if not charged:
            return LimitOutcome(let_in=True, key=key)
        decision = together([charge.decision for charge in charged])
        open_charges = [charge for charge in charged if charge.held is not None]
        settlement = ResponseCharge(open_charges, key, request) if open_charges else None
        return LimitOutcome(let_in=True, decision=decision, key=key, settlement=settlement)

    def admitting_message(self, target: RequestTarget, visitor: RequestClient, key: Key, path: str) -> Steps[bool]:
        """Decide about a message of a websocket, which may have been opened long ago."""
        if self.blocks or self.passes:
            now = self.now()
            if self.passes.until(key, visitor.address, now):
                return True
            if self.blocks.until(key, visitor.address, now):
                return False
        charged: list[Charged] = []
        for gate, cost in target.charges:
            try:
                charge = yield from charging(gate, key, cost, held=False)
            except RateLimitError as error:
                if self.lost(gate, error).let_in:
                    continue
            else:
                if self.told(gate, key, cost, charge.decision, MESSAGE_METHOD, path):
                    charged.append(charge)
                    continue
            yield from refunding(charged, key)
            return False
        return True

    def _blocked_until(self, key: Key, visitor: RequestClient, now: int) -> int:
        until = self.blocks.until(key, visitor.address, now) or 0
        # Who is blocked by the file is blocked until the file says otherwise.
        return max(until, now + round(self.rules.cleanup_interval * SECOND)) if visitor.blocked else until

    def _refuse(self, request: Request, gate: CategoryLimiter, key: Key, now: int, until: int) -> LimitOutcome:
        limits = gate.category.policy.limits
        decision = Decision((False, now, limits, ((0, until - now, until - now),) * len(limits), None))
        gate.denied += 1
        self.watch(gate.limiter.policy, key, {}, decision, request.method, request.path)
        return LimitOutcome(let_in=False, decision=decision, key=key, kind="abnormal-usage-detected", gate=gate)

    def lost(self, gate: CategoryLimiter, error: Exception) -> LimitOutcome:
        """Do without the store about a category."""
        return self.lost_by(gate.category.policy, error)._replace(gate=gate)

    def lost_by(self, policy: Policy, error: Exception) -> LimitOutcome:
        """Log that the store could not decide; do as the policy says, where it leaves a choice."""
        self.say(logging.ERROR, "%s: the store could not decide: %s", policy.name, error)
        if policy.on_store_error != "deny":
            return LimitOutcome(let_in=True)
        again = ((0, SECOND, SECOND),) * len(policy.limits)
        return LimitOutcome(let_in=False, decision=LocalDecision((False, self.now(), policy.limits, again, None)))

    def say(self, level: int, message: str, *about: object) -> None:
        """Log what any client can bring about, sparingly."""
        now = self.now()
        self._count_unwritten(now)
        if self._lines.may_write((level, message), now):
            log.log(level, message, *about)

    def _count_unwritten(self, now: int | None) -> None:
        for name, lines in self._lines.unwritten(now):
            level, message = name if isinstance(name, tuple) else (logging.WARNING, "other messages")
            log.log(level, "%s: %d more within one second", message.replace("%s", "…"), lines)

    def flush(self) -> None:
        """Log how many lines were left out until now."""
        self.log.flush()
        self._count_unwritten(None)

    def now(self) -> int:
        """Tell the time, in microseconds since 1970."""
        return self.clock.ns() // 1000
