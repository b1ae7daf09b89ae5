"""Asks a running service: `Client` for threads, `AsyncClient` for tasks, the same names.

    with Client("http://127.0.0.1:8080", token="...") as client:
        if client.acquire("api", "user:42"):
            ...

Every question that changes something carries an idempotency key, so that one whose answer was lost is asked again
without being charged twice. What both clients share is written once: how a question is worded and an answer read.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.service.receipts import AlreadySettledError

try:
    import httpx
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ConfigError("the client needs httpx: pip install 'tidegate[httpx]'") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.policy import Cost, Key

MARGIN: Final = 5.0  # seconds that an answer may take beyond the wait that was asked for
TRIES: Final = 2
REPEATED: Final = ("acquire", "reserve", "batch", "commit", "cancel", "release")
ERRORS: Final[dict[int, type[RateLimitError]]] = {
    400: ConfigError,
    401: ConfigError,
    403: ConfigError,
    404: ResourceUnknown,
    409: AlreadySettledError,
    413: ConfigError,
    415: ConfigError,
    422: ConfigError,
}


@dataclass(frozen=True)
class Answer:
    """A decision of the service; true when allowed. `raw` is what it said, word for word."""

    allowed: bool
    remaining: int | None
    retry_after: float | None
    reset_after: float
    violated: tuple[str, ...]
    shadow: bool
    local: bool
    raw: dict[str, Any] = field(repr=False, compare=False)
    id: str | None = None  # of a reservation

    @classmethod
    def read(cls, said: dict[str, Any]) -> Answer:
        """Read what the service said."""
        names = ("allowed", "remaining", "retry_after", "reset_after", "shadow", "local")
        return cls(
            **{name: said[name] for name in names}, violated=tuple(said["violated"]), raw=said, id=said.get("id")
        )

    def __bool__(self) -> bool:
        """Tell whether the call may proceed."""
        return self.allowed


class Question(NamedTuple):
    """One request to the service."""

    method: str
    path: str
    body: dict[str, Any] | None
    headers: dict[str, str]
    timeout: float


def ask(verb: str, body: dict[str, Any], wait: float = 0.0) -> Question:
    """Word a question."""
    headers = {"idempotency-key": secrets.token_hex(12)} if verb in REPEATED else {}
    return Question("POST", f"/v1/{verb}", body, headers, max(0.0, wait) + MARGIN)


def about(policy: str, key: Key, **more: object) -> dict[str, Any]:
    """Word whom a question is about; what is at its default is left out."""
    return {"policy": policy, "key": key if isinstance(key, str) else list(key), **{k: v for k, v in more.items() if v}}


def read(response: httpx.Response) -> Any:  # noqa: ANN401 - whatever JSON says
    """Read an answer, or raise what it stands for."""
    try:
        said = response.json()
    except ValueError:
        raise StoreUnavailable(f"no answer of a tidegate service: status {response.status_code}") from None
    if response.status_code == 200:  # noqa: PLR2004 - the only good one
        return said
    detail = said.get("detail") if isinstance(said, dict) else None
    raise ERRORS.get(response.status_code, StoreUnavailable)(str(detail or f"status {response.status_code}"))


def answers(said: dict[str, Any]) -> list[Answer | RateLimitError]:
    """Read the answers of a batch; what was wrong with one is its answer."""
    found: list[Answer | RateLimitError] = []
    for each in said["answers"]:
        if "error" in each:
            found.append(ERRORS.get(each["error"]["status"], StoreUnavailable)(each["error"]["detail"]))
        else:
            found.append(Answer.read(each))
    return found


def batch(asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> Question:
    """Word a batch: as keys of one policy where that says it all, which is much cheaper."""
    policies = {each[0] for each in asks}
    costs = [each[2:] for each in asks]  # nothing, or the cost
    if len(policies) == 1 and not any(costs):
        keys = [each[1] if isinstance(each[1], str) else list(each[1]) for each in asks]
        return ask("batch", {"policy": policies.pop(), "keys": keys})
    bodies = [
        about(each[0], each[1]) | ({"cost": cost[0]} if cost else {}) for each, cost in zip(asks, costs, strict=True)
    ]
    return ask("batch", {"asks": bodies})


def unreachable(url: str, error: httpx.TransportError) -> StoreUnavailable:
    """Say that there is no service."""
    why = str(error) or type(error).__name__
    return StoreUnavailable(f"no service answers on {url} ({why}): start one with 'tidegate serve'")


def options(url: str, token: str | None) -> dict[str, Any]:
    """Give what httpx is told."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "trust_env": False}


