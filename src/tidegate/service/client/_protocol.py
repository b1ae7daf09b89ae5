"""The part of the client that Client and AsyncClient share: builds requests, reads responses, and runs an acquire.

The clients only send the requests, one from threads, the other from tasks.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

import idna
import msgspec

from tidegate._limiter.limiter import Usage
from tidegate._policy import normal_key
from tidegate._runtime.urls import WEB_SCHEMES, redact, split_url
from tidegate.agents._errors import RunEndedError, RunRefusedError, TokenError
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, Denied, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.outbound._providers.hosts import host_of
from tidegate.service._api.requests import (
    AcquireRequest,
    AskRequest,
    BatchRequest,
    CancelRequest,
    CommitRequest,
    LeaseRequest,
    PeekRequest,
    ReserveRequest,
    as_cost,
)
from tidegate.service._api.responses import (
    AcquireResponse,
    AnswerResponse,
    BatchResponse,
    DecisionResponse,
    DoneResponse,
    LeaseResponse,
    ProblemResponse,
    ReserveResponse,
    UsageResponse,
)
from tidegate.service._api.verbs import ACQUIRE, BATCH, CANCEL, COMMIT, LEASE, RESERVE
from tidegate.service._decisions.reservation_ids import AlreadySettledError, UnknownReservationError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import httpx

    from tidegate._policy import Cost, Key
    from tidegate.core._decision import Decision
    from tidegate.service._api.requests import VerbRequest
    from tidegate.service._api.verbs import ServiceVerb
    from tidegate.service.client._lease_cache import LeaseCache

EXAMPLE_URL: Final = "http://127.0.0.1:8080"
Q = TypeVar("Q", bound="VerbRequest")
R = TypeVar("R")

OK: Final = 200  # the only status of a success
RESPONSE_MARGIN: Final = 5.0  # seconds that a response may take in addition to the timeout of the call
DEFAULT_TIMEOUT: Final = 30.0  # seconds: the default of the service's max_wait
MAX_TRIES: Final = 2  # of a request with an idempotency key
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
TOKEN_STATUSES: Final = (401, 403)
ERROR_BY_TYPE: Final[dict[str, type[RateLimitError]]] = {
    "urn:tidegate:problem:unknown-reservation": UnknownReservationError,
    "urn:tidegate:problem:unknown-run": RunEndedError,
    "urn:tidegate:problem:run-denied": RunRefusedError,
    "urn:tidegate:problem:bad-run-token": TokenError,
}
JSON_HEADERS: Final = {"content-type": "application/json"}


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
    response: DecisionResponse = field(repr=False, compare=False)
    id: str | None = None  # of a reservation
    member: str | None = None  # of a provider's pool

    @property
    def limits(self) -> tuple[ServiceLimitDecision, ...]:
        """The result for each limit, in the order of the policy."""
        names = ServiceLimitDecision._fields
        return tuple(ServiceLimitDecision(*(getattr(limit, name) for name in names)) for limit in self.response.limits)

    @property
    def raw(self) -> dict[str, object]:
        """The JSON object of the response."""
        return cast("dict[str, object]", msgspec.to_builtins(self.response))

    @classmethod
    def read(cls, response: DecisionResponse) -> ServiceDecision:
        """Read a decision from a response."""
        return cls(
            response.allowed,
            response.remaining,
            response.retry_after,
            response.reset_after,
            tuple(response.violated),
            response.shadow,
            response.local,
            response,
            getattr(response, "id", None) or None,
            getattr(response, "member", None) or None,
        )

    def __bool__(self) -> bool:
        """Return whether the call is allowed."""
        return self.allowed


class ServiceRequest(NamedTuple, Generic[R]):
    """One request to the service, and the function that decodes its response."""

    method: str
    path: str
    body: VerbRequest | None
    headers: Mapping[str, str]
    timeout: float
    decode: Callable[[bytes], R]

    @property
    def content(self) -> bytes | None:
        """The body as JSON."""
        return None if self.body is None else msgspec.json.encode(self.body)

    @property
    def repeatable(self) -> bool:
        """Whether the request may be repeated: the service charges it once."""
        return "idempotency-key" in self.headers


def verb_request(verb: ServiceVerb[Q, R], body: Q | None = None) -> ServiceRequest[R]:
    """Build the request for a verb; a verb that waits gets that much more time for its response."""
    headers = {} if body is None else JSON_HEADERS
    if verb.idempotent:
        headers = {**headers, "idempotency-key": secrets.token_hex(12)}
    seconds = body.wait_seconds if verb.waits and body is not None else 0.0
    return ServiceRequest(
        verb.method, verb.path, body, headers, max(0.0, seconds) + RESPONSE_MARGIN, verb.decode_response
    )


def overview_request() -> ServiceRequest[dict[str, object]]:
    """Build the request for the data of the dashboard, which is no verb."""
    return ServiceRequest("GET", "/v1/overview", None, {}, RESPONSE_MARGIN, decode_overview)


def decode_overview(body: bytes) -> dict[str, object]:
    """Decode the data of the dashboard; an egress gateway has only the panels."""
    overview = msgspec.json.decode(body, type=dict[str, Any])
    if not isinstance(overview.get("panels"), dict):
        raise msgspec.ValidationError("expected an object with panels")
    return overview


def json_key(key: Key) -> str | list[str]:
    """Check a key, and return it as a JSON value."""
    found = normal_key(key)
    return found if isinstance(found, str) else list(found)


def read_response(response: httpx.Response, decode: Callable[[bytes], R]) -> R:
    """Decode a response, or raise the error that it describes."""
    try:
        if response.status_code == OK:
            return decode(response.content)
        raise read_problem(response.content, response.status_code)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = "an unexpected body" if is_json(response.content) else "a body that is not JSON"
        message = f"not a tidegate service: it responded with status {response.status_code} and {found}"
        raise StoreUnavailable(message) from None


def is_json(body: bytes) -> bool:
    """Return whether a body is JSON."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def read_problem(body: bytes, status: int) -> RateLimitError:
    """Return the error of a response without a decision; another server's JSON is classified by the status alone."""
    try:
        return problem_error(msgspec.json.decode(body, type=ProblemResponse), status)
    except msgspec.ValidationError:
        return ERROR_BY_STATUS.get(status, StoreUnavailable)(f"status {status}")


