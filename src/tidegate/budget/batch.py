"""A batch around a block: reserved when it begins, settled when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tidegate.budget.held import Held
from tidegate.errors import Denied, RateLimitError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from tidegate.budget.accounts import Steps
    from tidegate.budget.engine import Budget
    from tidegate.budget.result import RateLimitResult


class _Batch:
    """What both kinds share: how much of the batch is recorded, and what its end means."""

    def __init__(self, budget: Budget, drive: Callable[[Steps], Any], asked: tuple[Any, ...]) -> None:
        """Made by `batch`."""
        self._budget = budget
        self._drive = drive
        self._asked = asked
        self._recorded = False
        self.task_count: int = asked[0]
        self.completed = 0
        self.failed = 0
        self.result: RateLimitResult | None = None

    def _entering(self) -> Steps:
        result: RateLimitResult = yield from self._budget._checking(*self._asked, bound=True)  # noqa: SLF001 - part of the budget
        if not result.allowed:
            raise Denied(result.reason, result)  # type: ignore[arg-type]  # answers as a Decision does, of tiers
        self.result = result

    def _held(self) -> Held | None:
        if self.result is None:
            raise RateLimitError("the batch is not under way: use it in a with block")
        return self.result.batch if isinstance(self.result.batch, Held) else None

    def _recording(
        self, task_count: int | None, task_ids: Iterable[str] | None, cost: Mapping[str, int] | None
    ) -> Steps:
        names = () if task_ids is None else (task_ids,) if isinstance(task_ids, str) else tuple(task_ids)
        count = task_count if task_count is not None else len(names) or 1
        held = self._held()
        self._recorded = True
        self.completed += count
        if held is not None:
            yield from self._budget._settling(held, count, None, names, cost, last=False)  # noqa: SLF001 - part of the budget

    def fail(self, task_count: int = 1) -> None:
        """Count tasks as failed: they are given back at the end of the block."""
        self.failed += task_count

    def _exiting(self, *, well: bool) -> Steps:
        """Record the rest, unless single tasks were, and give back what was not recorded."""
        held = self._held()
        rest = 0
        if well and not self._recorded:
            rest = max(0, self.task_count - self.failed)
            self.completed += rest
        if held is not None and held.take():
            yield from self._budget._settling(held, rest, None, (), None, last=True)  # noqa: SLF001 - part of the budget


class Batch(_Batch):
    """A batch for threads: `with budget.batch(20) as batch:`.

    At the end of the block all its tasks are recorded as completed, or, if `record` was called, those that it named;
    the others, and those that `fail` counted, are given back. After an exception, all that was not recorded is.
    """

    def record(
        self,
        task_count: int | None = None,
        *,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
    ) -> None:
        """Record some of the tasks as completed, at once: a crash does not forget them."""
        self._drive(self._recording(task_count, task_ids, cost))

    def __enter__(self) -> Self:
        """Reserve."""
        self._drive(self._entering())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Settle."""
        self._drive(self._exiting(well=kind is None))


class AsyncBatch(_Batch):
    """A batch for tasks: `async with budget.batch(20) as batch:`; see Batch."""

    _drive: Callable[[Steps], Awaitable[Any]]

    async def record(
        self,
        task_count: int | None = None,
        *,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
    ) -> None:
        """Record some of the tasks as completed, at once: a crash does not forget them."""
        await self._drive(self._recording(task_count, task_ids, cost))

    async def __aenter__(self) -> Self:
        """Reserve."""
        await self._drive(self._entering())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Settle."""
        await self._drive(self._exiting(well=kind is None))
