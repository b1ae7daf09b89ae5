"""Reservations at a service: what `Client.reserve` and `AsyncClient.reserve` return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from tidegate._runtime.entered import EnteredBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from tidegate._policy import Cost
    from tidegate.service.client._client import AsyncClient, Client
    from tidegate.service.client._protocol import ServiceDecision


class ServiceReservation:
    """Permits that a service charged for a running call. Commit the actual cost, or cancel.

    The `id` settles it too: `client.commit(id, cost)` and `client.cancel(id)` work in any process.
    """

    def __init__(self, client: Client, decision: ServiceDecision, *, cancels: bool = True) -> None:
        """Take what `Client.reserve` charged; `cancels` is whether an exception in its block cancels it."""
        self._client = client
        self._cancels = cancels
        self.decision = decision
        self.id: str = str(decision.id)
        self.settled: bool = decision.id is None  # no limit applies

    def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate)."""
        if self.decision.id is not None:
            self.settled = True
            self._client.commit(self.id, actual)

    def cancel(self) -> None:
        """Refund the whole charge."""
        if self.decision.id is not None:
            self.settled = True
            self._client.cancel(self.id)

    def __enter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            if kind is None or not self._cancels:
                self.commit()
            else:
                self.cancel()


class AsyncServiceReservation:
    """A reservation at a service, for tasks: the methods of ServiceReservation as coroutines."""

    def __init__(self, client: AsyncClient, decision: ServiceDecision, *, cancels: bool = True) -> None:
        """Take what `AsyncClient.reserve` charged; `cancels` is whether an exception in its block cancels it."""
        self._client = client
        self._cancels = cancels
        self.decision = decision
        self.id: str = str(decision.id)
        self.settled: bool = decision.id is None  # no limit applies

    async def commit(self, actual: Cost | None = None) -> None:
        """Charge the actual cost instead of the estimate (None: the estimate)."""
        if self.decision.id is not None:
            self.settled = True
            await self._client.commit(self.id, actual)

    async def cancel(self) -> None:
        """Refund the whole charge."""
        if self.decision.id is not None:
            self.settled = True
            await self._client.cancel(self.id)

    async def __aenter__(self) -> Self:
        """Settle at the end of the block."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        if not self.settled:
            await (self.commit() if kind is None or not self._cancels else self.cancel())


class ServiceReserving:
    """The awaitable that `AsyncClient.reserve` returns: `await` it, or use it in `async with`."""

    def __init__(self, start: Callable[[], Coroutine[object, None, AsyncServiceReservation]]) -> None:
        """Keep the function that reserves."""
        self._start = start
        self._entered: EnteredBlocks[AsyncServiceReservation] = EnteredBlocks()

    def __await__(self) -> Generator[object, None, AsyncServiceReservation]:
        """Reserve."""
        return self._start().__await__()

    async def __aenter__(self) -> AsyncServiceReservation:
        """Reserve, and settle at the end of the block."""
        return self._entered.add(await self._start())

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Commit the estimate, or cancel after an exception, unless it was settled before."""
        reservation = self._entered.remove()
        if reservation is not None:
            await reservation.__aexit__(kind, *rest)
