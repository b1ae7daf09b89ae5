"""Header fields that are passed on, added and removed, and the answers of the gateway itself.

Keys and tokens never appear in an answer: messages name providers, callers and limits only.
"""

from __future__ import annotations

import json
import logging
from math import ceil
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, unquote_plus

from aiohttp import web
from multidict import CIMultiDict

from tidegate.agents._errors import RunDenied, RunRightError
from tidegate.core._bounds import SECOND
from tidegate.egress._callers import KEY_HEADERS
from tidegate.errors import Closed, ConfigError, ResourceUnknown
from tidegate.headers import problem
from tidegate.outbound._quota.exchange import ACCOUNT_HEADERS
from tidegate.outbound._quota.unbounded import BODY, UnboundedCost

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from multidict import CIMultiDictProxy

    from tidegate._policy import Cost
    from tidegate.core import Decision
    from tidegate.errors import Denied, RateLimitError
    from tidegate.outbound._providers.provider import Provider

log: logging.Logger = logging.getLogger("tidegate.egress")

PREFIX: Final = "x-tidegate-"
HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
REQUEST_DROPPED: Final = HOP_BY_HOP | {"host", "expect", "content-length"}
# of requests
REQUEST_TIMEOUT: Final = "X-Tidegate-Timeout"
PRIORITY: Final = "X-Tidegate-Priority"
TAG: Final = "X-Tidegate-Tag"
# of answers
PROVIDER: Final = "X-Tidegate-Provider"
MEMBER: Final = "X-Tidegate-Member"
WAITED: Final = "X-Tidegate-Waited"
COST: Final = "X-Tidegate-Cost"
REMAINING: Final = "X-Tidegate-Remaining"
TRUNCATES_AT: Final = "X-Tidegate-Truncates-At"
RETRY_AFTER: Final = "X-Tidegate-Retry-After"
NOTE: Final = "X-Tidegate-Note"
MAX_KNOWN_NAMES: Final = 1000  # names of header fields that are remembered
MAX_KNOWN_NAME_LENGTH: Final = 64
BODY_PREFIX: Final = "content-"  # of fields that describe the body
METERED_CODINGS: Final = "gzip, deflate"  # that the meter can read
TOO_MANY_REQUESTS: Final = 429


class EgressError(Exception):
    """A request that the gateway answers itself."""

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """Answer with this status; `kind` is for programs, `message` for people."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers: Mapping[str, str] = headers or {}

    def response(self) -> web.Response:
        """Build the answer, in a form that the SDKs of OpenAI and Anthropic and tidegate's own client can show."""
        error = {"type": self.kind, "message": str(self), "code": self.kind}
        body = {"type": "error", "title": self.kind, "status": self.status, "detail": str(self), "error": error}
        return json_response(self.status, body, self.headers)


class DeniedError(EgressError):
    """A request without a permit: a 429 as the provider would send it."""

    def __init__(
        self,
        decision: Decision | None,
        message: str,
        document: Any = None,  # noqa: ANN401 - any JSON value
        run: RunDenied | None = None,
    ) -> None:
        """Answer a denial; `document` is the provider's own form of a 429, `run` is set if a run denied it."""
        retry = None if decision is None else decision.retry
        headers = {"Cache-Control": "no-store"}
        if retry is None or retry < 0:
            headers["X-Should-Retry"] = "false"
            text = message if run else f"{message}. The request asks for more than the limit can ever allow."
        else:
            seconds = retry / SECOND
            headers |= {
                "Retry-After": str(max(1, ceil(seconds))),
                "Retry-After-Ms": str(max(1, ceil(seconds * 1000))),
                RETRY_AFTER: f"{seconds:.6f}",
            }
            text = message if run else f"{message}. Please try again in {seconds:.3f}s."
        super().__init__(TOO_MANY_REQUESTS, "rate_limit_exceeded", text, headers)
        self._decision = decision
        self._document = document
        self._run = run

    def response(self) -> web.Response:
        """Build the answer: the provider's form if its profile knows it, else problem details."""
        seconds = self.headers.get(RETRY_AFTER, "0")
        if self._document is not None:
            body = fill_in(self._document, str(self), seconds)
        else:
            body = {} if self._decision is None else problem(self._decision, detail=str(self))
            body["error"] = {"type": self.kind, "message": str(self), "code": self.kind}
        if self._run is not None and isinstance(body, dict):
            run = self._run
            body["run"] = {"node": run.node, "limit": run.limit, "needed": run.needed, "left": run.left}
        return json_response(self.status, body, self.headers)


def denial(denied: Denied, provider: Provider, of_caller: str) -> DeniedError:
    """Return the 429 of a call without a permit, in the form of its provider."""
    decision = denied.decision
    document = provider.counting.denial if provider.profile is not None else None
    if isinstance(denied, RunDenied):
        return DeniedError(decision, f"run {denied}", document, denied)
    names = ", ".join(decision.violated) if decision is not None else ""
    limits = f" ({names})" if names else ""
    message = f"{of_caller or 'provider ' + provider.name + ': '}rate limit reached{limits}"
    return DeniedError(decision, message, document)


