"""The accounts of a budget: which batches are under way, and how they are settled.

Every operation is written as steps, for whoever can ask (see `face`). A batch is held here from its check until it is
settled: what was completed stays charged, what was not is given back. What the database cannot be told is kept in the
backlog, and told when it is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.budget.backlog import Backlog
from tidegate.budget.books import StoreBooks, open_books
from tidegate.budget.held import Held
from tidegate.budget.ledger import Note, Settlement
from tidegate.budget.settings import BudgetSettings
from tidegate.budget.terms import Book, Terms
from tidegate.budget.watch import Watch, log
from tidegate.budget.webhook import Webhook
from tidegate.errors import ConfigError
from tidegate.policy.model import check_cost
from tidegate.stores import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.budget.result import RateLimitResult
    from tidegate.clock import Clock
    from tidegate.limiter import Usage

KEY: Final = "tasks"


class Step(NamedTuple):
    """Something to ask: a method of the limiter or the books, or a function that may block."""

    on: str
    call: Any
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


Steps = Generator[Step, Any, Any]


class Accounts:
    """What is held open, and how it is settled."""

    def __init__(
        self,
        settings: BudgetSettings | None = None,
        *,
        clock: Clock | None = None,
        load: Callable[[], float] | None = None,
        **options: Any,  # noqa: ANN401 - those of BudgetSettings
    ) -> None:
        """Keep a budget: settings, or their fields as keywords, such as `per_minute=20, per_day=500`.

        `load` tells how busy the system is, from 0 to 1, for the rules of the schedule; by default the machine's load
        for each of its processors. `clock` replaces the clock, for tests.
        """
        if settings is None:
            settings = BudgetSettings(**options)
        elif options:
            raise ConfigError(f"give the settings, or {', '.join(sorted(options))}, not both", field="settings")
        self.settings = settings
        self.plan = settings.plan
        self._open: deque[Held] = deque()
        self._closed = False
        self._known: dict[str, Usage] = {}
        self.webhook = Webhook(settings.webhook_url, settings.webhook_secret) if settings.webhook_url else None
        self.watch = Watch(
            settings.name,
            settings.milestones,
            self.webhook.send if self.webhook else None,
            fixed=settings.strategy == "fixed",
            on_error=settings.on_database_error,
        )
        if settings.enabled:
            for useless in settings.idle:
                log.warning("%s", useless)
            self._book = Book(settings, self.plan, load)
            self.store, self.books = open_books(settings, clock)
            self.guard = StoreBooks(self.store, None if clock is self.store.clock else clock)
            self.clock: Clock = clock or self.store.clock
            self._memory = MemoryStore(clock=self.clock)
            self._terms = self._book.now(self._now(), self.clock.steady())
            self._backlog = Backlog(self.books, lambda: self.lost, self._now)
            self.limiter = self._open_limiter()

    def _open_limiter(self) -> Any:  # noqa: ANN401 - a Limiter, of either colour
        raise NotImplementedError

    # ---- recording ---------------------------------------------------------------------------------------------------

    def _recording(
        self,
        task_count: int | None = None,
        task_type: str | None = None,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
        result: RateLimitResult | None = None,
    ) -> Steps:
        """Settle a batch: the one of `result`, or the one that fits best of those that are open."""
        names = read_names(task_ids)
        count = len(names) if task_count is None and names else 1 if task_count is None else task_count
        check_cost(count, "task_count")
        if names and len(names) != count:
            raise ConfigError(f"{count} tasks have {len(names)} task_ids: give one for each", field="task_ids")
        if not self.settings.enabled:
            return None
        held = self._find(count, task_type, result)
        if held is None:
            if count:
                yield from self._recording_unreserved(count, task_type, names, read_cost(cost))
            return None
        return (yield from self._settling(held, count, task_type, names, cost, last=True))

    def _find(self, count: int, task_type: str | None, result: RateLimitResult | None) -> Held | None:
        """Take the batch that tasks were reserved with out of the open ones; None where there is none."""
        if result is not None:
            held = result.batch
            if isinstance(held, Held):
                return held if held.take() else None
            return None
        while True:
            able = [held for held in list(self._open) if not held.bound and not held.settled]
            if task_type is not None:
                able = [held for held in able if held.task_type == task_type] or able
            chosen = next((held for held in able if held.left == count), able[0] if able else None)
            if chosen is None or chosen.take():
                return chosen

    def _recording_unreserved(
        self, count: int, task_type: str | None, names: tuple[str, ...], cost: Mapping[str, int]
    ) -> Steps:
        """Charge tasks that nobody had reserved: they happened, so they count, room or not."""
        terms = self._refresh()
        costs = terms.costs(self.plan.charges(count, task_type, cost, 0))
        self._mirror("acquire", terms, costs)
        self.watch.settled(count, 0)
        yield from self._telling("record", terms.vast, KEY, costs, Note(count, task_type, names, dict(cost) or None))

    def _settling(
        self,
        held: Held,
        count: int,
        task_type: str | None,
        names: tuple[str, ...],
        cost: Mapping[str, int] | None,
        *,
        last: bool,
    ) -> Steps:
        """Settle `count` tasks of a batch as completed; with the last ones, what is left of it goes back."""
        actual = held.cost_of(count) | read_cost(cost)
        kind = task_type if task_type is not None else held.task_type
        used = held.terms.costs(self.plan.charges(count, kind, actual, held.priority))
        part = held.settle(used, count, last=last)
        note = Note(count, kind, names, actual or None) if count else None
        self.watch.settled(count, part.returned)
        self._mirror("adjust", held.terms, part.deltas, held.memory_at)
        if any(part.fresh):
            self._mirror("acquire", held.terms, part.fresh)
        if last:
            self._forget(held)
        terms = held.terms
        told = Settlement(
            terms.policy,
            terms.vast,
            KEY,
            held.at,
            held.number,
            part.held,
            part.deltas,
            part.left,
            part.actual,
            part.fresh,
            note,
        )
        if held.charged:
            yield from self._telling("settle", told)
        else:
            shared = self.settings.on_database_error == "local"
            if shared:  # charged to this process's share, which the guard settles with the database by itself
                yield Step("guard", "settle", (told._replace(fresh=()),))
            if count:
                costs = part.fresh if shared else part.actual
                yield from self._telling("record", terms.vast, KEY, costs, note)
        for lines in tuple(self.store.waited_on):
            lines.wake(KEY)

    def _forget(self, held: Held) -> None:
        with suppress(ValueError):  # given back meanwhile
            self._open.remove(held)

    def _telling(self, name: str, *arguments: Any) -> Steps:  # noqa: ANN401 - those of the books' method
        """Tell the books, or keep it until they can be told."""
        if self._backlog or self.lost:
            self._backlog.keep(name, arguments)
        else:
            yield Step("books", name, arguments)

    # ---- while the database is lost ----------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """Whether the database cannot be asked at the moment."""
        return bool(self.store.metrics().get("store_lost")) if self.settings.enabled else False

    def catch_up(self) -> bool:
        """Tell the database what it missed; tell whether it knows everything now. Done by itself, too."""
        return self._backlog.catch_up()

    @property
    def backlog(self) -> int:
        """How many settlements wait for the database."""
        return len(self._backlog) if self.settings.enabled else 0

    # ---- the limits of the moment, and those in memory ---------------------------------------------------------------

    def _refresh(self) -> Terms:
        """Decide by the quotas of this moment."""
        terms = self._book.now(self._now(), self.clock.steady())
        if terms is not self._terms:
            self._terms = terms
            self.limiter.update(terms.policy)
        return terms

    def _mirror(self, verb: str, terms: Terms, costs: tuple[int, ...], at: int | None = None) -> int:
        """Keep the short-term limits in memory up to date."""
        if terms.short_vast is None:
            return 0
        policy = terms.short if verb == "adjust" else terms.short_vast
        return self._memory.apply_one(verb, policy, KEY, terms.short_costs(costs), None, at).at  # type: ignore[arg-type]  # both or neither

    def _now(self) -> int:
        return self.clock.ns() // 1000


def read_cost(cost: Mapping[str, int] | None) -> dict[str, int]:
    """Take a cost by unit."""
    if cost is None:
        return {}
    if not isinstance(cost, Mapping):
        raise ConfigError(f"expected a mapping of units to whole numbers such as {{'tokens': 1800}}, not {cost!r}",
                          field="cost")  # fmt: skip
    for unit, amount in cost.items():
        check_cost(amount, f"cost.{unit}")
    return dict(cost)


def read_names(task_ids: Iterable[str] | None) -> tuple[str, ...]:
    """Take the names of tasks."""
    names = () if task_ids is None else (task_ids,) if isinstance(task_ids, str) else tuple(task_ids)
    return tuple(str(name) for name in names)
