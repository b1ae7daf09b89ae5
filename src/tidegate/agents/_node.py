"""A node of a run: what the store keeps of it, and the limiter that charges it.

What is stored is one value per node, in the slot of its root. A call is charged on condition that the values of its
node and of all ancestors are those that this process knows, so a stop, a close or a changed quota takes effect with the
next call of every process: the condition fails, and the process reads the value again. A missing value denies.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from tidegate._limiter.base_limiter import BaseLimiter
from tidegate._limiter.joint import LimiterAsk
from tidegate._limiter.waiting import WaitQueues
from tidegate._policy import Policy
from tidegate.agents._errors import RunEndedError
from tidegate.agents._limits import CALLS, add_counters, build_limits
from tidegate.core._algorithms import NEVER, View
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision, LocalDecision
from tidegate.core._limit import Limit
from tidegate.stores._values import ANYTHING, KEEP, Collection, Keep, Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Ask, Store

POLICY: Final = "tidegate.runs"
LABEL: Final = "label"  # the last part but one of a key that counts by what calls were for; no node has this name
REPEAT: Final = "repeat"  # ... or the repetitions of a request
REPEATS: Final = "repeats"  # the unit and the name of the limit of repeated requests
UNRETURNED: Final = b"open"  # the entry of a carve-out whose rest was not returned
RETENTION: Final = 7 * 86_400 * SECOND  # how long a node is shown after its end
MAX_DEPTH: Final = 16
FORMAT: Final = 2  # of what is stored of a node; 1 had no number and no `last_end`
OPEN, STOPPED, CLOSED = "open", "stopped", "closed"

Path = tuple[str, ...]
QUEUES: Final[WeakKeyDictionary[Store, WaitQueues]] = WeakKeyDictionary()


class Details(NamedTuple):
    """What the store keeps of a node. Times are microseconds since 1970 by the clock of the store.

    `carved` is what was reserved from the parent when it was created. `above` are policies that are charged with the
    root: the name, the limits and the key of each. `credits` are the names of credits that pay when it is exhausted.
    `max_repeats` is how often the same request may be made (0: as often as one likes). `ends_streams` is whether a stop
    ends responses that have begun. `last_end` is the latest end that an extension may give it: that of the token by
    which it, or a node above, was created (0: none).
    """

    name: str
    limits: tuple[str, ...]
    created: int
    ends: int
    status: str = OPEN
    carved: Mapping[str, int] | None = None
    above: Sequence[tuple[str, Sequence[str], Sequence[str]]] = ()
    credits: Sequence[str] = ()
    max_repeats: int = 0
    ends_streams: bool = False
    last_end: int = 0
    number: int = 0  # of changes: no two versions have the same bytes

    def dump(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps({"format": FORMAT, **self._asdict()}, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Read what `dump` returned; raises RunEndedError for another format."""
        fields = json.loads(data)
        if fields.pop("format", 1) != FORMAT:
            raise RunEndedError("the run was stored by another version of tidegate: create it again")
        return cls(**fields | {"limits": tuple(fields["limits"])})

    def change(self, **changes: Any) -> Self:  # noqa: ANN401 - the fields
        """Return the next version."""
        return self._replace(number=self.number + 1, **changes)

    @property
    def window(self) -> timedelta:
        """The length of its limits per run: they also show what it has used for RETENTION after its end."""
        return timedelta(microseconds=self.ttl)

    @property
    def ttl(self) -> int:
        """How long the store keeps it from now on: at least RETENTION after its end."""
        return self.ends - self.created + RETENTION


def queues_of(store: Store) -> WaitQueues:
    """Return the wait queues of all nodes in a store: a settlement wakes each, so a tree has not one for each node."""
    found = QUEUES.get(store)
    if found is None:
        found = QUEUES.setdefault(store, WaitQueues())
        store.wait_queues.add(found)
    return found


class NodeLimiter(BaseLimiter):
    """Decides about the limits of one node; what a limit per run denies is denied for ever."""

    def __init__(self, policy: Policy, store: Store, clock: Clock | None, node: str) -> None:
        """Take the name of the node, which denials say."""
        super().__init__(policy, store=store, clock=clock)
        self.queues: WaitQueues = queues_of(self.store)
        self.node: str = node
        self.life: int = 0  # microseconds: a window of this length does not end before the node

    def _set_policy(self, policy: Policy) -> None:
        super()._set_policy(policy)
        self.observed = True  # by `observe`

    def observe(self, verb: str, ask: Ask, decision: Decision) -> Decision:
        """Return the decision with NEVER as the wait for a limit per run."""
        if decision.within_limits or isinstance(decision, LocalDecision):
            return super().observe(verb, ask, decision)
        views = [
            View((left, NEVER, reset)) if retry and self._is_per_run(limit) else View((left, retry, reset))
            for limit, (left, retry, reset) in zip(decision.policy_limits, decision.views, strict=True)
        ]
        found = Decision.of_views(decision.at, decision.policy_limits, views, within_limits=False)
        return super().observe(verb, ask, found)

    def _is_per_run(self, limit: Limit) -> bool:
        return limit.rules.windowed and limit.calendar is None and 0 < self.life <= limit.length