def refusal(error: RateLimitError, provider: Provider) -> EgressError:
    """Return the answer to a call that could not be counted."""
    if isinstance(error, UnboundedCost):
        if error.field == BODY:
            return EgressError(415, "unreadable-body", str(error))
        return EgressError(400, "unbounded-cost", str(error))
    if isinstance(error, ResourceUnknown):
        log.warning("provider %s: a call was refused: %s", provider.name, error)
        message = f"provider {provider.name} has no price for the model of this request"
        return EgressError(400, "unknown-price", message)
    if isinstance(error, RunRightError):
        return EgressError(403, "run-right", str(error))
    if isinstance(error, ConfigError):
        return EgressError(400, "bad-body", "the request cannot be counted: the name of its model is not valid")
    message = "the gateway is stopping" if isinstance(error, Closed) else "the store of the gateway is unavailable"
    return EgressError(503, "unavailable", message, {"Retry-After": "1"})


def fill_in(document: Any, message: str, seconds: str) -> Any:  # noqa: ANN401 - any JSON value
    """Replace `{message}` and `{seconds}` in the strings of a JSON document."""
    if isinstance(document, dict):
        return {name: fill_in(value, message, seconds) for name, value in document.items()}
    if isinstance(document, list):
        return [fill_in(value, message, seconds) for value in document]
    if isinstance(document, str):
        return document.replace("{message}", message).replace("{seconds}", seconds)
    return document


def json_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> web.Response:
    """Build an answer of the gateway."""
    return web.Response(body=json.dumps(body).encode(), status=status, headers=headers, content_type="application/json")


# ---- header fields ---------------------------------------------------------------------------------------------------


class HeaderFilter(dict[str, bool]):
    """Maps the name of a header field, as it was written, to whether the field is passed on; remembers known names."""

    def __init__(self, dropped: frozenset[str]) -> None:
        """Drop these fields, and all that begin with `X-Tidegate-`."""
        super().__init__()
        self._dropped = dropped

    def __missing__(self, name: str) -> bool:
        """Decide about a name that is not known yet."""
        lower = name.lower()
        found = lower not in self._dropped and not lower.startswith(PREFIX)
        if len(self) < MAX_KNOWN_NAMES and len(name) <= MAX_KNOWN_NAME_LENGTH:
            self[name] = found
        return found


REQUEST_FILTER: Final = HeaderFilter(REQUEST_DROPPED)
RESPONSE_FILTER: Final = HeaderFilter(HOP_BY_HOP)


def request_headers(
    headers: CIMultiDictProxy[str], provider: Provider, tokens_in: Iterable[str], *, metered: bool
) -> CIMultiDict[str]:
    """Return the header fields that are sent to the provider, without its key and the fields of `tokens_in`."""
    passed = REQUEST_FILTER
    found = CIMultiDict([pair for pair in headers.items() if passed[pair[0]]])
    if "connection" in headers:
        drop(found, hop_by_hop(headers.getall("connection")))
    if adds_key(provider):
        drop(found, (*KEY_HEADERS, *ACCOUNT_HEADERS))
        if provider.key_location is not None and provider.key_location.kind == "header":
            drop(found, (provider.key_location.name,))
    drop(found, (*tokens_in, *hiding(provider)))
    if metered and "accept-encoding" in found:
        found["Accept-Encoding"] = METERED_CODINGS if "gzip" in found["accept-encoding"] else "identity"
    return found


def hiding(provider: Provider) -> tuple[str, ...]:
    """Return the query parameters and header fields that would hide the usage of a metered call."""
    return () if provider.profile is None else provider.counting.dropped


def adds_key(provider: Provider) -> bool:
    """Return whether the gateway adds a key: that of the provider, or of a member of its pool."""
    return (provider.api_key is not None and provider.key_location is not None) or provider.pool is not None


def response_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the header fields of a provider's response that are passed on."""
    passed = RESPONSE_FILTER
    found = CIMultiDict([pair for pair in headers.items() if passed[pair[0]]])
    if "connection" in headers:
        drop(found, hop_by_hop(headers.getall("connection")))
    return found


def contains_key(value: str, key: str) -> bool:
    """Return whether the value of a header field contains a key, as it is or as part of a URL."""
    return key in value or ("%" in value and key in unquote(value)) or ("+" in value and key in unquote_plus(value))


def drop(headers: CIMultiDict[str], names: Iterable[str]) -> None:
    """Remove header fields."""
    for name in names:
        headers.popall(name, None)


def hop_by_hop(values: Iterable[str]) -> list[str]:
    """Return the names that fields such as Connection list, except those that describe the body.

    Without its Content-Encoding, a body would be another one for the provider than for the meter.
    """
    names = (name.strip().lower() for value in values for name in value.split(","))
    return [name for name in names if not name.startswith(BODY_PREFIX)]


def describe_cost(cost: Cost) -> str:
    """Write a cost by unit."""
    if isinstance(cost, int):
        return f"requests={cost}"
    return ", ".join(f"{unit}={amount}" for unit, amount in cost.items())


def describe_remaining(decision: Decision) -> str:
    """Write what is left of each limit, by its name."""
    pairs = zip(decision.policy_limits, decision.views, strict=False)
    return ", ".join(f"{limit.name}={max(0, view.remaining)}" for limit, view in pairs)


def bracketed(host: str) -> str:
    """Write a host as in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