def problem_error(problem: ProblemResponse, status: int) -> RateLimitError:
    """Return the error that a problem describes: by its type, or else by the status."""
    error = ERROR_BY_TYPE.get(problem.type) or ERROR_BY_STATUS.get(status, StoreUnavailable)
    detail = problem.detail or f"status {status}"
    if status in TOKEN_STATUSES and "token" in detail:  # the other reasons for 403 are the host and the origin
        return ConfigError(detail, field="token")
    if error is ConfigError and problem.pointer:
        return ConfigError(detail, field=problem.pointer.strip("/").replace("/", "."))
    return error(detail)


def read_usage(response: UsageResponse) -> dict[str, Usage]:
    """Read the usage of a key at each limit, by the name of the limit."""
    return {limit.name: Usage(*(getattr(limit, field) for field in Usage._fields)) for limit in response.limits}


def read_batch(response: BatchResponse) -> list[ServiceDecision | RateLimitError]:
    """Read the results of a batch; an invalid ask has its error as its result."""
    return [read_answer(answer) for answer in response.answers]


def read_answer(answer: AnswerResponse) -> ServiceDecision | RateLimitError:
    """Read the result for one ask."""
    if answer.error is not msgspec.UNSET:
        return problem_error(answer.error, answer.error.status)
    return ServiceDecision.read(answer)


def batch_request(asks: Sequence[tuple[str, Key] | tuple[str, Key, Cost]]) -> ServiceRequest[BatchResponse]:
    """Build a batch request: with `keys` of one policy if possible, which is much faster."""
    policies = {each[0] for each in asks}
    costs = [each[2:] for each in asks]  # empty, or the cost
    if len(policies) == 1 and not any(costs):
        return verb_request(BATCH, BatchRequest(policy=policies.pop(), keys=[json_key(each[1]) for each in asks]))
    bodies = [
        AskRequest(policy=each[0], key=json_key(each[1]), cost=as_cost(cost[0]) if cost else 1)
        for each, cost in zip(asks, costs, strict=True)
    ]
    return verb_request(BATCH, BatchRequest(asks=bodies))


def reserve_request(
    policy: str, key: Key, cost: Cost, ttl: float, timeout: float, priority: float
) -> ServiceRequest[ReserveResponse]:
    """Build the request for a reservation."""
    body = ReserveRequest(
        policy=policy, key=json_key(key), cost=as_cost(cost), ttl=ttl, timeout=timeout, priority=priority
    )
    return verb_request(RESERVE, body)


def provider_request(
    provider: str, cost: Cost | None, timeout: float, priority: float
) -> ServiceRequest[AcquireResponse]:
    """Build the request for permits of a provider; a cost of None is the provider's own."""
    permits = msgspec.UNSET if cost is None else as_cost(cost)
    return verb_request(ACQUIRE, AcquireRequest(provider=provider, cost=permits, timeout=timeout, priority=priority))