class Client:
    """Asks a service, from threads. A context manager."""

    def __init__(self, url: str = "http://127.0.0.1:8080", *, token: str | None = None) -> None:
        """Ask the service at this URL."""
        self.url = url
        self._http = httpx.Client(**options(url, token))

    def _ask(self, question: Question) -> Any:  # noqa: ANN401 - whatever JSON says
        method, path, body, headers, timeout = question
        for left in reversed(range(TRIES)):
            try:
                return read(self._http.request(method, path, json=body, headers=headers, timeout=timeout))
            except httpx.TransportError as error:
                if not left or not headers:
                    raise unreachable(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    def acquire(self, policy: str, key: Key, cost: Cost = 1, *, wait: float = 0.0, priority: float = 0.0) -> Answer:
        """Take permits, waiting up to `wait` seconds."""
        return Answer.read(self._ask(ask("acquire", _costing(policy, key, cost, wait=wait, priority=priority), wait)))

    def peek(self, policy: str, key: Key, cost: Cost = 1) -> Answer:
        """Give the answer that `acquire` would give, and change nothing."""
        return Answer.read(self._ask(ask("peek", _costing(policy, key, cost))))

    def reserve(self, policy: str, key: Key, cost: Cost = 1, *, ttl: float = 60.0, wait: float = 0.0) -> Answer:
        """Charge an estimate; its `id` settles it."""
        return Answer.read(self._ask(ask("reserve", _costing(policy, key, cost, ttl=ttl, wait=wait), wait)))

    def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation by what it really cost."""
        self._ask(ask("commit", {"id": reservation} | ({} if cost is None else {"cost": cost})))

    def cancel(self, reservation: str) -> None:
        """Give a reservation back."""
        self._ask(ask("cancel", {"id": reservation}))

    def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Give slots of concurrency limits back."""
        self._ask(ask("release", _costing(policy, key, cost)))

    def batch(self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> list[Answer | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost), each by itself."""
        return answers(self._ask(batch(asks)))

    def usage(self, policy: str, key: Key) -> list[dict[str, Any]]:
        """Tell how much of each limit a key has used."""
        return list(self._ask(ask("usage", about(policy, key)))["limits"])

    def reset(self, policy: str, key: Key) -> None:
        """Forget everything about a key; needs the admin token."""
        self._ask(ask("reset", about(policy, key)))

    def policies(self) -> dict[str, Any]:
        """List the policies."""
        return dict(self._ask(Question("GET", "/v1/policies", None, {}, MARGIN)))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class AsyncClient:
    """Asks a service, from tasks: the names of Client, awaited. An async context manager."""

    def __init__(self, url: str = "http://127.0.0.1:8080", *, token: str | None = None) -> None:
        """Ask the service at this URL."""
        self.url = url
        self._http = httpx.AsyncClient(**options(url, token))

    async def _ask(self, question: Question) -> Any:  # noqa: ANN401 - whatever JSON says
        method, path, body, headers, timeout = question
        for left in reversed(range(TRIES)):
            try:
                return read(await self._http.request(method, path, json=body, headers=headers, timeout=timeout))
            except httpx.TransportError as error:
                if not left or not headers:
                    raise unreachable(self.url, error) from None
        raise AssertionError("the last try returns or raises")

    async def acquire(
        self, policy: str, key: Key, cost: Cost = 1, *, wait: float = 0.0, priority: float = 0.0
    ) -> Answer:
        """Take permits, waiting up to `wait` seconds."""
        body = _costing(policy, key, cost, wait=wait, priority=priority)
        return Answer.read(await self._ask(ask("acquire", body, wait)))

    async def peek(self, policy: str, key: Key, cost: Cost = 1) -> Answer:
        """Give the answer that `acquire` would give, and change nothing."""
        return Answer.read(await self._ask(ask("peek", _costing(policy, key, cost))))

    async def reserve(self, policy: str, key: Key, cost: Cost = 1, *, ttl: float = 60.0, wait: float = 0.0) -> Answer:
        """Charge an estimate; its `id` settles it."""
        return Answer.read(await self._ask(ask("reserve", _costing(policy, key, cost, ttl=ttl, wait=wait), wait)))

    async def commit(self, reservation: str, cost: Cost | None = None) -> None:
        """Settle a reservation by what it really cost."""
        await self._ask(ask("commit", {"id": reservation} | ({} if cost is None else {"cost": cost})))

    async def cancel(self, reservation: str) -> None:
        """Give a reservation back."""
        await self._ask(ask("cancel", {"id": reservation}))

    async def release(self, policy: str, key: Key, cost: Cost = 1) -> None:
        """Give slots of concurrency limits back."""
        await self._ask(ask("release", _costing(policy, key, cost)))

    async def batch(self, asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> list[Answer | RateLimitError]:
        """Decide on up to a thousand (policy, key) or (policy, key, cost), each by itself."""
        return answers(await self._ask(batch(asks)))

    async def usage(self, policy: str, key: Key) -> list[dict[str, Any]]:
        """Tell how much of each limit a key has used."""
        return list((await self._ask(ask("usage", about(policy, key))))["limits"])

    async def reset(self, policy: str, key: Key) -> None:
        """Forget everything about a key; needs the admin token."""
        await self._ask(ask("reset", about(policy, key)))

    async def policies(self) -> dict[str, Any]:
        """List the policies."""
        return dict(await self._ask(Question("GET", "/v1/policies", None, {}, MARGIN)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()


def _costing(policy: str, key: Key, cost: Cost, **more: float) -> dict[str, Any]:
    amount = cost if isinstance(cost, int) else dict(cost)
    return about(policy, key, **more) | ({} if amount == 1 else {"cost": amount})
