"""What stands at the door, for ASGI and WSGI alike: who is the client, which category, what is answered.

Nothing here waits, and only what is handed out as a step may have to be awaited.

    request ─ target ─► Gate and cost ─ client ─► key ─ gate.decide ─► Decision ─ told ─► let in, or denied

The middlewares do the usual case in that order by themselves, since every request pays for it. `admitting` is the same
with everything that may be special about a request: blocked clients, keys of one's own, charges to be corrected.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.errors import ConfigError, Denied, RateLimitError
from tidegate.inbound.answers import Answers
from tidegate.inbound.clients import Clients
from tidegate.inbound.gate import Gate, Settlement
from tidegate.inbound.identity import UNKNOWN
from tidegate.inbound.lists import TemporaryList
from tidegate.inbound.options import check_options
from tidegate.inbound.reloading import Source
from tidegate.inbound.rules import ADMIN, beneath
from tidegate.limiter import AsyncLimiter, Limiter
from tidegate.observe import Record
from tidegate.observe.logs import DecisionLog, Sparing
from tidegate.stores import MemoryStore, Store
from tidegate.stores.failure import open_guarded
from tidegate.stores.lease import LeasedStore, read_lease

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tidegate.clock import Clock
    from tidegate.headers import Style
    from tidegate.headers.problems import Kind
    from tidegate.inbound.clients import Visitor
    from tidegate.inbound.gate import Counts
    from tidegate.inbound.identity import TrustedProxies
    from tidegate.inbound.request import Request
    from tidegate.inbound.rules import Match, Rules
    from tidegate.inbound.steps import Steps
    from tidegate.observe import Observer
    from tidegate.policy import Cost, Key, Policy
    from tidegate.stores.lease import Lease

log = logging.getLogger("tidegate.inbound")

CACHED: Final = 4096  # places that are remembered, so as not to be worked out for each request
LONGEST_CACHED: Final = 256  # characters of a path worth remembering
MISSING: Final[Any] = object()


class Target(NamedTuple):
    """Where a request goes: through a gate, at a cost; or (too) to the operator's page."""

    gate: Gate | None
    cost: Cost
    special: bool = False  # charged by its response, or for the operator: not the usual way
    admin: bool = False


class Outcome(NamedTuple):
    """What becomes of a request, and the decision about it, if there was one."""

    let_in: bool
    decision: Decision | None = None
    key: Key = UNKNOWN
    settlement: Settlement | None = None
    kind: Kind = "quota-exceeded"


