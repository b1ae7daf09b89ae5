"""How a question to a service is worded, how its answer is read, and which questions an acquire takes.

What Client and AsyncClient share: they only ask, one in threads, the other in tasks.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.policy import normal_key
from tidegate.service.decisions.reservation_ids import AlreadySettledError
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import httpx

    from tidegate.policy import Cost, Key
    from tidegate.service.client.lease_cache import LeaseCache

ANSWER_MARGIN: Final = 5.0  # seconds that an answer may take beyond the wait that was asked for
MAX_TRIES: Final = 2  # of a question that is not charged twice
RETRIED_VERBS: Final = ("acquire", "reserve", "lease", "batch", "commit", "cancel", "release")
OMITTED_WHEN_ZERO: Final = ("wait", "priority")  # what is 0 unless it is said
ERROR_BY_STATUS: Final[dict[int, type[RateLimitError]]] = {
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
class ServiceDecision:
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
    def read(cls, said: dict[str, Any]) -> ServiceDecision:
        """Read what the service said."""
        names = ("allowed", "remaining", "retry_after", "reset_after", "shadow", "local")
        return cls(
            **{name: said[name] for name in names}, violated=tuple(said["violated"]), raw=said, id=said.get("id")
        )

    def __bool__(self) -> bool:
        """Tell whether the call may proceed."""
        return self.allowed


class ServiceRequest(NamedTuple):
    """One request to the service."""

    method: str
    path: str
    body: dict[str, Any] | None
    headers: dict[str, str]
    timeout: float


def ask(verb: str, body: dict[str, Any], wait: float = 0.0) -> ServiceRequest:
    """Word a question."""
    headers = {"idempotency-key": secrets.token_hex(12)} if verb in RETRIED_VERBS else {}
    return ServiceRequest("POST", f"/v1/{verb}", body, headers, max(0.0, wait) + ANSWER_MARGIN)


def look(name: str) -> ServiceRequest:
    """Word a question about nobody in particular."""
    return ServiceRequest("GET", f"/v1/{name}", None, {}, ANSWER_MARGIN)


def about(policy: str, key: Key, **more: object) -> dict[str, Any]:
    """Word whom a question is about; what the service takes to be 0 anyway is left out."""
    said = {name: value for name, value in more.items() if value or name not in OMITTED_WHEN_ZERO}
    return {"policy": policy, "key": written(key), **said}


def written(key: Key) -> str | list[str]:
    """Check a key, and write it as JSON has it."""
    found = normal_key(key)
    return found if isinstance(found, str) else list(found)


def read(response: httpx.Response) -> Any:  # noqa: ANN401 - whatever JSON says
    """Read an answer, or raise what it stands for."""
    try:
        said = response.json()
    except ValueError:
        raise StoreUnavailable(f"no answer of a tidegate service: status {response.status_code}") from None
    if response.status_code == 200:  # noqa: PLR2004 - the only good one
        return said
    detail = said.get("detail") if isinstance(said, dict) else None
    raise ERROR_BY_STATUS.get(response.status_code, StoreUnavailable)(str(detail or f"status {response.status_code}"))


def answers(said: dict[str, Any]) -> list[ServiceDecision | RateLimitError]:
    """Read the answers of a batch; what was wrong with one is its answer."""
    found: list[ServiceDecision | RateLimitError] = []
    for each in said["answers"]:
        if "error" in each:
            found.append(ERROR_BY_STATUS.get(each["error"]["status"], StoreUnavailable)(each["error"]["detail"]))
        else:
            found.append(ServiceDecision.read(each))
    return found


def batch(asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> ServiceRequest:
    """Word a batch: as keys of one policy where that says it all, which is much cheaper."""
    policies = {each[0] for each in asks}
    costs = [each[2:] for each in asks]  # nothing, or the cost
    if len(policies) == 1 and not any(costs):
        return ask("batch", {"policy": policies.pop(), "keys": [written(each[1]) for each in asks]})
    bodies = [
        about(each[0], each[1]) | ({"cost": cost[0]} if cost else {}) for each, cost in zip(asks, costs, strict=True)
    ]
    return ask("batch", {"asks": bodies})


def acquiring(
    shelf: LeaseCache | None, policy: str, key: Key, cost: Cost, wait: float, priority: float
) -> Generator[ServiceRequest, Any, ServiceDecision]:
    """Go through an acquire: yields questions, is sent what was answered."""
    place = (policy, normal_key(key))
    plain = ask("acquire", costing(policy, key, cost, wait=wait, priority=priority), wait)
    if shelf is None or not isinstance(cost, int) or cost < 1 or not shelf.may_ask(place):
        return ServiceDecision.read((yield plain))
    found = shelf.take(place, cost)
    if found is None and not wait and shelf.begin(place):
        try:
            yield from settling(shelf, shelf.spent(place))
            began = shelf.now()
            said = yield ask("lease", costing(policy, key, cost, most=shelf.want(place, cost), ttl=shelf.lasting))
            found = shelf.put(place, cost, began, said)
        finally:
            shelf.end(place)
    elif found is None:  # who waits, or comes while permits are being taken ahead, asks for its own
        said = yield plain
        found = said if said["allowed"] else shelf.take(place, cost) or said
    return ServiceDecision.read(found)


def settling(shelf: LeaseCache, shares: Sequence[tuple[str, int]]) -> Generator[ServiceRequest, Any, None]:
    """Give back what was taken ahead and not used, within MARGIN seconds in all.

    Where that fails, it stays charged, which harms nobody else.
    """
    end = shelf.now() + round(ANSWER_MARGIN * SECOND)
    for number, used in shares:
        left = (end - shelf.now()) / SECOND
        if left <= 0:
            return
        question = ask("commit", {"id": number, "cost": used}) if used else ask("cancel", {"id": number})
        try:
            yield question._replace(timeout=left / MAX_TRIES)
        except StoreUnavailable:
            return  # so it would be with the others
        except RateLimitError:
            continue


def unreachable(url: str, error: httpx.TransportError) -> StoreUnavailable:
    """Say that there is no service."""
    why = str(error) or type(error).__name__
    return StoreUnavailable(f"no service answers on {redact(url)} ({why}): start one with 'tidegate start'")


def options(url: str, token: str | None) -> dict[str, Any]:
    """Give what httpx is told."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "trust_env": False}


def costing(policy: str, key: Key, cost: Cost, **more: float) -> dict[str, Any]:
    """Word whom a question is about and what it costs."""
    amount = cost if isinstance(cost, int) else dict(cost)
    return about(policy, key, **more) | ({} if amount == 1 else {"cost": amount})