def provider_reserve_request(
    provider: str, cost: Cost | None, ttl: float, timeout: float, priority: float
) -> ServiceRequest[ReserveResponse]:
    """Build the request for permits of a provider that count until they are settled."""
    permits = msgspec.UNSET if cost is None else as_cost(cost)
    body = ReserveRequest(provider=provider, cost=permits, ttl=ttl, timeout=timeout, priority=priority)
    return verb_request(RESERVE, body)


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
) -> Generator[ServiceRequest[Any], Any, ServiceDecision]:
    """Take permits, from a lease if possible: yields requests, and is sent the JSON value of each response."""
    found = json_key(key)
    policy_key = (policy, normal_key(key))
    plain_request = verb_request(
        ACQUIRE,
        AcquireRequest(policy=policy, key=found, cost=as_cost(cost), timeout=timeout, priority=priority),
    )
    if lease_cache is None or not isinstance(cost, int) or cost < 1 or not lease_cache.may_lease(policy_key):
        return ServiceDecision.read((yield plain_request))
    response: DecisionResponse | None = lease_cache.take(policy_key, cost)
    if response is None and not timeout and lease_cache.begin_lease(policy_key):
        try:
            yield from settle_flow(lease_cache, lease_cache.pop_finished(policy_key))
            started_at = lease_cache.now()
            max_permits = lease_cache.permits_to_request(policy_key, cost)
            body = LeaseRequest(policy=policy, key=found, cost=cost, max_permits=max_permits, ttl=lease_cache.duration)
            leased: LeaseResponse = yield verb_request(LEASE, body)
            response = lease_cache.add(policy_key, cost, started_at, leased)
        finally:
            lease_cache.end_lease(policy_key)
    elif response is None:  # a call that waits, or arrives while another takes a lease, sends its own request
        decided: DecisionResponse = yield plain_request
        response = decided if decided.allowed else lease_cache.take(policy_key, cost) or decided
    return ServiceDecision.read(response)


def settle_flow(
    lease_cache: LeaseCache, leases: Sequence[tuple[str, int]]
) -> Generator[ServiceRequest[Any], Any, None]:
    """Return unused permits of leases, within RESPONSE_MARGIN seconds in all.

    If that fails, they stay charged, so no limit is exceeded.
    """
    end = lease_cache.now() + round(RESPONSE_MARGIN * SECOND)
    for lease_id, used in leases:
        left = (end - lease_cache.now()) / SECOND
        if left <= 0:
            return
        try:
            yield settle_request(lease_id, used)._replace(timeout=left / MAX_TRIES)
        except StoreUnavailable:
            return  # the others would fail, too
        except RateLimitError:
            continue


def settle_request(lease_id: str, used: int) -> ServiceRequest[DoneResponse]:
    """Build the request that settles a lease."""
    if used:
        return verb_request(COMMIT, CommitRequest(id=lease_id, cost=used))
    return verb_request(CANCEL, CancelRequest(id=lease_id))


class ServiceUnreachable(StoreUnavailable):
    """Nothing responds at the URL of the service; `reason` is the message without its advice."""

    reason: str = ""


def unreachable_error(url: str, error: httpx.TransportError) -> ServiceUnreachable:
    """Build the error for a service that cannot be reached."""
    place, why = f"cannot reach a service at {redact(url)}", str(error) or type(error).__name__
    found = ServiceUnreachable(f"{place} ({why}): check the URL, or start one with 'tidegate start'")
    found.reason = f"{place}: {why}"
    return found


def check_service_url(url: str, field: str = "url") -> str:
    """Return the URL of a service; raises ConfigError unless it is an HTTP URL without a query."""
    parts = split_url(url, field) if "://" in str(url) else None
    if parts is None or parts.scheme not in WEB_SCHEMES or not parts.hostname:
        raise ConfigError(f"expected an HTTP URL such as {EXAMPLE_URL}, not {redact(url)!r}", field=field)
    try:
        idna.decode(host_of(url)) if "xn--" in parts.hostname else host_of(url)
    except (ConfigError, idna.IDNAError):
        raise ConfigError(f"malformed URL {redact(url)!r}: its host is not valid", field=field) from None
    if parts.query or parts.fragment or any(character.isspace() for character in url):
        message = f"expected a URL without a query, a fragment or spaces, such as {EXAMPLE_URL}, not {redact(url)!r}"
        raise ConfigError(message, field=field)
    return url


def client_options(url: str, token: str | None) -> dict[str, Any]:
    """Return the arguments for the httpx client."""
    check_service_url(url)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return {"base_url": url, "headers": headers, "trust_env": False}


def provider_peek_body(provider: str, cost: Cost | None) -> PeekRequest:
    """Build such a request about a provider; a cost of None is the provider's own."""
    return PeekRequest(provider=provider, cost=msgspec.UNSET if cost is None else as_cost(cost))
