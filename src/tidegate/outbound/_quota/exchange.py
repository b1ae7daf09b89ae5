"""Requests and responses as `gate` sees them, independent of the client library."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import parse_qsl, urlsplit

from tidegate._runtime.suggestions import did_you_mean
from tidegate.errors import ConfigError
from tidegate.headers._dialects import FIELD_PREFIXES
from tidegate.outbound._providers.hosts import host_of, is_loopback
from tidegate.outbound._providers.secret import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Unpack

    from tidegate._limiter.joint import LimiterAsk
    from tidegate._limiter.reservation import ReservedCharge
    from tidegate._policy import Cost
    from tidegate.core import Decision
    from tidegate.outbound._providers.provider import KeyLocation, Provider
    from tidegate.outbound._quota.request_tokens import RequestTokens
    from tidegate.outbound._quota.settlement import PendingSettlement

R = TypeVar("R")

# The first five characters of rate limit headers, which distinguish them from all others.
RATE_LIMIT_PREFIXES: Final = frozenset(prefix for name in FIELD_PREFIXES for prefix in (name[:5], name[:5].encode()))


# They select an account within what a key may use, so they belong to the key of the caller, not to that of a member.
ACCOUNT_HEADERS: Final = (
    "openai-organization",
    "openai-project",
    "chatgpt-account-id",
    "anthropic-organization-id",
    "anthropic-workspace-id",
    "x-goog-user-project",
)


class SenderLimits:
    """Limits of who sends a request, beside those of its provider: reserved with them in one step, for all attempts.

    `charged` is what the request was charged at them, for the sender to settle; empty: it has not been charged.
    """

    def __init__(self, asks: Sequence[LimiterAsk]) -> None:
        """Ask for these."""
        self.asks: Sequence[LimiterAsk] = asks
        self.charged: Sequence[ReservedCharge] = ()
        self.denied: bool = False  # whether they denied the request when it was asked for last

    def can_fit(self) -> bool:
        """Return whether they can ever allow the request."""
        asks = [each.ask() for each in self.asks]
        pairs = (zip(policy.limits, costs, strict=True) for policy, _, costs in asks)
        return all(cost <= limit.burst for each in pairs for limit, cost in each)


class RequestOptions(NamedTuple):
    """Options of the next requests that replace those of the gate."""

    timeout: float | None = None
    priority: float = 0
    cost: Mapping[str, int] | None = None
    model: str | None = None
    tag: str = ""
    strict: bool | None = None
    team: str = ""
    sender: SenderLimits | None = None

    def replaced(self, timeout: float | None, priority: float | None, cost: Mapping[str, int] | None) -> RequestOptions:
        """Return the options with these instead, except those that are None."""
        if priority is None and cost is None and (timeout is None or timeout == self.timeout):
            return self
        return RequestOptions(
            self.timeout if timeout is None else timeout,
            self.priority if priority is None else priority,
            self.cost if cost is None else cost,
            *self[3:],
        )


class RequestKeywords(TypedDict, total=False):
    """The keywords of `request_options`: those that are given replace the options of the gate."""

    timeout: float | None
    priority: float
    cost: Mapping[str, int] | None
    model: str | None
    tag: str
    strict: bool | None
    team: str


CURRENT_OPTIONS: ContextVar[Mapping[str, Any] | None] = ContextVar("tidegate_asked", default=None)


@contextmanager
def request_options(**options: Unpack[RequestKeywords]) -> Iterator[None]:
    """Send the requests of a block with another `timeout`, `priority` or `cost` (a mapping from units to amounts).

    `model` is the model that is charged, `tag` a kind of call whose outputs are learned separately, `strict` whether
    the output can never take more tokens than are reserved for it. `team` and `tag` select the ceiling that the call is
    charged to, if a spending ceiling is per team or tag.

    Works with every client library: a context variable carries the options, also into tasks started in the block.
    """
    known = RequestKeywords.__annotations__
    unknown = sorted(options.keys() - known)
    if unknown:
        advice = did_you_mean(unknown[0], known) or f"expected {', '.join(known)}"
        raise ConfigError(f"unknown option: {advice}", field=unknown[0])
    named = {name: "" if value is None else str(value) for name, value in options.items() if name in ("team", "tag")}
    token = CURRENT_OPTIONS.set({**(CURRENT_OPTIONS.get() or {}), **options, **named})
    try:
        yield
    finally:
        CURRENT_OPTIONS.reset(token)


class OutboundRequest(NamedTuple):
    """A request, independent of the client library.

    `header` returns a header; `body` returns the body if it is in memory; `replays` is whether it can be sent again;
    `unreached` returns whether an error means that the request was never sent; `rewrites` is whether `send` takes
    another body as its second argument; `reports_write` whether it takes a function as its third, and calls it when it
    has written the request, or before it sends one whose body it does not write at once. `is_permit`: the program sends
    the request itself, and its method is not known. `form` returns those parts of a multipart form that are in memory,
    if the body as a whole is not. `parsed` is what was already read of it, and the provider that it was read for.
    `retries` returns whether a request without a response is sent again after an error, as often as its provider's file
    allows, if its method is idempotent or it was not sent.
    """

    method: str
    url: str
    header: Callable[[str], str | None]
    body: Callable[[], bytes | None]
    replays: bool
    unreached: Callable[[BaseException], bool]
    rewrites: bool = False
    reports_write: bool = False
    is_permit: bool = False
    form: Callable[[], bytes | None] = lambda: None
    parsed: tuple[Provider, RequestTokens] | None = None
    retries: Callable[[BaseException], bool] = lambda _error: False

    def identify(self) -> bytes:
        """Return what the request is made of: two requests that are the same return the same. Empty: it is unknown."""
        if self.is_permit:
            return b""
        return b"\n".join((self.method.encode(), self.url.encode(), self.body() or self.form() or b""))


class ProviderResponse(NamedTuple):
    """A response, independent of the client library; `close` releases it if the request is retried.

    `read` returns (or is awaited for) the start of its decoded body; the client can still read all of it afterwards.
    """

    status: int
    headers: Any
    close: Callable[[], Any]
    native: Any  # the response object of the library
    read: Callable[[], Any] | None = None


class RequestOutcome(NamedTuple):
    """How a request was sent: its provider (None: no limits), how long it waited, the number of attempts.

    `cost` is what was reserved for it, by unit or as a number of requests; `member` is the member of the pool that sent
    it. `truncates_at` is the number of tokens at which its output is truncated, because the bound of the request was
    lowered to what is reserved; None: it was not.
    """

    provider: str | None
    waited: float = 0.0
    attempts: int = 1
    decision: Decision | None = None
    cost: Cost = 0
    member: str = ""
    truncates_at: int | None = None

    @property
    def limited(self) -> bool:
        """Whether any limit applied."""
        return self.provider is not None


class CallEstimate(NamedTuple):
    """What a request would cost, and the decision for it now.

    `quota` is the key of the provider's quota that it is charged to; `waiting` requests wait for this quota now.
    """

    provider: str
    quota: str
    cost: Cost
    decision: Decision
    waiting: int


class AddedKey(NamedTuple):
    """A provider's key, where it is sent in a request, and the header fields that it replaces."""

    location: KeyLocation
    text: str
    replaced: tuple[str, ...] = ()


