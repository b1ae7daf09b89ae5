"""Credits: amounts that were bought or granted in advance, and that runs spend after their own quotas.

    credits = Credits("team-red", store=store, unit="usd")
    credits.add(5)
    Run("research", store=store, limits=["0.20/run unit=usd"], on_exhausted=credits)

Credits are a node of their own, which does not end with a run: its limit never refills, and `add` raises it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.joint import async_performer, performer
from tidegate._limiter.waiting import ApplyStep
from tidegate._runtime.flow import run, run_async
from tidegate.agents._limits import CALLS, RunCost, raise_quotas, run_name, to_counted
from tidegate.agents._node import RETENTION, Details, Node
from tidegate.agents._tree import Tree, check_name
from tidegate.agents._usage import usage_flow
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, ValueConflict
from tidegate.stores._opened import OpenedStore
from tidegate.stores._values import Write

if TYPE_CHECKING:
    from tidegate._limiter.waiting import Step
    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.agents._limits import Amount
    from tidegate.stores import Store

ROOT: Final = "credits:"
LIFE: Final = 3650 * 86_400 * SECOND  # credits end ten years after they were created


class CreditCost(NamedTuple):
    """A cost whose unit credits pay, instead of the limits of the run; what else it has is charged to the run."""

    credits: Credits | AsyncCredits
    cost: RunCost


class CreditBalance(NamedTuple):
    """What was added to credits, what was spent, and what is left, as they are counted."""

    unit: str
    added: int
    used: int
    remaining: int


class CreditNode(NamedTuple):
    """Credits as a process knows them."""

    name: str
    tree: Tree
    node: Node
    unit: str


def credit_node_flow(store: Store, name: str, clock: Clock | None) -> Flow[Any, CreditNode]:
    """Return credits that exist; raises RunEndedError for others."""
    tree = Tree(store, ROOT + name, clock)
    node = yield from tree.node_flow((tree.root,))
    return CreditNode(name, tree, node, next(unit for unit in node.units if unit != CALLS))


class BaseCredits:
    """Base class of Credits and AsyncCredits."""

    def __init__(self, name: str, *, store: str | Store, unit: str = "usd", clock: Clock | None = None) -> None:
        """Use the credits of this name in a store, or create them, with nothing in them.

        `unit` is what runs count: a currency such as `usd`, `tokens`, or a name of your own.
        """
        check_name(name)
        self.name: str = name
        self._given_unit = unit
        self.unit: str = to_counted(unit, 1)[0]
        if self.unit == CALLS:
            raise ConfigError(
                "credits cannot pay for requests, which each node counts: choose another unit", field="unit"
            )
        self._opened_store = OpenedStore.open(store, clock=clock)
        self._clock = clock
        self.clock: Clock = clock or self._opened_store.store.clock
        self._found: CreditNode | None = None

    @property
    def store(self) -> Store:
        """The store that keeps them."""
        return self._opened_store.store.unleased

    def pays(self, cost: RunCost) -> CreditCost:
        """Return a cost that these credits pay, as an alternative of `reserve_first`."""
        return CreditCost(self, cost)  # type: ignore[arg-type]  # it is one of the two

    def node_flow(self) -> Flow[Step, CreditNode]:
        """Return the node, which the first process creates.

        A limit allows at least one, so a new node has one, which is charged in the step that creates it.
        """
        if self._found is not None:
            return self._found
        tree = Tree(self._opened_store.store, ROOT + self.name, self._clock)
        now = yield from tree.time_flow()
        limit = f"1/run unit={self.unit} name={run_name(self.unit)}"
        data = Details(self.name, (limit,), now, now + LIFE).dump()
        node = tree.build((tree.root,), None, data)
        policy = node.limiter.policy
        ask = (policy, node.key, tuple(int(limit.unit == self.unit) for limit in policy.limits))
        write = Write(tree.collection, tree.root, data, LIFE + RETENTION, None)
        try:
            yield ApplyStep(tree.store, "acquire", (ask,), tree.now(), None, (write,))
        except ValueConflict:
            found = yield from credit_node_flow(self._opened_store.store, self.name, self._clock)
        else:
            found = CreditNode(self.name, tree, tree.add(node.path, None, data), self.unit)
        if found.unit != self.unit:
            raise ConfigError(f"the credits {self.name!r} are in {found.unit}, not in {self.unit}", field="unit")
        self._found = found
        return found

    def _add_flow(self, amount: Amount) -> Flow[Any, None]:
        found = yield from self.node_flow()
        _, more = to_counted(self._given_unit, amount, "amount")
        if more < 1:
            raise ConfigError(f"must be an amount above 0, not {amount!r}", field="amount")
        added = {self.unit: more}
        yield from found.tree.extend_flow(
            found.node.path, lambda details: details.change(limits=raise_quotas(details.limits, added))
        )

    def _balance_flow(self) -> Flow[Any, CreditBalance]:
        found = yield from self.node_flow()
        usage = yield from usage_flow(found.tree, found.node.path)
        limit = usage.limits[run_name(self.unit)]
        return CreditBalance(self.unit, limit.quota - 1, limit.used - 1, limit.remaining)


class Credits(BaseCredits):
    """Credits, for threads."""

    def add(self, amount: Amount) -> None:
        """Add an amount; runs can spend it from the next call on."""
        run(self._add_flow(amount), performer(self.clock))

    def balance(self) -> CreditBalance:
        """Return what was added, spent and is left."""
        return run(self._balance_flow(), performer(self.clock))

    def close(self) -> None:
        """Close the store if it was opened from a URL."""
        self._opened_store.close()


class AsyncCredits(BaseCredits):
    """Credits, for tasks: the methods of Credits as coroutines."""

    async def add(self, amount: Amount) -> None:
        """Add an amount; see Credits.add."""
        await run_async(self._add_flow(amount), async_performer(self.clock))

    async def balance(self) -> CreditBalance:
        """Return what was added, spent and is left."""
        return await run_async(self._balance_flow(), async_performer(self.clock))

    async def close(self) -> None:
        """Close the store if it was opened from a URL."""
        await self._opened_store.close_async()
