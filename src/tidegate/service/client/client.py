"""Asks a running service: `Client` for threads, `AsyncClient` for tasks, the same names.

    with Client("http://127.0.0.1:8080", token="...") as client:
        if client.acquire("api", "user:42"):
            ...

Every question that changes something carries an idempotency key, so that one whose answer was lost is asked again
without being charged twice. With `lease="1s"`, `acquire` takes permits ahead and serves further calls from them without
asking; the limits hold all the same (`leases` says how), and what is left is given back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from tidegate.clock import SystemClock
from tidegate.errors import ConfigError, RateLimitError
from tidegate.fork import abandon, at_fork
from tidegate.service.client.lease_cache import LeaseCache, read_lasting
from tidegate.service.client.protocol import (
    MAX_TRIES,
    ServiceDecision,
    ServiceRequest,
    about,
    acquiring,
    answers,
    ask,
    batch,
    costing,
    look,
    options,
    read,
    settling,
    unreachable,
)

try:
    import httpx
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the client needs httpx: pip install 'tidegate[httpx]'") from error

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from tidegate.policy import Cost, Key

R = TypeVar("R")


class Client:
    """Asks a service, from threads. A context manager."""

    def __init__(
        self, url: str = "http://127.0.0.1:8080", *, token: str | None = None, lease: str | float | None = None
    ) -> None:
        """Ask the service at this URL; with a `lease`, take permits ahead for so long."""
        self.url = url
        self._shelf = None if lease is None else LeaseCache(read_lasting(lease), SystemClock.steady)
        self._options = options(url, token)
        self._http: httpx.Client | None = httpx.Client(**self._options)
        at_fork(child=self._start_over)

    def _start_over(self) -> None:
        """Use neither connections nor permits of the parent in a forked process."""
        abandon(self._http)
        self._http = None
        if self._shelf is not None:
            self._shelf.forget()

    def _connections(self) -> httpx.Client:
        if self._http is None:
            self._http = httpx.Client(**self._options)
        return self._http

    def _drive(self, steps: Generator[ServiceRequest, Any, R]) -> R:
        try:
            question = next(steps)
            while True:
                try:
                    said = self._ask(question)
                except RateLimitError as error:
                    question = steps.throw(error)
                else:
                    question = steps.send(said)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # what the steps return
        finally:
            steps.close()  # also if this was cancelled or interrupted: others must not wait for what it began

    def _ask(self, question: ServiceRequest) -> Any:  # noqa: ANN401 - whatever JSON says
        method, path, body, headers, timeout = question
        for left in reversed(range(MAX_TRIES)):
            try:
                http = self._connections()
                return read(http.request(method, path, json=body, headers=headers, timeout=timeout))
            except httpx.TransportError as error:
                if not left or not headers:
                    raise unreachable(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    def acquire(
        self, policy: str, key: Key, cost: Cost = 1, *, wait: float = 0.0, priority: float = 0.0
    ) -> ServiceDecision:
        """Take permits, waiting up to `wait` seconds."""
        return self._drive(acquiring(self._shelf, policy, key, cost, wait, priority))

    def peek(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Give the answer that `acquire` would give, and change nothing."""
        return ServiceDecision.read(self._ask(ask("peek", costing(policy, key, cost))))

    def reserve(
        self, policy: str, key: Key, cost: Cost = 1, *, ttl: float = 60.0, wait: float = 0.0
    ) -> ServiceDecision:
        """Charge an estimate; its `id` settles it."""
        return ServiceDecision.read(self._ask(ask("reserve", costing(policy, key, cost, ttl=ttl, wait=wait), wait)))

    def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation by what it really cost."""
        self._ask(ask("commit", {"id": reservation} | ({} if cost is None else {"cost": cost})))

    def cancel(self, reservation: str) -> None:
        """Give a reservation back."""
        self._ask(ask("cancel", {"id": reservation}))

    def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Give slots of concurrency limits back."""
        self._ask(ask("release", costing(policy, key, cost)))

    def batch(self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> list[ServiceDecision | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost), each by itself."""
        return answers(self._ask(batch(asks)))

    def usage(self, policy: str, key: Key) -> list[dict[str, Any]]:
        """Tell how much of each limit a key has used."""
        return list(self._ask(ask("usage", about(policy, key)))["limits"])

    def reset(self, policy: str, key: Key) -> None:
        """Forget everything about a key; needs the admin token."""
        self._ask(ask("reset", about(policy, key)))

    def block(self, policy: str, key: Key, seconds: float = 3600.0) -> None:
        """Deny a key for so many seconds, whatever its limits say; needs the admin token."""
        self._ask(ask("block", about(policy, key, seconds=seconds)))

    def unblock(self, policy: str, key: Key) -> None:
        """Let a key be decided by its limits again; needs the admin token."""
        self._ask(ask("unblock", about(policy, key)))

    def blocks(self) -> list[dict[str, Any]]:
        """List the blocks that the service's process knows of; needs the admin token."""
        return list(self._ask(look("blocks"))["blocks"])

    def overview(self) -> dict[str, Any]:
        """Tell what the dashboard shows."""
        return dict(self._ask(look("overview")))

    def policies(self) -> dict[str, Any]:
        """List the policies."""
        return dict(self._ask(look("policies")))

    def close(self) -> None:
        """Give back what was taken ahead, and close the connections."""
        if self._shelf is not None:
            self._drive(settling(self._shelf, self._shelf.all()))
        if self._http is not None:
            self._http.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class AsyncClient:
    """Asks a service, from tasks: the names of Client, awaited. An async context manager."""

    def __init__(
        self, url: str = "http://127.0.0.1:8080", *, token: str | None = None, lease: str | float | None = None
    ) -> None:
        """Ask the service at this URL; with a `lease`, take permits ahead for so long."""
        self.url = url
        self._shelf = None if lease is None else LeaseCache(read_lasting(lease), SystemClock.steady)
        self._options = options(url, token)
        self._http: httpx.AsyncClient | None = httpx.AsyncClient(**self._options)
        at_fork(child=self._start_over)

    def _start_over(self) -> None:
        """Use neither connections nor permits of the parent in a forked process."""
        abandon(self._http)
        self._http = None
        if self._shelf is not None:
            self._shelf.forget()

    def _connections(self) -> httpx.AsyncClient:
        if self._http is None:
            self._http = httpx.AsyncClient(**self._options)
        return self._http

    async def _drive(self, steps: Generator[ServiceRequest, Any, R]) -> R:
        try:
            question = next(steps)
            while True:
                try:
                    said = await self._ask(question)
                except RateLimitError as error:
                    question = steps.throw(error)
                else:
                    question = steps.send(said)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # what the steps return
        finally:
            steps.close()  # also if this was cancelled or interrupted: others must not wait for what it began

    async def _ask(self, question: ServiceRequest) -> Any:  # noqa: ANN401 - whatever JSON says
        method, path, body, headers, timeout = question
        for left in reversed(range(MAX_TRIES)):
            try:
                return read(
                    await self._connections().request(method, path, json=body, headers=headers, timeout=timeout)
                )
            except httpx.TransportError as error:
                if not left or not headers:
                    raise unreachable(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    async def acquire(
        self, policy: str, key: Key, cost: Cost = 1, *, wait: float = 0.0, priority: float = 0.0
    ) -> ServiceDecision:
        """Take permits, waiting up to `wait` seconds."""
        return await self._drive(acquiring(self._shelf, policy, key, cost, wait, priority))

    async def peek(self, policy: str, key: Key, cost: Cost = 1) -> ServiceDecision:
        """Give the answer that `acquire` would give, and change nothing."""
        return ServiceDecision.read(await self._ask(ask("peek", costing(policy, key, cost))))

    async def reserve(
        self, policy: str, key: Key, cost: Cost = 1, *, ttl: float = 60.0, wait: float = 0.0
    ) -> ServiceDecision:
        """Charge an estimate; its `id` settles it."""
        return ServiceDecision.read(
            await self._ask(ask("reserve", costing(policy, key, cost, ttl=ttl, wait=wait), wait))
        )

    async def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation by what it really cost."""
        await self._ask(ask("commit", {"id": reservation} | ({} if cost is None else {"cost": cost})))

    async def cancel(self, reservation: str) -> None:
        """Give a reservation back."""
        await self._ask(ask("cancel", {"id": reservation}))

    async def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Give slots of concurrency limits back."""
        await self._ask(ask("release", costing(policy, key, cost)))

    async def batch(
        self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]
    ) -> list[ServiceDecision | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost), each by itself."""
        return answers(await self._ask(batch(asks)))

    async def usage(self, policy: str, key: Key) -> list[dict[str, Any]]:
        """Tell how much of each limit a key has used."""
        return list((await self._ask(ask("usage", about(policy, key))))["limits"])

    async def reset(self, policy: str, key: Key) -> None:
        """Forget everything about a key; needs the admin token."""
        await self._ask(ask("reset", about(policy, key)))

    async def block(self, policy: str, key: Key, seconds: float = 3600.0) -> None:
        """Deny a key for so many seconds, whatever its limits say; needs the admin token."""
        await self._ask(ask("block", about(policy, key, seconds=seconds)))

    async def unblock(self, policy: str, key: Key) -> None:
        """Let a key be decided by its limits again; needs the admin token."""
        await self._ask(ask("unblock", about(policy, key)))

    async def blocks(self) -> list[dict[str, Any]]:
        """List the blocks that the service's process knows of; needs the admin token."""
        return list((await self._ask(look("blocks")))["blocks"])

    async def overview(self) -> dict[str, Any]:
        """Tell what the dashboard shows."""
        return dict(await self._ask(look("overview")))

    async def policies(self) -> dict[str, Any]:
        """List the policies."""
        return dict(await self._ask(look("policies")))

    async def close(self) -> None:
        """Give back what was taken ahead, and close the connections."""
        if self._shelf is not None:
            await self._drive(settling(self._shelf, self._shelf.all()))
        if self._http is not None:
            await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


__all__ = ["AsyncClient", "Client", "ServiceDecision"]
