"""Run and AsyncRun: a budget for a tree of agents, charged before each call.

with Run("research-42", store="sqlite:///runs.db", limits=["0.20/run unit=usd", "300/run"]) as run:
planner = run.child("planner", limits=["0.05/run unit=usd"])
with planner.reserve({"usd": "0.01"}) as call:      # charged to planner and research-42, or Denied
...                                             # send the call
call.commit({"usd": "0.0072"})                  # the difference is refunded at both
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from tidegate._limiter.joint import async_performer, performer
from tidegate._runtime.ambient import CURRENT_RUN
from tidegate._runtime.arguments import seconds
from tidegate._runtime.clock import TaskSignal, ThreadSignal
from tidegate._runtime.flow import run, run_async
from tidegate.agents._base_run import CALL_TTL, BaseRun
from tidegate.agents._node import CLOSED, STOPPED
from tidegate.agents._reservation import AsyncRunReservation, RunReservation
from tidegate.agents._tokens import RIGHTS

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from types import TracebackType

    from tidegate._runtime.clock import Clock
    from tidegate._runtime.flow import Flow
    from tidegate.agents._exhausted import OnExhausted
    from tidegate.agents._limits import Amount, RunCost
    from tidegate.agents._payments import RunCosts
    from tidegate.agents._reports import ReportRow
    from tidegate.agents._usage import NodeUsage
    from tidegate.core._limit import Limit
    from tidegate.stores import Store


class Run(BaseRun):
    """A node of a tree of agents, for threads."""

    def _created(self) -> None:
        self._execute(self._open_flow())

    def _execute(self, flow: Flow[Any, Any]) -> Any:  # noqa: ANN401 - what the flow returns
        """Run a flow in this thread."""
        return run(flow, performer(self.clock))

    @classmethod
    def join(
        cls,
        token: str | None = None,
        *,
        store: str | Store | None = None,
        secret: str | Sequence[str] = (),
        clock: Clock | None = None,
    ) -> Self:
        """Use a node in another process, by its token.

        By default, the token is that of TIDEGATE_RUN, and the store that of TIDEGATE_STORE.
        """
        joined = cls._make_joined(token, store, secret, clock)
        joined._created()  # noqa: SLF001 - of this class
        return joined

    @classmethod
    def find(
        cls, identifier: str, *, store: str | Store, secret: str | Sequence[str] = (), clock: Clock | None = None
    ) -> Self:
        """Use a node by its id, with all rights: for operators, who have access to the store."""
        found = cls._make_found(identifier, store, secret, clock)
        found._created()  # noqa: SLF001 - of this class
        return found

    def child(
        self,
        name: str,
        *,
        limits: str | Limit | Iterable[str | Limit] = (),
        ttl: float | None = None,
        carve: Mapping[str, Amount] | None = None,
        on_exhausted: OnExhausted = "stop",
        max_repeats: int | None = None,
    ) -> Self:
        """Create a node below this one, whose calls are charged to both.

        `carve` reserves a part of what is left here, by unit: its calls are charged to the child alone, and what is
        left when it is closed or ends is returned. `on_exhausted` and `max_repeats` are those of Run, for this node.
        """
        child = self._make_child(name, limits, ttl, carve, on_exhausted, max_repeats)
        child._created()  # noqa: SLF001 - of this class
        return child

    def reserve(
        self,
        cost: RunCost = 1,
        *,
        ttl: float = CALL_TTL,
        timeout: float | None = 0.0,
        request: str | bytes | None = None,
        label: str = "",
    ) -> RunReservation:
        """Charge an estimate here and at all nodes above, before a call is sent; raises Denied, with its `node`.

        A cost is a number of calls, or amounts by unit. Settle it with `commit` or `cancel`, or as a context manager.
        If it is not settled within `ttl` seconds, the estimate stays charged. `timeout` waits for limits that are not
        per run. `request` is what is sent, for `max_repeats`; `label`
        is what the call is for, such as `tool:web_search` or `model:large`, by which reports sum.
        """
        return self.reserve_first([cost], ttl=ttl, timeout=timeout, request=request, label=label)

    def reserve_first(
        self,
        costs: RunCosts,
        *,
        ttl: float = CALL_TTL,
        timeout: float | None = 0.0,
        request: str | bytes | None = None,
        label: str = "",
    ) -> RunReservation:
        """Charge the first of several costs that fits, in one step: a list, or a mapping by name.

        `chosen` of the reservation is its place, `alternative` its name. `credits.pays(cost)` is a cost that credits
        pay. Those of `on_exhausted` are tried after all of them.
        """
        ttl = seconds("ttl", ttl)
        opened, charge = self._execute(self._reserve_flow(costs, timeout, ThreadSignal, request, label))
        return RunReservation(opened.tree, charge, self.clock, ttl)

    def charge(self, cost: RunCost = 1, *, timeout: float | None = 0.0, label: str = "") -> None:
        """Charge a cost that is known."""
        self.reserve(cost, timeout=timeout, label=label).commit()

    def token(self, *, rights: Iterable[str] = RIGHTS, ttl: float | None = None) -> str:
        """Return a signed string by which others join this node: with some of the rights charge, child and read."""
        return self._execute(self._token_flow(rights, ttl))  # type: ignore[no-any-return]  # by the flow

    def owner_key(self) -> str:
        """Return a signed string with all rights at this node, for who created it in another process; keep it secret.

        `Run.join` accepts it. It is no token: a gateway refuses it.
        """
        return self._execute(self._owner_flow())  # type: ignore[no-any-return]  # by the flow

    def usage(self) -> NodeUsage:
        """Return what this node and those below it have used."""
        return self._execute(self._usage_flow())  # type: ignore[no-any-return]  # by the flow

    def report(self) -> list[ReportRow]:
        """Return what was used at each node below, and for each tool and model, as rows for a report."""
        return self._execute(self._report_flow())  # type: ignore[no-any-return]  # by the flow

    def extend(self, more: Mapping[str, Amount] | None = None, *, ttl: float | None = None) -> None:
        """Add to the quotas per run, by unit, and move the end to `ttl` seconds from now, in one step."""
        self._execute(self._extend_flow(more, ttl))

    def stop(self, *, end_streams: bool = False) -> None:
        """Deny every later call of this node and of all nodes below it, in every process.

        With `end_streams`, gateways also end the responses that they are passing on, within about a second.
        """
        self._execute(self.end_flow(STOPPED, end_streams=end_streams))

    def check(self) -> None:
        """Raise RunDenied if this node accepts no calls: it, or one above, was stopped or closed, or has ended.

        A program that reads a long stream may call it from time to time: nothing is charged.
        """
        self._execute(self._check_flow(ends_streams=False))

    def close(self) -> None:
        """End the node; the store is closed with the root if it was opened from a URL."""
        try:
            if self._owned:
                self._execute(self.end_flow(CLOSED))
        finally:
            self._opened_store.close()

    def __enter__(self) -> Self:
        """Make it the current run."""
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it, unless it was joined, and make the run current that was before."""
        self._leave(error)
        self.close()


