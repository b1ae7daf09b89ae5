"""A node of a run: what the store keeps of it, and the limiter that charges it.

What is stored is one value per node, in the slot of its root. A call is charged on condition that the values of its
node and of all ancestors are those that this process knows, so a stop, a close or a changed quota takes effect with the
next call of every process: the condition fails, and the process reads the value again. A missing value denies.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tidegate._limiter.base_limiter import BaseLimiter
from tidegate._limiter.joint import LimiterAsk
from tidegate._policy import Policy
from tidegate.agents._limits import CALLS, add_counters, build_limits
from tidegate.core._algorithms import NEVER, View
from tidegate.core._bounds import SECOND
from tidegate.core._decision import Decision, LocalDecision
from tidegate.core._limit import Limit
from tidegate.stores._values import KEEP, Collection, Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidegate._policy import Key
    from tidegate._runtime.clock import Clock
    from tidegate.stores._base import Ask, Store

POLICY: Final = "tidegate.runs"
RETENTION: Final = 7 * 86_400 * SECOND  # how long a node is shown after its end
MAX_DEPTH: Final = 16
OPEN, STOPPED, CLOSED = "open", "stopped", "closed"

Path = tuple[str, ...]


class Details(NamedTuple):
    """What the store keeps of a node. Times are microseconds since 1970 by the clock of the store.

    `carved` is what was reserved from the parent when it was created. `above` are policies that are charged with the
    root: the name, the limits and the key of each.
    """

    name: str
    limits: tuple[str, ...]
    created: int
    ends: int
    status: str = OPEN
    carved: Mapping[str, int] | None = None
    above: Sequence[tuple[str, Sequence[str], Sequence[str]]] = ()
    number: int = 0  # of changes: no two versions have the same bytes

    def dump(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps(self._asdict(), separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def load(cls, data: bytes) -> Self:
        """Read what `dump` returned."""
        fields = json.loads(data)
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


class NodeLimiter(BaseLimiter):
    """Decides about the limits of one node; what a limit per run denies is denied for ever."""

    def __init__(self, policy: Policy, store: Store, clock: Clock | None, node: str) -> None:
        """Take the name of the node, which denials say."""
        super().__init__(policy, store=store, clock=clock)
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
        self.key: Key = path if len(path) > 1 else path[0]
        self.limiter: NodeLimiter
        self.above: list[tuple[BaseLimiter, Key]] = []
        self.update(data)

    def update(self, data: bytes) -> None:
        """Take what the store keeps of the node now."""
        self.data: bytes = data
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
                self.units = tuple(dict.fromkeys((*self.units, *limiter.policy.units)))
        if hasattr(self, "limiter"):
            self.limiter.update(policy)
        else:
            self.limiter = NodeLimiter(policy, self._store, self._clock, self.title)
        self.limiter.life = self.details.ends - self.details.created

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
    def line(self) -> list[Node]:
        """The node and its ancestors, the root last."""
        return [self] if self.parent is None else [self, *self.parent.line]

    @property
    def carved_line(self) -> list[Node]:
        """The carve-outs among the node and its ancestors."""
        return [node for node in self.line if node.details.carved is not None]

    @property
    def condition(self) -> Write:
        """The condition that the stored node is this one."""
        return Write(self.collection, self.value_name, KEEP, 0, self.data)

    def asks(self, cost: Mapping[str, int]) -> list[LimiterAsk]:
        """Return what a call is charged, at this node and above, on condition that no node of the line has changed."""
        conditions = tuple(node.condition for node in self.line)
        left = dict(cost)  # what is charged further up: not what a carve-out was charged for when it was created
        found = []
        for node in self.line:
            found.append(LimiterAsk(node.limiter, node.key, part(left, node.limiter.policy.units), conditions))
            left = {unit: amount for unit, amount in left.items() if unit not in (node.details.carved or ())}
        root = self.line[-1]
        found += [LimiterAsk(limiter, key, part(left, limiter.policy.units)) for limiter, key in root.above]
        return found


def part(cost: Mapping[str, int], units: Sequence[str]) -> dict[str, int]:
    """Return the part of a cost in some units."""
    return {unit: amount for unit, amount in cost.items() if unit in units}


def collection_of(root: str) -> Collection:
    """Return where the nodes of a tree are stored: in the slot of its root."""
    return Collection("tidegate.runs", (POLICY, root))
