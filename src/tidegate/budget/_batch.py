"""A batch around a block: reserved when the block starts, settled when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tidegate.budget._open_batch import OpenBatch
from tidegate.budget._operations import read_cost, read_task_ids
from tidegate.errors import Denied, RateLimitError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from tidegate.budget._operations import BudgetFlow, BudgetOperations
    from tidegate.budget._result import RateLimitResult


class _Batch:
    """Base class of Batch and AsyncBatch: how many tasks are recorded, and what happens at the end of the block."""

    def __init__(
        self, operations: BudgetOperations, run: Callable[[BudgetFlow[None]], Any], arguments: tuple[Any, ...]
    ) -> None:
        """Take the arguments of the check; called by `batch`."""
        self._operations = operations
        self._run = run
        self._arguments = arguments
        self._recorded = False
        self._outside = [True]  # emptied by the one block that enters
        self.task_count: int = arguments[0]
        self.completed: int = 0
        self.failed: int = 0
        self.result: RateLimitResult | None = None

    def _enter_flow(self) -> BudgetFlow[None]:
        try:
            self._outside.pop()
        except IndexError:
            raise RateLimitError("the batch is in use by another block: create one for each with batch(...)") from None
        try:
            yield from self._check_flow()
        except BaseException:
            self._outside.append(True)
            raise

    def _check_flow(self) -> BudgetFlow[None]:
        result = yield from self._operations.check_flow(*self._arguments, in_block=True)
        if not result.allowed:
            raise Denied(result.reason, result)  # type: ignore[arg-type]  # has the attributes of a Decision
        self.result = result

    def _open_batch(self) -> OpenBatch | None:
        if self.result is None:
            raise RateLimitError("the batch has not started: use it in a with block")
        return self.result.batch if isinstance(self.result.batch, OpenBatch) else None

    def _record_flow(
        self, task_count: int | None, task_ids: Iterable[str] | None, cost: Mapping[str, int] | None
    ) -> BudgetFlow[None]:
        ids = read_task_ids(task_ids)
        count = task_count if task_count is not None else len(ids) or 1
        batch = self._open_batch()
        if batch is not None:
            self._operations.settings.check_task(None, read_cost(cost))
        self._recorded = True
        self.completed += count
        if batch is not None:
            yield from self._operations.settle_flow(batch, count, None, ids, cost, last=False)

    def fail(self, task_count: int = 1) -> None:
        """Count tasks as failed: they are returned at the end of the block."""
        self.failed += task_count

    def _exit_flow(self, *, succeeded: bool) -> BudgetFlow[None]:
        """Record the rest, unless single tasks were recorded, and return what was not recorded."""
        batch = self._open_batch()
        self._outside.append(True)
        rest = 0
        if succeeded and not self._recorded:
            rest = max(0, self.task_count - self.failed)
            self.completed += rest
        if batch is not None and batch.claim():
            yield from self._operations.settle_flow(batch, rest, None, (), None, last=True)


class Batch(_Batch):
    """A batch for threads: `with budget.batch(20) as batch:`.

    At the end of the block all tasks are recorded as completed, except those that `fail` counted; if `record` was
    called, only the tasks that it recorded. The others are returned. After an exception, everything that was not
    recorded is returned.
    """

    def record(
        self,
        task_count: int | None = None,
        *,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
    ) -> None:
        """Record some of the tasks as completed now, so that a crash does not lose them."""
        self._run(self._record_flow(task_count, task_ids, cost))

    def __enter__(self) -> Self:
        """Reserve the batch."""
        self._run(self._enter_flow())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Settle the batch."""
        self._run(self._exit_flow(succeeded=kind is None))


class AsyncBatch(_Batch):
    """A batch for asyncio: `async with budget.batch(20) as batch:`; see Batch."""

    _run: Callable[[BudgetFlow[None]], Awaitable[Any]]

    async def record(
        self,
        task_count: int | None = None,
        *,
        task_ids: Iterable[str] | None = None,
        cost: Mapping[str, int] | None = None,
    ) -> None:
        """Record some of the tasks as completed now, so that a crash does not lose them."""
        await self._run(self._record_flow(task_count, task_ids, cost))

    async def __aenter__(self) -> Self:
        """Reserve the batch."""
        await self._run(self._enter_flow())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Settle the batch."""
        await self._run(self._exit_flow(succeeded=kind is None))