class Guard:
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
        self._source = Source(config)
        self._check(self._source.rules)
        self.answers = Answers(headers, expose=get("expose", False), denied=get("denied"))
        who = {name: options[name] for name in ("ipv6_prefix", "unknown", "key") if name in options}
        self.clients = Clients(trusted_proxies, self._source.rules, **who)
        self.drops_messages = get("on_message", "close") == "drop"
        admin = get("admin", True)
        self.admin_path: str | None = ADMIN if admin is True else admin or None
        self.admin_token: str | None = get("admin_token")
        self.store, self.owns_store = self._open(store, clock, get("lease"))
        self._sized = isinstance(store, str) and "max_entries" not in store
        self.own_clock = clock if clock is not self.store.clock else None
        self.clock = clock or self.store.clock
        self._tasks = tasks and not self.store.instant
        every = get("log_every", 0)
        self.log = DecisionLog(log, every=every, burst=get("log_burst", 100))
        self._lines = Sparing(get("log_burst") or 100)  # errors are never silent
        self.observer: Observer | None = get("observer")
        self.watched = self.observer is not None or every > 0
        self.blocks = TemporaryList()
        self.passes = TemporaryList()
        self.special = self.clients.own_key is not None  # whether nothing is usual: keys of one's own, clients on lists
        self._every = round(get("reload", 1.0) * SECOND)
        self.due = 0  # when chores are to be done
        self.quiet = 0  # until when what is allowed needs no more than a note: until then, or never if it is watched
        self._swept = 0
        self.gates: dict[str, Gate] = {}
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
                gate = Gate(category, limiter, self.answers, self._counts.get(category.name), rules.max_entries)
            else:
                gate.take_over(category)
                gate.census.resize(rules.max_entries)
            gates[category.name] = gate
        self.rules = rules
        self.gates = gates
        self.idle = self._source.watched and not rules.enabled  # nobody decides, but the file may change again
        if self._sized and isinstance(self.store, MemoryStore):
            self.store.max_entries = rules.max_entries
        self.clients.take_over(rules)
        self.met = self.clients.direct  # at hand for every request
        self.targets: dict[object, Target | None] = {}  # a new one: see Clients.take_over

    def chores(self, now: int) -> None:
        """Do what is due: look whether the file has changed, forget clients whose windows are over."""
        self.due = now + self._every
        self.quiet = 0 if self.watched else self.due
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

    def target(self, method: str, path: str, root: str = "", template: str | None = None) -> Target | None:
        """Tell where a request goes; None: it is not limited."""
        place = (method, path) if not root and template is None else (method, path, root, template)
        targets = self.targets
        found = targets.get(place, MISSING)
        if found is not MISSING:
            return found  # type: ignore[no-any-return]  # MISSING was ruled out
        found = self._find(method, path, root, template)
        if len(path) + len(method) + len(root) <= LONGEST_CACHED:
            if len(targets) >= CACHED:
                targets.clear()
            targets[place] = found
        return found

    def _find(self, method: str, path: str, root: str, template: str | None) -> Target | None:
        through = self._through(self.rules.match(path, method, template, root))
        if self.admin_path is None or self.admin_path not in (path, beneath(path, root)):
            return through
        # The page is not limited unless the configuration names it; elsewhere than usual it is never.
        if through is None or self.admin_path != ADMIN:
            return Target(None, 0, special=True, admin=True)
        return through._replace(special=True, admin=True)

    def message_target(self, path: str, root: str = "") -> Target | None:
        """Tell where each message of a websocket goes; None: messages are not limited."""
        return self._through(self.rules.match_message(path, root))

    def _through(self, match: Match | None) -> Target | None:
        if match is None:
            return None
        gate = self.gates[match.category.name]
        return Target(gate, match.cost, special=gate.held)

    # ---- what was decided --------------------------------------------------------------------------------------------

    def told(self, gate: Gate, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> bool:
        """Note a decision; tell whether the request is let in.

        The middlewares do the usual part of this themselves: a client that was met before, allowed, with nobody
        watching and nothing due (`quiet`).
        """
        gate.census.note(key, decision)
        now = decision[1]
        if now >= self.due:
            self.chores(now)
        # Clients without an address may be let in whatever was decided; a warning has said so, once.
        unlimited = key is UNKNOWN and self.clients.lets_unknown_in and not decision[0]
        let_in = unlimited or decision.allowed
        if let_in:
            gate.allowed += 1
        else:
            gate.denied += 1
        if not unlimited and (self.watched or not decision[0]):
            self.watch(gate.limiter.policy, key, cost, decision, method, path)
        return let_in

    def watch(self, policy: Policy, key: Key, cost: Cost, decision: Decision, method: str, path: str) -> None:
        """Tell logs and observers of a decision."""
        if self.observer is None and not log.isEnabledFor(logging.INFO if decision[0] else logging.WARNING):
            return  # nobody listens, and a flood of denials should cost little
        costs = policy.one if cost == 1 else policy.costs(cost)
        record = Record("acquire", policy, key, costs, decision, f"{method} {path}")
        self.log(record)
        if self.observer is not None:
            self.observer(record)

    def admitting(self, request: Request, gate: Gate, cost: Cost, visitor: Visitor) -> Steps[Outcome]:
        """Decide about a request with something special about it."""
        key = self.clients.key_of(request, visitor.key or UNKNOWN)
        if self.blocks or self.passes or visitor.blocked:
            now = self.now()
            if self.passes.until(key, visitor.address, now):
                return Outcome(let_in=True, key=key)
            until = self._blocked_until(key, visitor, now)
            if until:
                return self._refuse(request, gate, key, now, until)
        held = None
        try:
            if gate.held:
                held = yield partial(gate.reserve, key, cost)
                decision = held.decision
            else:
                decision = yield partial(gate.decide, key, cost)
        except Denied as denied:
            decision = denied.decision
        except RateLimitError as error:
            return self.lost(gate, error)
        let_in = self.told(gate, key, cost, decision, request.method, request.path)
        settlement = None if held is None else Settlement(gate, key, cost, held, request)
        return Outcome(let_in, decision, key, settlement)

    def _blocked_until(self, key: Key, visitor: Visitor, now: int) -> int:
        until = self.blocks.until(key, visitor.address, now) or 0
        # Who is blocked by the file is blocked until the file says otherwise.
        return max(until, now + round(self.rules.cleanup_interval * SECOND)) if visitor.blocked else until

    def _refuse(self, request: Request, gate: Gate, key: Key, now: int, until: int) -> Outcome:
        limits = gate.category.policy.limits
        decision = Decision((False, now, limits, ((0, until - now, until - now),) * len(limits), None))
        gate.denied += 1
        self.watch(gate.limiter.policy, key, {}, decision, request.method, request.path)
        return Outcome(let_in=False, decision=decision, key=key, kind="abnormal-usage-detected")

    def lost(self, gate: Gate, error: Exception) -> Outcome:
        """Do without the store about a category."""
        return self.lost_by(gate.category.policy, error)

    def lost_by(self, policy: Policy, error: Exception) -> Outcome:
        """Log that the store could not decide; do as the policy says, where it leaves a choice."""
        self.say(logging.ERROR, "%s: the store could not decide: %s", policy.name, error)
        if policy.on_store_error != "deny":
            return Outcome(let_in=True)
        again = ((0, SECOND, SECOND),) * len(policy.limits)
        return Outcome(let_in=False, decision=LocalDecision((False, self.now(), policy.limits, again, None)))

    def say(self, level: int, message: str, *about: object) -> None:
        """Log what any client can bring about, sparingly."""
        more = self._lines.line(self.now())
        if more is not None:
            log.log(level, "%s%s", message % about, more)

    def now(self) -> int:
        """Tell the time, in microseconds since 1970."""
        return self.clock.ns() // 1000
