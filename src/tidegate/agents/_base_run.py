"""The part of Run and AsyncRun that both share: a node of a tree, as flows.

The two classes differ only in how they execute flows, and in what they return.
"""

from __future__ import annotations

import os
import re
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from weakref import WeakValueDictionary

from tidegate._limiter.base_limiter import BaseLimiter
from tidegate._policy.key import Key, normal_key
from tidegate._runtime.ambient import CURRENT_RUN
from tidegate._runtime.arguments import seconds
from tidegate._runtime.clock import ThreadSignal
from tidegate.agents._carving import Carving
from tidegate.agents._charging import RunDenied, check_open, check_time, no_decision, refresh_flow, reserve_flow
from tidegate.agents._limits import raise_quotas, read_limits, to_counted
from tidegate.agents._node import CLOSED, OPEN, Details, Node
from tidegate.agents._reservation import BaseRunReservation
from tidegate.agents._tokens import RIGHTS, Keys, Token, audience_of, keys_flow, new_number, read_rights
from tidegate.agents._tree import Tree, check_policy_name, check_ttl
from tidegate.agents._usage import NodeUsage, usage_flow
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
    from tidegate.agents._limits import Amount, RunCost
    from tidegate.core._limit import Limit
    from tidegate.stores import Store

NAME = re.compile(r"[^/\x00-\x1f\x7f]{1,200}")
DAY: Final = 86_400.0
CALL_TTL: Final = 600.0  # seconds after which the estimate of a call that was not settled stays charged
TOKEN_VARIABLE: Final = "TIDEGATE_RUN"  # noqa: S105 - the name of a variable
STORE_VARIABLE: Final = "TIDEGATE_STORE"
STORES: Final[WeakValueDictionary[str, Any]] = WeakValueDictionary()  # of this process, by audience
ALL: Final = frozenset({*RIGHTS, "stop", "extend"})  # of the creator