class SendResult(NamedTuple, Generic[R]):
    """A response, the outcome of its request, and what is left to settle."""

    response: R
    outcome: RequestOutcome
    settlement: PendingSettlement | None


def has_rate_limit_headers(headers: Iterable[tuple[str | bytes, object]]) -> bool:
    """Return whether headers may contain rate limits: most do not, and parsing takes time."""
    for name, _ in headers:  # noqa: SIM110 - half the time of any()
        if name[:5].lower() in RATE_LIMIT_PREFIXES:
            return True
    return False


def is_rate_limit_name(name: str) -> bool:
    """Return whether a header of this name may contain rate limits."""
    return name[:5].lower() in RATE_LIMIT_PREFIXES


def credential_of(location: KeyLocation | None, call: OutboundRequest) -> str:
    """Return a fingerprint of the request's credential, or "own" for the provider's."""
    if location is not None and location.kind == "query":
        found = dict(parse_qsl(urlsplit(call.url).query, errors="surrogateescape")).get(location.name)
    else:
        names = (location.name,) if location is not None else ("authorization", "x-api-key", "api-key")
        found = next((value for name in names if (value := call.header(name))), None)
    return fingerprint(found) if found else "own"


def added_key(provider: Provider | None, call: OutboundRequest) -> AddedKey | None:
    """Return the provider's key for a request; None: there is none, or the request has one already.

    The caller found the provider by the host of this request, so a redirect to another host carries no key.
    """
    if provider is None or provider.api_key is None or provider.key_location is None:
        return None
    location, replaced = provider.key_location, ACCOUNT_HEADERS if provider.member else ()
    if location.kind == "header":
        if call.header(location.name) and not provider.member:  # the key of a member replaces any other
            return None
        return AddedKey(location, location.prefix + provider.api_key.reveal(), replaced)
    names = dict(parse_qsl(urlsplit(call.url).query, keep_blank_values=True))
    if location.name in names and not provider.member:
        return None
    return AddedKey(location, provider.api_key.reveal(), replaced)


def target_url(provider: Provider | None, call: OutboundRequest) -> str | None:
    """Return the URL of the member that a request is sent to; None: its own."""
    if provider is None or not provider.url:
        return None
    parts = urlsplit(call.url)
    return provider.url + parts.path + (f"?{parts.query}" if parts.query else "")


def is_confidential(url: str) -> bool:
    """Return whether a request is encrypted or does not leave this machine."""
    return url[:6].lower() == "https:" or is_loopback(host_of(url))