class AsyncRun(BaseRun):
    """A node of a tree of agents, for tasks: the methods of Run as coroutines.

    Start it with `async with AsyncRun(…) as run:` or `run = await AsyncRun(…)`.
    """

    for_tasks = True

    async def _execute(self, flow: Flow[Any, Any]) -> Any:  # noqa: ANN401 - what the flow returns
        """Run a flow in this task."""
        return await run_async(flow, async_performer(self.clock))

    async def _opened_self(self) -> Self:
        await self._execute(self._open_flow())
        return self

    def __await__(self) -> Generator[Any, Any, Self]:
        """Create or join the node."""
        return self._opened_self().__await__()

    @classmethod
    def join(
        cls,
        token: str | None = None,
        *,
        store: str | Store | None = None,
        secret: str | Sequence[str] = (),
        clock: Clock | None = None,
    ) -> Self:
        """Use a node in another process, by its token; see Run.join. Await it, or use `async with`."""
        return cls._make_joined(token, store, secret, clock)

    @classmethod
    def find(
        cls, identifier: str, *, store: str | Store, secret: str | Sequence[str] = (), clock: Clock | None = None
    ) -> Self:
        """Use a node by its id, with all rights; see Run.find. Await it, or use `async with`."""
        return cls._make_found(identifier, store, secret, clock)

    def child(
        self,
        name: str,
        *,
        limits: str | Limit | Iterable[str | Limit] = (),
        ttl: float | None = None,
        carve: Mapping[str, Amount] | None = None,
        on_exhausted: OnExhausted = "stop",
        max_repeats: int | None = None,
    ) -> Self:
        """Create a node below this one; see Run.child. Await it, or use `async with`."""
        return self._make_child(name, limits, ttl, carve, on_exhausted, max_repeats)

    async def reserve(
        self,
        cost: RunCost = 1,
        *,
        ttl: float = CALL_TTL,
        timeout: float | None = 0.0,  # noqa: ASYNC109 - part of the contract
        request: str | bytes | None = None,
        label: str = "",
    ) -> AsyncRunReservation:
        """Charge an estimate here and at all nodes above; see Run.reserve."""
        return await self.reserve_first([cost], ttl=ttl, timeout=timeout, request=request, label=label)

    async def reserve_first(
        self,
        costs: RunCosts,
        *,
        ttl: float = CALL_TTL,
        timeout: float | None = 0.0,  # noqa: ASYNC109 - as above
        request: str | bytes | None = None,
        label: str = "",
    ) -> AsyncRunReservation:
        """Charge the first of several costs that fits; see Run.reserve_first."""
        ttl = seconds("ttl", ttl)
        opened, charge = await self._execute(self._reserve_flow(costs, timeout, TaskSignal, request, label))
        return AsyncRunReservation(opened.tree, charge, self.clock, ttl)

    async def charge(
        self,
        cost: RunCost = 1,
        *,
        timeout: float | None = 0.0,  # noqa: ASYNC109 - as above
        label: str = "",
    ) -> None:
        """Charge a cost that is known."""
        await (await self.reserve(cost, timeout=timeout, label=label)).commit()

    async def token(self, *, rights: Iterable[str] = RIGHTS, ttl: float | None = None) -> str:
        """Return a signed string by which others join this node; see Run.token."""
        return await self._execute(self._token_flow(rights, ttl))  # type: ignore[no-any-return]  # by the flow

    async def owner_key(self) -> str:
        """Return a signed string with all rights at this node; see Run.owner_key."""
        return await self._execute(self._owner_flow())  # type: ignore[no-any-return]  # by the flow

    async def usage(self) -> NodeUsage:
        """Return what this node and those below it have used."""
        return await self._execute(self._usage_flow())  # type: ignore[no-any-return]  # by the flow

    async def report(self) -> list[ReportRow]:
        """Return what was used at each node below, and for each tool and model; see Run.report."""
        return await self._execute(self._report_flow())  # type: ignore[no-any-return]  # by the flow

    async def extend(self, more: Mapping[str, Amount] | None = None, *, ttl: float | None = None) -> None:
        """Add to the quotas per run, and move the end, in one step; see Run.extend."""
        await self._execute(self._extend_flow(more, ttl))

    async def stop(self, *, end_streams: bool = False) -> None:
        """Deny every later call of this node and of all nodes below it, in every process; see Run.stop."""
        await self._execute(self.end_flow(STOPPED, end_streams=end_streams))

    async def check(self) -> None:
        """Raise RunDenied if this node accepts no calls; see Run.check."""
        await self._execute(self._check_flow(ends_streams=False))

    async def check_streams(self) -> None:
        """Raise RunDenied if this node, or one above, was stopped with `end_streams`."""
        await self._execute(self._check_flow(ends_streams=True))

    async def close(self) -> None:
        """End the node; the store is closed with the root if it was opened from a URL."""
        try:
            if self._owned:
                await self._execute(self.end_flow(CLOSED))
        finally:
            await self._opened_store.close_async()

    async def __aenter__(self) -> Self:
        """Create or join the node, and make it the current run."""
        await self._opened_self()
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it, unless it was joined, and make the run current that was before."""
        self._leave(error)
        await self.close()


def current_run() -> Run | AsyncRun | None:
    """Return the run that is current in this thread or task."""
    return CURRENT_RUN.get()  # type: ignore[return-value]  # only runs are set