class Node:
    """One node as this process knows it."""

    def __init__(self, path: Path, parent: Node | None, data: bytes, store: Store, clock: Clock | None) -> None:
        """Take what the store keeps of the node at this path."""
        self.path: Path = path
        self.parent: Node | None = parent
        self._store = store
        self._clock = clock
        self.line: tuple[Node, ...] = (self,) if parent is None else (self, *parent.line)  # the root last
        self.key: Key = path if len(path) > 1 else path[0]
        self.limiter: NodeLimiter
        self.labels: NodeLimiter  # counts what calls were for
        self.known_labels: set[str] = set()  # that are listed in the store
        self.above: list[tuple[BaseLimiter, Key]] = []
        self.update(data)

    def update(self, data: bytes) -> None:
        """Take what the store keeps of the node now."""
        self.data: bytes = data
        self.condition: Write = Write(
            self.collection, self.value_name, KEEP, 0, data
        )  # that the stored node is this one
        self.details: Details = Details.load(data)
        window = self.details.window
        own = build_limits(self.details.limits, window)
        inherited = () if self.parent is None else self.parent.units
        policy = Policy(
            POLICY, add_counters(own, (CALLS, *(each.unit for each in own), *inherited), window), shares_slot=True
        )
        self.units: tuple[str, ...] = tuple(dict.fromkeys(policy.units))
        if self.parent is None and not self.above:
            for name, limits, key in self.details.above:
                limiter = NodeLimiter(Policy(name, tuple(map(Limit.parse, limits))), self._store, self._clock, name)
                self.above.append((limiter, tuple(key) if len(key) > 1 else key[0]))
        for charged, _ in self.above:
            self.units = tuple(dict.fromkeys((*self.units, *charged.policy.units)))
        if hasattr(self, "limiter"):
            self.limiter.update(policy)
        else:
            self.limiter = NodeLimiter(policy, self._store, self._clock, self.title)
        self.limiter.life = self.details.ends - self.details.created
        labels = Policy(POLICY, add_counters((), self.units, window), shares_slot=True)
        if hasattr(self, "labels"):
            self.labels.update(labels)
        else:
            self.labels = NodeLimiter(labels, self._store, self._clock, self.title)
        self.repeats: NodeLimiter | None = None
        if self.details.max_repeats:
            limit = Limit(self.details.max_repeats, window, "fixed_window", unit=REPEATS, name=REPEATS)
            policy = Policy(POLICY, (limit,), shares_slot=True)
            self.repeats = NodeLimiter(policy, self._store, self._clock, self.title)
            self.repeats.life = self.limiter.life

    @property
    def collection(self) -> Collection:
        """Where the nodes of the tree are stored."""
        return collection_of(self.path[0])

    @property
    def value_name(self) -> str:
        """The name of its value."""
        return "/".join(self.path)

    @property
    def title(self) -> str:
        """The names from the root to this node."""
        return self.details.name if self.parent is None else f"{self.parent.title}/{self.details.name}"

    @property
    def carved_line(self) -> list[Node]:
        """The carve-outs among the node and its ancestors."""
        return [node for node in self.line if node.details.carved is not None]

    def label_key(self, label: str) -> Key:
        """Return the key that counts what calls were for."""
        return (*self.path, LABEL, label)

    def label_ask(self, cost: Mapping[str, int], label: str) -> LimiterAsk:
        """Return what counts a call by what it is for, and lists that for reports, in the step that charges it."""
        found: tuple[Write, ...] = ()
        if label not in self.known_labels:
            name = f"{self.value_name}={label}"
            found = (Write(labels_of(self.path[0]), name, b"", self.details.ttl, ANYTHING),)
        return LimiterAsk(self.labels, self.label_key(label), part(cost, self.labels.policy.units), found)

    def asks(self, cost: Mapping[str, int], digest: str = "") -> list[LimiterAsk]:
        """Return what a call is charged, at this node and above, on condition that no node of the line has changed.

        A carve-out whose rest was returned is charged nothing, even if a node above was extended meanwhile.
        `digest` is that of its request, if that is known.
        """
        conditions = (*(node.condition for node in self.line), *(unreturned(node) for node in self.carved_line))
        left = dict(cost)  # what is charged further up: not what a carve-out was charged for when it was created
        found = []
        for node in self.line:
            found.append(LimiterAsk(node.limiter, node.key, part(left, node.limiter.policy.units), conditions))
            if node.details.carved is not None:
                left = {unit: amount for unit, amount in left.items() if unit not in (node.details.carved or ())}
        root = self.line[-1]
        found += [LimiterAsk(limiter, key, part(left, limiter.policy.units)) for limiter, key in root.above]
        if digest:
            repeats = [(node.repeats, (*node.path, REPEAT, digest)) for node in self.line]
            found += [LimiterAsk(limiter, key, {REPEATS: 1}) for limiter, key in repeats if limiter is not None]
        return found


def part(cost: Mapping[str, int], units: Sequence[str]) -> dict[str, int]:
    """Return the part of a cost in some units."""
    return {unit: amount for unit, amount in cost.items() if unit in units}


def counts_label(key: Key) -> bool:
    """Return whether a key counts what calls were for."""
    return len(key) > 2 and key[-2] == LABEL  # noqa: PLR2004 - a node, the word, and the label


def entries_of(root: str) -> Collection:
    """Return where the entries of the carve-outs of a tree are."""
    return Collection("tidegate.run-carves", (POLICY, root))


def unreturned(node: Node, data: bytes | Keep = KEEP, ttl: int = 0) -> Write:
    """Return the condition that the rest of a carve-out was not returned."""
    return Write(entries_of(node.path[0]), node.value_name, data, ttl, UNRETURNED)


def labels_of(root: str) -> Collection:
    """Return where the names of tools and models of a tree are listed."""
    return Collection("tidegate.run-labels", (POLICY, root))


def collection_of(root: str) -> Collection:
    """Return where the nodes of a tree are stored: in the slot of its root."""
    return Collection("tidegate.runs", (POLICY, root))