class RunRightError(RateLimitError):
    """The token does not give this right."""


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
        clock: Clock | None = None,
    ) -> None:
        """Start a run: the root of a tree of nodes, which accepts calls for `ttl` seconds.

        `limits` per run, such as `5/run unit=usd`, never refill; others, such as `60/1m`, limit the rate.
        `parent` is a limiter on the same store and a key, such as a team's: it is charged in the same step. `secret`
        signs tokens; of several, the first signs and each verifies.
        """
        self._check_name(name)
        self._opened_store = OpenedStore.open(store, clock=clock)
        self._clock = clock
        self._secrets: tuple[str, ...] = (secret,) if isinstance(secret, str) else tuple(secret)
        self._start: Callable[[], Flow[Any, Opened]]
        self._tree = Tree(self._opened_store.store, secrets.token_hex(8), clock)
        texts, life = read_limits(limits), check_ttl("ttl", seconds("ttl", ttl))
        above = () if parent is None else (self._read_parent(parent),)
        self._start = lambda: self._create_root_flow(name, texts, life, above)
        self._init_state(owned=True)
        self._created()

    def _created(self) -> None:
        """Start it, if that needs no task."""

    def _init_state(self, *, owned: bool) -> None:
        self._opened: Opened | None = None
        self._owned = owned  # whether leaving the block closes the node
        self._entered: list[ContextToken[Any]] = []
        self._keys: Keys | None = None
        self.clock: Clock = self._clock or self._opened_store.store.clock

    @staticmethod
    def _check_name(name: str) -> None:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise ConfigError(
                f"must be 1 to 200 characters without '/' and control characters, not {name!r}", field="name"
            )

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

    # ---- flows -------------------------------------------------------------------------------------------------------

    def _create_root_flow(
        self, name: str, texts: tuple[str, ...], life: int, above: Sequence[tuple[str, list[str], list[str]]]
    ) -> Flow[Any, Opened]:
        now = yield from self._tree.time_flow()
        details = Details(name, texts, now, now + life, above=above)
        node = yield from self._tree.create_flow(None, details)
        return Opened(self._tree, node, ALL, None)

    def _create_child_flow(
        self, above: BaseRun, name: str, texts: tuple[str, ...], life: int | None, carve: Mapping[str, Amount] | None
    ) -> Flow[Any, Opened]:
        tree, parent, rights, token_ends = yield from above._open_flow()
        above._require(rights, "child")
        for _ in range(64):
            check_open(parent)
            now = yield from tree.time_flow()
            check_time(parent, now, token_ends)
            ends = min(parent.details.ends, token_ends or parent.details.ends)
            details = Details(name, texts, now, ends if life is None else min(ends, now + life))
            try:
                if carve is None:
                    node = yield from tree.create_flow(parent, details)
                else:
                    node = yield from Carving(tree).create_flow(parent, details, carve)
            except ValueConflict as conflict:
                yield from refresh_flow(tree, parent, conflict)
                continue
            return Opened(tree, node, ALL, None)
        raise RateLimitError(f"could not create {name!r}: the tree changes all the time; try again later")

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
        costs: Sequence[RunCost],
        timeout: float | None,
        make_signal: Callable[[], Signal],
    ) -> Flow[Any, tuple[Opened, RunCharge]]:
        """Charge the first of several costs that fits."""
        opened = yield from self._open_flow()
        self._require(opened.rights, "charge")
        carving = Carving(opened.tree)
        charge = yield from reserve_flow(
            opened.tree, opened.node, costs, timeout, make_signal, carving.return_expired_flow, opened.ends
        )
        return opened, charge

    def charge_flow(self, cost: Mapping[str, int]) -> Flow[Step, BaseRunReservation]:
        """Charge a call that does not know this run: units that no node counts are left out."""
        opened = yield from self._open_flow()
        known = {unit: amount for unit, amount in cost.items() if unit in opened.node.units}
        _, charge = yield from self._reserve_flow([known], 0.0, ThreadSignal)  # it does not wait
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

    def _end_flow(self, status: str) -> Flow[Any, None]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "stop")
        yield from opened.tree.end_flow(opened.node.path, status)
        if status == CLOSED:
            yield from Carving(opened.tree).return_below_flow(opened.node.path)

    def _extend_flow(self, more: Mapping[str, Amount] | None, ttl: float | None) -> Flow[Any, None]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "extend")
        added = dict(to_counted(unit, amount, "extend") for unit, amount in (more or {}).items())
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
            if details.ends <= now:
                raise RunDenied(
                    f"{opened.node.title} has ended: it cannot be extended",
                    no_decision(now),
                    opened.node.title,
                    "ended",
                )
            return details.change(limits=raise_quotas(details.limits, added), ends=ends)

        yield from opened.tree.extend_flow(opened.node.path, change)

    def _usage_flow(self) -> Flow[Any, NodeUsage]:
        opened = yield from self._open_flow()
        self._require(opened.rights, "read")
        yield from Carving(opened.tree).return_expired_flow(opened.node)
        return (yield from usage_flow(opened.tree, opened.node.path))

    # ---- shared ------------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The path of the node in the store."""
        return "/".join(self._node().path)

    @property
    def name(self) -> str:
        """The names from the root to this node."""
        return self._node().title

    def _node(self) -> Node:
        if self._opened is None:
            raise Closed("the run was not started: use `async with` or `await`")
        return self._opened.node

    def _child_of(self, above: BaseRun, start: Callable[[], Flow[Any, Opened]]) -> None:
        self._share(above)
        self._start = start
        self._init_state(owned=True)

    def _share(self, above: BaseRun) -> None:
        self._opened_store = OpenedStore(above._opened_store.store, owned=False)
        self._clock = above._clock
        self._secrets = above._secrets
        self._tree = above._tree

    def _make_child(
        self,
        name: str,
        limits: str | Limit | Iterable[str | Limit],
        ttl: float | None,
        carve: Mapping[str, Amount] | None,
    ) -> Self:
        self._check_name(name)
        texts = read_limits(limits)
        life = None if ttl is None else check_ttl("ttl", seconds("ttl", ttl))
        child = object.__new__(type(self))
        child._child_of(self, lambda: child._create_child_flow(self, name, texts, life, carve))
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
        joined = object.__new__(cls)
        joined._opened_store = OpenedStore.open(found, clock=clock)
        joined._clock = clock
        joined._secrets = (secret,) if isinstance(secret, str) else tuple(secret)
        joined._tree = Tree(joined._opened_store.store, "", clock)
        joined._start = lambda: joined._join_flow(text)
        joined._init_state(owned=False)
        return joined

    def _enter(self) -> None:
        """Make it the current run of this thread or task."""
        self._entered.append(CURRENT_RUN.set(self))

    def _leave(self) -> None:
        """Make the run current that was before."""
        CURRENT_RUN.reset(self._entered.pop())

    def __repr__(self) -> str:
        """Show the names and the state."""
        if self._opened is None:
            return f"<{type(self).__name__} not started>"
        node = self._opened.node
        return f"<{type(self).__name__} {node.title} {node.details.status}>"
