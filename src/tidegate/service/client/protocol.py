"""The part of the client that Client and AsyncClient share: builds requests, reads responses, and runs an acquire.

The clients only send the requests, one from threads, the other from tasks.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, Denied, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.limiter import Usage
from tidegate.policy import normal_key
from tidegate.service.api.verbs import VERBS
from tidegate.service.decisions.reservation_ids import AlreadySettledError, UnknownReservationError
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import httpx

    from tidegate.core.decision import Decision
    from tidegate.policy import Cost, Key
    from tidegate.service.client.lease_cache import LeaseCache

RESPONSE_MARGIN: Final = 5.0  # seconds that a response may take in addition to the timeout of the call
DEFAULT_TIMEOUT: Final = 30.0  # seconds: the default of the service's max_wait
MAX_TRIES: Final = 2  # of a request with an idempotency key
OMITTED_WHEN_ZERO: Final = ("timeout", "priority")  # fields whose default is 0
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
ERROR_BY_TYPE: Final[dict[str, type[RateLimitError]]] = {
    "urn:tidegate:problem:unknown-reservation": UnknownReservationError,
}


class ServiceLimitDecision(NamedTuple):
    """The result for one limit. Times are in seconds; `retry_after` is None if the cost can never fit."""

    name: str
    quota: int
    remaining: int
    retry_after: float | None
    reset_after: float
    allowed: bool
    unit: str


@dataclass(frozen=True)
class ServiceDecision:
    """A decision of the service, with the attributes of a Decision; true if the call is allowed.

    `remaining` is None if no limit applies. `raw` is the JSON object of the response.
    """

    allowed: bool
    remaining: int | None
    retry_after: float | None
    reset_after: float
    violated: tuple[str, ...]
    shadow: bool
    local: bool
    raw: dict[str, Any] = field(repr=False, compare=False)
    id: str | None = None  # of a reservation

    @property
    def limits(self) -> tuple[ServiceLimitDecision, ...]:
        """The result for each limit, in the order of the policy."""
        return tuple(ServiceLimitDecision(**limit) for limit in self.raw["limits"])

    @classmethod
    def read(cls, data: dict[str, Any]) -> ServiceDecision:
        """Read a decision from the JSON object of a response."""
        names = ("allowed", "remaining", "retry_after", "reset_after", "shadow", "local")
        return cls(
            **{name: data[name] for name in names}, violated=tuple(data["violated"]), raw=data, id=data.get("id")
        )

    def __bool__(self) -> bool:
        """Return whether the call is allowed."""
        return self.allowed


class ServiceRequest(NamedTuple):
    """One request to the service."""

    method: str
    path: str
    body: dict[str, Any] | None
    headers: dict[str, str]
    timeout: float


def post_request(verb: str, body: dict[str, Any], timeout: float = 0.0) -> ServiceRequest:
    """Build the request for a verb."""
    headers = {"idempotency-key": secrets.token_hex(12)} if VERBS[verb].idempotent else {}
    return ServiceRequest("POST", f"/v1/{verb}", body, headers, max(0.0, timeout) + RESPONSE_MARGIN)


def get_request(name: str) -> ServiceRequest:
    """Build a request that only reads."""
    return ServiceRequest("GET", f"/v1/{name}", None, {}, RESPONSE_MARGIN)


def subject_body(policy: str, key: Key, **more: object) -> dict[str, Any]:
    """Build a request body with its subject; fields that are 0 by default are omitted."""
    fields = {name: value for name, value in more.items() if value or name not in OMITTED_WHEN_ZERO}
    return {"policy": policy, "key": json_key(key), **fields}


def json_key(key: Key) -> str | list[str]:
    """Check a key, and return it as a JSON value."""
    found = normal_key(key)
    return found if isinstance(found, str) else list(found)


def read_response(response: httpx.Response) -> Any:  # noqa: ANN401 - any JSON value
    """Return the JSON value of a response, or raise the error that it describes."""
    try:
        data = response.json()
    except ValueError:
        message = f"not a tidegate service: it responded with status {response.status_code} and a body that is not JSON"
        raise StoreUnavailable(message) from None
    if response.status_code == 200:  # noqa: PLR2004 - the only status of a success
        return data
    raise read_problem(data if isinstance(data, dict) else {}, response.status_code)


def read_problem(problem: dict[str, Any], status: int) -> RateLimitError:
    """Return the error that a problem describes: by its type, or else by the status."""
    error = ERROR_BY_TYPE.get(str(problem.get("type"))) or ERROR_BY_STATUS.get(status, StoreUnavailable)
    return error(str(problem.get("detail") or f"status {status}"))


def read_usage(data: dict[str, Any]) -> dict[str, Usage]:
    """Read the usage of a key at each limit, by the name of the limit."""
    return {limit["name"]: Usage(**{field: limit[field] for field in Usage._fields}) for limit in data["limits"]}


def read_batch(data: dict[str, Any]) -> list[ServiceDecision | RateLimitError]:
    """Read the results of a batch; an invalid ask has its error as its result."""
    found: list[ServiceDecision | RateLimitError] = []
    for each in data["answers"]:
        if "error" in each:
            found.append(read_problem(each["error"], each["error"]["status"]))
        else:
            found.append(ServiceDecision.read(each))
    return found


def batch_request(asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> ServiceRequest:
    """Build a batch request: with `keys` of one policy if possible, which is much faster."""
    policies = {each[0] for each in asks}
    costs = [each[2:] for each in asks]  # empty, or the cost
    if len(policies) == 1 and not any(costs):
        return post_request("batch", {"policy": policies.pop(), "keys": [json_key(each[1]) for each in asks]})
    bodies = [
        subject_body(each[0], each[1]) | ({"cost": cost[0]} if cost else {})
        for each, cost in zip(asks, costs, strict=True)
    ]
    return post_request("batch", {"asks": bodies})


def acquire_flow(
    lease_cache: LeaseCache | None, policy: str, key: Key, cost: Cost, timeout: float | None, priority: float
) -> Generator[ServiceRequest, Any, ServiceDecision]:
    """Run an acquire that waits; raise Denied if it is denied."""
    seconds = read_timeout(timeout)
    decision = yield from decide_flow(lease_cache, policy, key, cost, seconds, priority)
    return raise_if_denied(decision, key, seconds)


def reserve_request(policy: str, key: Key, cost: Cost, ttl: float, timeout: float, priority: float) -> ServiceRequest:
    """Build the request for a reservation."""
    return post_request("reserve", cost_body(policy, key, cost, ttl=ttl, timeout=timeout, priority=priority), timeout)


def provider_request(
    provider: str, cost: Cost | None, timeout: float, priority: float, **more: float
) -> ServiceRequest:
    """Build the request for permits of a provider: a reservation if `more` has a `ttl`, an acquire otherwise."""
    fields = {"timeout": timeout, "priority": priority, **more}
    body: dict[str, Any] = {"provider": provider, **{name: value for name, value in fields.items() if value}}
    if cost is not None:
        body["cost"] = cost if isinstance(cost, int) else dict(cost)
    return post_request("reserve" if more else "acquire", body, timeout)


def read_timeout(timeout: float | None) -> float:
    """Return the seconds that a call may wait."""
    return DEFAULT_TIMEOUT if timeout is None else timeout


def raise_if_denied(decision: ServiceDecision, key: Key, timeout: float) -> ServiceDecision:
    """Return a decision that allows the call; raise Denied for one that does not."""
    if decision.allowed:
        return decision
    names = ", ".join(decision.violated)
    if decision.retry_after is None:
        message = f"{key!r}: the cost exceeds what {names} can ever allow"
    elif decision.retry_after:
        message = f"{key!r} got no permit within {timeout} s: {names} would allow it in {decision.retry_after} s"
    else:
        message = f"{key!r} got no permit within {timeout} s: other calls are ahead of it in the queue"
    raise Denied(message, cast("Decision", decision))


def decide_flow(
    lease_cache: LeaseCache | None, policy: str, key: Key, cost: Cost, timeout: float = 0.0, priority: float = 0.0
) -> Generator[ServiceRequest, Any, ServiceDecision]:
    """Take permits, from a lease if possible: yields requests, and is sent the JSON value of each response."""
    policy_key = (policy, normal_key(key))
    body = cost_body(policy, key, cost, timeout=timeout, priority=priority)
    plain_request = post_request("acquire", body, timeout)
    if lease_cache is None or not isinstance(cost, int) or cost < 1 or not lease_cache.may_lease(policy_key):
        return ServiceDecision.read((yield plain_request))
    found = lease_cache.take(policy_key, cost)
    if found is None and not timeout and lease_cache.begin_lease(policy_key):
        try:
            yield from settle_flow(lease_cache, lease_cache.pop_finished(policy_key))
            started_at = lease_cache.now()
            most = lease_cache.permits_to_request(policy_key, cost)
            body = cost_body(policy, key, cost, most=most, ttl=lease_cache.duration)
            response = yield post_request("lease", body)
            found = lease_cache.add(policy_key, cost, started_at, response)
        finally:
            lease_cache.end_lease(policy_key)
    elif found is None:  # a call that waits, or arrives while another takes a lease, sends its own request
        response = yield plain_request
        found = response if response["allowed"] else lease_cache.take(policy_key, cost) or response
    return ServiceDecision.read(found)


def settle_flow(lease_cache: LeaseCache, leases: Sequence[tuple[str, int]]) -> Generator[ServiceRequest, Any, None]:
    """Return unused permits of leases, within RESPONSE_MARGIN seconds in all.

    If that fails, they stay charged, so no limit is exceeded.
    """
    end = lease_cache.now() + round(RESPONSE_MARGIN * SECOND)
    for lease_id, used in leases:
        left = (end - lease_cache.now()) / SECOND
        if left <= 0:
            return
        if used:
            request = post_request("commit", {"id": lease_id, "cost": used})
        else:
            request = post_request("cancel", {"id": lease_id})
        try:
            yield request._replace(timeout=left / MAX_TRIES)
        except StoreUnavailable:
            return  # the others would fail, too
        except RateLimitError:
            continue


def unreachable_error(url: str, error: httpx.TransportError) -> StoreUnavailable:
    """Build the error for a service that cannot be reached."""
    why = str(error) or type(error).__name__
    return StoreUnavailable(f"cannot reach a service at {redact(url)} ({why}): start one with 'tidegate start'")


def client_options(url: str, token: str | None) -> dict[str, Any]:
    """Return the arguments for the httpx client."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "trust_env": False}


def cost_body(policy: str, key: Key, cost: Cost, **more: float) -> dict[str, Any]:
    """Build a request body with its subject and cost; a cost of 1 is omitted."""
    amount = cost if isinstance(cost, int) else dict(cost)
    return subject_body(policy, key, **more) | ({} if amount == 1 else {"cost": amount})
