"""The part of Run and AsyncRun that both share: a node of a tree, as flows.

The two classes differ only in how they execute flows, and in what they return.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from weakref import WeakValueDictionary

from tidegate._limiter.base_limiter import BaseLimiter
from tidegate._policy.key import Key, normal_key
from tidegate._runtime.ambient import CURRENT_RUN
from tidegate._runtime.arguments import seconds
from tidegate._runtime.clock import ThreadSignal
from tidegate._runtime.urls import redact_text
from tidegate.agents._carving import Carving
from tidegate.agents._charging import check_open, check_time, refresh_flow, refresh_path_flow, reserve_flow
from tidegate.agents._credits import CreditCost, credit_node_flow
from tidegate.agents._errors import RunDenied, RunEndedError, RunRightError, no_decision
from tidegate.agents._exhausted import STOP, Exhausted, ExhaustedPlan, OnExhausted, log, read_on_exhausted
from tidegate.agents._limits import is_per_run, raise_quotas, read_extension, read_label, read_limits, read_repeats
from tidegate.agents._node import CLOSED, OPEN, Details, Node
from tidegate.agents._payments import RunCosts, digest_of, find_payments, read_alternatives
from tidegate.agents._reports import ReportRow, report_flow
from tidegate.agents._reservation import BaseRunReservation
from tidegate.agents._tokens import OWNER_PREFIX, RIGHTS, Keys, Token, audience_of, keys_flow, new_number, read_rights
from tidegate.agents._tracing import end_span, start_agent_span
from tidegate.agents._tree import Tree, check_name, check_policy_name, check_ttl
from tidegate.agents._usage import NodeUsage, usage_flow
from tidegate.core._bounds import SECOND
from tidegate.errors import Closed, ConfigError, RateLimitError, ValueConflict
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextvars import Token as ContextToken

    from tidegate._limiter.limiter import AsyncLimiter, Limiter
    from tidegate._limiter.waiting import Step
    from tidegate._runtime.clock import Clock, Signal
    from tidegate._runtime.flow import Flow
    from tidegate.agents._charging import RunCharge
    from tidegate.agents._credits import CreditNode
    from tidegate.agents._limits import Amount
    from tidegate.core._limit import Limit
    from tidegate.stores import Store

DAY: Final = 86_400.0
CALL_TTL: Final = 600.0  # seconds after which the estimate of a call that was not settled stays charged
TOKEN_VARIABLE: Final = "TIDEGATE_RUN"  # noqa: S105 - the name of a variable
STORE_VARIABLE: Final = "TIDEGATE_STORE"
STORES: Final[WeakValueDictionary[str, Any]] = WeakValueDictionary()  # of this process, by audience
CREATOR_RIGHTS: Final = frozenset({"stop", "extend"})  # at the node, beside those at the node above
ALL: Final = CREATOR_RIGHTS | frozenset(RIGHTS)
OWNER_MARGIN: Final = 366 * 86_400 * SECOND


MAX_QUESTIONS: Final = 16  # how often a function is asked about one call


class Opened(NamedTuple):
    """A node that was created or joined, and what this process may do there."""

    tree: Tree
    node: Node
    rights: frozenset[str]
    ends: int | None  # the end of the token; None: the node's


class BaseRun:
    """Base class of Run and AsyncRun."""

    for_tasks: bool = False

    def __init__(
        self,
        name: str,
        *,
        store: str | Store = "memory://",
        limits: str | Limit | Iterable[str | Limit] = (),
        ttl: float = DAY,
        parent: tuple[Limiter | AsyncLimiter, Key] | None = None,
        secret: str | Sequence[str] = (),
        on_exhausted: OnExhausted = "stop",
        max_repeats: int | None = None,
        tracer: object = None,
        clock: Clock | None = None,
    ) -> None:
        """Start a run: the root of a tree of nodes, which accepts calls for `ttl` seconds.

        `limits` per run, such as `5/run unit=usd`, never refill; others, such as `60/1m`, limit the rate.
        `parent` is a limiter on the same store and a key, such as a team's: it is charged in the same step. `secret`
        signs tokens; of several, the first signs and each verifies. `on_exhausted` says what happens when a limit per
        run has nothing left: `stop`, credits that pay, or a function or webhook that may extend it (see `exhausted`).
        `max_repeats` denies the same request after so many times in the run; by default, it may be repeated. `tracer`,
        of OpenTelemetry, records a span for each `with` block of a node, and for each call of a tool.
        """
        check_name(name)
        self._opened_store = OpenedStore.open(store, clock=clock)
        self._clock = clock
        self._secrets: tuple[str, ...] = (secret,) if isinstance(secret, str) else tuple(secret)
        self._start: Callable[[], Flow[Any, Opened]]
        self._tree = Tree(self._opened_store.store, secrets.token_hex(8), clock)
        texts, life = read_limits(limits), check_ttl("ttl", seconds("ttl", ttl))
        above = () if parent is None else (self._read_parent(parent),)
        exhausted, repeats = self._read_exhausted(on_exhausted), read_repeats(max_repeats)
        self._start = lambda: self._create_root_flow(name, texts, life, above, exhausted, repeats)
        self.tracer: Any = tracer
        self._init_state(owned=True, exhausted=exhausted)
        self._created()

    def _created(self) -> None:
        """Start it, if that needs no task."""

    def _init_state(self, *, owned: bool, exhausted: ExhaustedPlan = STOP, above: BaseRun | None = None) -> None:
        self._opened: Opened | None = None
        self._on_exhausted = exhausted
        self._above = above  # the object that created it: its function is asked about its node
        self.known_credits: dict[str, CreditNode] = {} if above is None else above.known_credits
        self._owned = owned  # whether leaving the block closes the node
        self._entered: list[ContextToken[Any]] = []
        self._spans: list[Any] = []
        self._keys: Keys | None = None
        self.clock: Clock = self._clock or self._opened_store.store.clock

    def _read_parent(self, parent: tuple[Limiter | AsyncLimiter, Key]) -> tuple[str, list[str], list[str]]:
        try:
            limiter, key = parent
        except (TypeError, ValueError):
            raise ConfigError("must be a limiter and a key, such as (team_limiter, 'red')", field="parent") from None
        if not isinstance(limiter, BaseLimiter) or limiter.store.unleased is not self._tree.store:
            raise ConfigError("must be a limiter on the same Store object as the run", field="parent")
        check_policy_name(limiter.policy.name)
        key = normal_key(key)
        return (
            limiter.policy.name,
            [str(limit) for limit in limiter.policy.limits],
            [key] if isinstance(key, str) else [*key],
        )

    def _read_exhausted(self, value: OnExhausted) -> ExhaustedPlan:
        found = read_on_exhausted(value)
        for each in found.credits:
            if each.store is not self._tree.store:
                raise ConfigError("credits must be on the same Store object as the run", field="on_exhausted")
        return found

    # ---- flows -------------------------------------------------------------------------------------------------------

    def _create_root_flow(
        self,
        name: str,
        texts: tuple[str, ...],
        life: int,
        above: Sequence[tuple[str, list[str], list[str]]],
        exhausted: ExhaustedPlan,
        repeats: int,
    ) -> Flow[Any, Opened]:
        names = yield from self._create_credits_flow(exhausted)
        now = yield from self._tree.time_flow()
        details = Details(name, texts, now, now + life, above=above, credits=names, max_repeats=repeats)
        node = yield from self._tree.create_flow(None, details)
        return Opened(self._tree, node, ALL, None)

    def _create_credits_flow(self, exhausted: ExhaustedPlan) -> Flow[Any, tuple[str, ...]]:
        for each in exhausted.credits:
            self.known_credits[each.name] = yield from each.node_flow()
        return tuple(each.name for each in exhausted.credits)

    def _create_child_flow(
        self,
        above: BaseRun,
        name: str,
        texts: tuple[str, ...],
        life: int | None,
        carve: Mapping[str, Amount] | None,
        repeats: int,
    ) -> Flow[Any, Opened]:
        tree, parent, rights, token_ends = yield from above._open_flow()
        above._require(rights, "child")
        names = yield from self._create_credits_flow(self._on_exhausted)
        for _ in range(64):
            check_open(parent)
            now = yield from tree.time_flow()
            check_time(parent, now, token_ends)
            ends = min(parent.details.ends, token_ends or parent.details.ends)
            ends = ends if life is None else min(ends, now + life)
            bounds = [end for end in (parent.details.last_end, token_ends) if end]
            details = Details(
                name, texts, now, ends, credits=names, max_repeats=repeats, last_end=min(bounds, default=0)
            )
            try:
                if carve is None:
                    node = yield from tree.create_flow(parent, details)
                else:
                    node = yield from Carving(tree).create_flow(parent, details, carve)
            except ValueConflict as conflict:
                yield from refresh_flow([tree], parent, conflict)
                continue
            return Opened(tree, node, rights | CREATOR_RIGHTS, None)
        raise RateLimitError(f"could not create {name!r}: the tree changes all the time; try again later")

    def _find_flow(self, identifier: str) -> Flow[Any, Opened]:
        path = tuple(identifier.split("/"))
        tree = Tree(self._opened_store.store, path[0], self._clock)
        return Opened(tree, (yield from tree.node_flow(path)), ALL, None)

    def _join_flow(self, text: str) -> Flow[Any, Opened]:
        keys = yield from self._keys_flow()
        token = keys.read(text)
        tree = Tree(self._opened_store.store, token.path[0], self._clock)
        node = yield from tree.node_flow(token.path)
        return Opened(tree, node, frozenset(token.rights), token.ends)

    def _keys_flow(self) -> Flow[Any, Keys]:
        if self._keys is None:
            self._keys = yield from keys_flow(self._tree, self._secrets)
            STORES[self._keys.audience] = self._opened_store.store
        return self._keys

    def _open_flow(self) -> Flow[Any, Opened]:
        """Create or join the node, the first time."""
        if self._opened is None:
            self._opened = yield from self._start()
        return self._opened

    @staticmethod
    def _require(rights: frozenset[str], right: str) -> None:
        """Raise RunRightError unless a right was given."""
        if right not in rights:
            needs = (
                "that needs the creator of the node, or an operator"
                if right in ("stop", "extend")
                else "ask for a token with it"
            )
            raise RunRightError(f"the token has no right to {right}: {needs}")

    def _reserve_flow(
        self,
        costs: RunCosts,
        timeout: float | None,
        make_signal: Callable[[], Signal],
        request: str | bytes | None = None,
        label: str = "",
    ) -> Flow[Any, tuple[Opened, RunCharge]]:
        """Charge the first of several costs that fits, or ask whether a node may be extended."""
        opened = yield from self._open_flow()
        self._require(opened.rights, "charge")
        named = read_alternatives(costs)
        bought = yield from self._credits_flow(opened.node, [cost for _, cost in named])
        carving = Carving(opened.tree)
        digest = "" if not request else digest_of(request)
        label = read_label(label)
        for _ in range(MAX_QUESTIONS):
            try:
                charge = yield from reserve_flow(
                    opened.tree,
                    opened.node,
                    lambda: find_payments(opened.node, named, bought),
                    timeout,
                    make_signal,
                    carving.return_expired_flow,
                    opened.ends,
                    digest,
                    label,
                )
            except RunDenied as denied:
                error = denied
            else:
                return opened, charge
            if not (yield from self.ask_flow(error)):
                break
        raise error

    def _credits_flow(self, node: Node, costs: Sequence[object]) -> Flow[Any, Mapping[str, CreditNode]]:
        """Return the credits that can pay for a call of a node, by name: those of its line, in order, and of costs."""
        for each in node.line:
            for name in each.details.credits:
                if name not in self.known_credits:
                    try:
                        found = yield from credit_node_flow(self._opened_store.store, name, self._clock)
                    except RunEndedError:
                        continue
                    self.known_credits[name] = found
        for cost in costs:
            if isinstance(cost, CreditCost):
                if cost.credits.store is not self._opened_store.store.unleased:
                    raise ConfigError("credits must be on the same Store object as the run", field="cost")
                self.known_credits[cost.credits.name] = yield from cost.credits.node_flow()
        return self.known_credits

    def ask_flow(self, denied: RunDenied) -> Flow[Step, bool]:
        """Ask about the node that denied; returns whether it, or something meanwhile, extended it.

        A node is extended only if no other call has changed it since it was read: two calls that are denied at the same
        time extend it once.
        """
        opened = self._opened
        if opened is None or opened.node.title != denied.node:
            return self._above is not None and (yield from self._above.ask_flow(denied))
        if self._on_exhausted.ask is None or "extend" not in opened.rights:
            return False
        details = opened.node.details
        if denied.unit in (details.carved or ()) or not is_per_run(details.limits, denied.limit, denied.unit):
            return False
        number = details.number
        exhausted = Exhausted(
            "/".join(opened.node.path),
            opened.node.title,
            denied.limit,
            denied.unit,
            denied.quota,
            denied.left[denied.node][denied.limit],
            denied.needed,
        )
        more: Mapping[str, Amount] | None = yield self._on_exhausted.step(exhausted)
        if not more:
            return False
        try:
            limits = raise_quotas(details.limits, read_extension(more), denied.limit)
        except ConfigError as error:
            log.warning("%s is not extended: it cannot use the answer: %s", denied.node, redact_text(error))
            return False

        def change(details: Details) -> Details:
            return details if details.number != number else details.change(limits=limits)

        yield from self._apply_extension_flow(opened, change)
        yield from opened.tree.refresh_flow(opened.node.path)
        return True

    def charge_flow(
        self, cost: Mapping[str, int], identify: Callable[[], bytes] | None = None, label: str = ""
    ) -> Flow[Step, BaseRunReservation]:
        """Charge a call that does not know this run: units that no node counts are left out."""
        opened = yield from self._open_flow()
        known = {unit: amount for unit, amount in cost.items() if unit in opened.node.units}
        wanted = identify is not None and any(node.repeats is not None for node in opened.node.line)
        request = identify() if wanted and identify is not None else None
        _, charge = yield from self._reserve_flow([known], 0.0, ThreadSignal, request, label)  # it does not wait
        return BaseRunReservation(opened.tree, charge, self.clock, CALL_TTL)

    def _token_flow(self, rights: Iterable[str], ttl: float | None) -> Flow[Any, str]:
        opened = yield from self._open_flow()
        wanted = read_rights(rights)
        for right in wanted:
            self._require(opened.rights, right)
        keys = yield from self._keys_flow()
        ends = min(opened.node.details.ends, opened.ends or opened.node.details.ends)
        if ttl is not None:
            now = yield from opened.tree.time_flow()
            ends = min(ends, now + check_ttl("ttl", seconds("ttl", ttl)))
        return keys.sign(Token(keys.audience, opened.node.path, wanted, ends, new_number()))

    def _owner_flow(self) -> Flow[Any, str]:
        """Return the key of the creator."""
        opened = yield from self._open_flow()
        for right in sorted(CREATOR_RIGHTS):
            self._require(opened.rights, right)
        keys = yield from self._keys_flow()
        # It outlives the end of the node, which it may move.
        ends = opened.node.details.ends + OWNER_MARGIN
        return keys.sign(
            Token(keys.audience, opened.node.path, tuple(sorted(opened.rights)), ends, new_number()), OWNER_PREFIX
        )

    def end_flow(self, status: str, *, end_streams: bool = False) -> Flow[Step, None]:
        """Stop or close the node, also one that was created elsewhere."""
        opened = yield from self._open_flow()
        self._require(opened.rights, "stop")
        yield from opened.tree.end_flow(opened.node.path, status, ends_streams=end_streams)
        if status == CLOSED:
            yield from Carving(opened.tree).return_below_flow(opened.node.path)

    def _check_flow(self, *, ends_streams: bool) -> Flow[Any, None]:
        """Raise RunDenied if the node, or one above, accepts no calls; `ends_streams`: only if streams end, too."""
        opened = yield from self._open_flow()
        for node in opened.node.line:
            yield from refresh_path_flow(opened.tree, opened.node, node.path)
        stopping = [node for node in opened.node.line if node.details.ends_streams] if ends_streams else [opened.node]
        for node in stopping:
            check_open(node)
        if not ends_streams:
            check_time(opened.node, (yield from opened.tree.time_flow()), opened.ends)

    def _extend_flow(self, more: Mapping[str, Amount] | None, ttl: float | None) -> Flow[Any, None]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "extend")
        added = read_extension(more or {})
        if opened.node.details.carved is not None and added:
            raise ConfigError("a carve-out cannot be extended: create another one", field="extend")
        life = None if ttl is None else check_ttl("ttl", seconds("ttl", ttl))
        now = yield from opened.tree.time_flow()

        def change(details: Details) -> Details:
            if details.status != OPEN:
                raise RunDenied(
                    f"{opened.node.title} is {details.status}: it cannot be extended",
                    no_decision(now),
                    opened.node.title,
                    details.status,
                )
            ends = details.ends if life is None else max(details.ends, now + life)
            if details.last_end and ends > details.last_end:
                message = "a node that was created by a token cannot be extended beyond the end of that token"
                raise RunRightError(f"{opened.node.title}: {message}")
            if details.ends <= now:
                raise RunDenied(
                    f"{opened.node.title} has ended: it cannot be extended",
                    no_decision(now),
                    opened.node.title,
                    "ended",
                )
            return details.change(limits=raise_quotas(details.limits, added), ends=ends)

        yield from self._apply_extension_flow(opened, change)

    def _apply_extension_flow(self, opened: Opened, change: Callable[[Details], Details]) -> Flow[Any, None]:
        """Extend a node; raises RunDenied for a carve-out whose rest was returned meanwhile."""
        try:
            yield from opened.tree.extend_flow(opened.node.path, change)
        except ValueConflict as conflict:
            yield from refresh_flow([opened.tree], opened.node, conflict)

    def _usage_flow(self) -> Flow[Any, NodeUsage]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "read")
        yield from Carving(opened.tree).return_expired_flow(opened.node)
        return (yield from usage_flow(opened.tree, opened.node.path))

    def _report_flow(self) -> Flow[Any, list[ReportRow]]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "read")
        yield from Carving(opened.tree).return_expired_flow(opened.node)
        return (yield from report_flow(opened.tree, opened.node.path))

    # ---- shared ------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The path of the node in the store."""
        return "/".join(self._node().path)

    @property
    def rights(self) -> tuple[str, ...]:
        """The rights that a token of this node may have."""
        return tuple(right for right in RIGHTS if right in self._opened_node().rights)

    @property
    def paying_credits(self) -> frozenset[str]:
        """The names of the credits that pay for calls here: those of this node and of all above."""
        return frozenset(name for node in self._node().line for name in node.details.credits)

    @property
    def name(self) -> str:
        """The names from the root to this node."""
        return self._node().title

    @property
    def ends(self) -> float:
        """When the node ends, in seconds since 1970 by the clock of the store, as far as this process knows."""
        return self._node().details.ends / 1e6

    def _node(self) -> Node:
        return self._opened_node().node

    def _opened_node(self) -> Opened:
        if self._opened is None:
            raise Closed("the run was not started: use `async with` or `await`")
        return self._opened

    def _child_of(self, above: BaseRun, start: Callable[[], Flow[Any, Opened]], exhausted: OnExhausted) -> None:
        self._share(above)
        self._start = start
        self._init_state(owned=True, exhausted=self._read_exhausted(exhausted), above=above)

    def _share(self, above: BaseRun) -> None:
        self._opened_store = OpenedStore(above._opened_store.store, owned=False)
        self._clock = above._clock
        self._secrets = above._secrets
        self._tree = above._tree
        self.tracer = above.tracer

    def _make_child(
        self,
        name: str,
        limits: str | Limit | Iterable[str | Limit],
        ttl: float | None,
        carve: Mapping[str, Amount] | None,
        on_exhausted: OnExhausted,
        max_repeats: int | None,
    ) -> Self:
        check_name(name)
        texts = read_limits(limits)
        life = None if ttl is None else check_ttl("ttl", seconds("ttl", ttl))
        child = object.__new__(type(self))
        repeats = read_repeats(max_repeats)
        child._child_of(self, lambda: child._create_child_flow(self, name, texts, life, carve, repeats), on_exhausted)
        return child

    @classmethod
    def _make_joined(
        cls, token: str | None, store: str | Store | None, secret: str | Sequence[str], clock: Clock | None
    ) -> Self:
        text = os.environ.get(TOKEN_VARIABLE) if token is None else token
        if not text:
            raise ConfigError(f"needs a token: pass one, or set {TOKEN_VARIABLE}", field="token")
        found = store or STORES.get(audience_of(text)) or os.environ.get(STORE_VARIABLE)
        if not found:
            message = f"needs the store of the run: pass store=, or set {STORE_VARIABLE} to its URL"
            raise ConfigError(message, field="store")
        return cls._make_other(lambda joined: cls._join_flow(joined, text), found, secret, clock)

    @classmethod
    def _make_found(cls, identifier: str, store: str | Store, secret: str | Sequence[str], clock: Clock | None) -> Self:
        return cls._make_other(lambda found: cls._find_flow(found, identifier), store, secret, clock)

    @classmethod
    def _make_other(
        cls,
        start: Callable[[Self], Flow[Any, Opened]],
        store: str | Store,
        secret: str | Sequence[str],
        clock: Clock | None,
    ) -> Self:
        """Return an object for a node that exists."""
        other = object.__new__(cls)
        other._start = lambda: start(other)
        other._opened_store = OpenedStore.open(store, clock=clock)
        other._clock = clock
        other._secrets = (secret,) if isinstance(secret, str) else tuple(secret)
        other._tree = Tree(other._opened_store.store, "", clock)
        other.tracer = None
        other._init_state(owned=False)
        return other

    def _enter(self) -> None:
        """Make it the current run of this thread or task."""
        self._entered.append(CURRENT_RUN.set(self))
        self._spans.append(start_agent_span(self.tracer, self._node()))

    def _leave(self, error: BaseException | None) -> None:
        """Make the run current that was before."""
        CURRENT_RUN.reset(self._entered.pop())
        end_span(self._spans.pop(), error)

    def __repr__(self) -> str:
        """Show the names and the state."""
        if self._opened is None:
            return f"<{type(self).__name__} not started>"
        node = self._opened.node
        return f"<{type(self).__name__} {node.title} {node.details.status}>"
