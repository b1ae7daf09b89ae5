"""Responses without a decision, as problem details (RFC 9457)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from tidegate.agents._errors import RunDenied, RunEndedError, RunRightError, TokenError
from tidegate.errors import Closed, ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.headers import PROBLEM_TYPE
from tidegate.service._api.fields import BadFieldError
from tidegate.service._api.responses import ProblemResponse
from tidegate.service._decisions.idempotency import IdempotencyMismatchError
from tidegate.service._decisions.reservation_ids import AlreadySettledError, UnknownReservationError

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBLEM_PREFIX: Final = "urn:tidegate:problem:"
JSON_CONTENT_TYPE: Final = b"application/json"
PROBLEM_CONTENT_TYPE: Final = PROBLEM_TYPE.encode()
encode: Final = msgspec.json.Encoder().encode

# kind: status, title. Clients may use the type (PROBLEM_PREFIX and the kind) or the status.
KINDS: Final[dict[str, tuple[int, str]]] = {
    "bad-request": (400, "The request is invalid"),
    "unauthorized": (401, "A valid token is required"),
    "forbidden": (403, "The token or the origin of the request does not allow this"),
    "not-found": (404, "Unknown path"),
    "unknown-policy": (404, "Unknown policy or domain"),
    "unknown-reservation": (404, "Unknown reservation"),
    "unknown-run": (404, "Unknown run"),
    "method-not-allowed": (405, "The path does not support this method"),
    "timeout": (408, "The request was not received in time"),
    "run-denied": (409, "The node of a run does not allow this"),
    "already-settled": (409, "The reservation is already settled"),
    "too-large": (413, "The request is too large"),
    "unsupported-type": (415, "The request must be application/json"),
    "bad-run-token": (422, "The token of a run is not valid"),
    "bad-field": (422, "A field of the request is invalid"),
    "idempotency-mismatch": (422, "The idempotency key was used for another request"),
    "head-too-large": (431, "The header fields are too large"),
    "internal": (500, "The service failed"),
    "busy": (503, "Too many active requests"),
    "stopping": (503, "The service is stopping"),
    "store-unavailable": (503, "The store is unavailable"),
    "bus-unavailable": (503, "The bus is unavailable"),
    "worker-unresponsive": (503, "A worker process does not respond"),
}


class HTTPReply(NamedTuple):
    """A response: status, body, content type, and further header fields."""

    status: int
    body: bytes
    type: bytes = JSON_CONTENT_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ProblemError(Exception):
    """A response without a decision."""

    def __init__(
        self,
        kind: str,
        detail: str = "",
        pointer: str | None = None,
        *,
        allow: str = "",
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Set the kind and the detail; `allow` lists the methods for a 405, `more` has further members of the body."""
        super().__init__(detail or KINDS[kind][1])
        self.kind = kind
        self.pointer = pointer
        self.allow = allow
        self.more: Mapping[str, object] = more or {}

    @property
    def response(self) -> ProblemResponse:
        """The problem as a JSON object."""
        status, title = KINDS[self.kind]
        pointer = msgspec.UNSET if self.pointer is None else encodable(self.pointer)
        return ProblemResponse(PROBLEM_PREFIX + self.kind, title, status, encodable(str(self)), pointer)

    def reply(self) -> HTTPReply:
        """Build the HTTP response."""
        status = KINDS[self.kind][0]
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if status == 401:  # noqa: PLR2004 - RFC 9110 requires it
            headers = ((b"www-authenticate", b'Bearer realm="tidegate"'),)
        elif status == 503:  # noqa: PLR2004 - when to retry
            headers = ((b"retry-after", b"1"),)
        elif self.allow:  # RFC 9110 requires it on a 405
            headers = ((b"allow", self.allow.encode()),)
        body = {**msgspec.to_builtins(self.response), **self.more} if self.more else self.response
        return HTTPReply(status, encode(body), PROBLEM_CONTENT_TYPE, headers)


def encodable(text: str) -> str:
    """Return a string that can be encoded as UTF-8: lone surrogates of a request are escaped."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def problem_from(error: RateLimitError) -> ProblemError:
    """Translate an error of the decider."""
    if isinstance(error, BadFieldError):
        kind = "bad-field" if error.pointer else "bad-request"
        return ProblemError(kind, error.detail, error.pointer or None)
    if isinstance(error, ConfigError):
        pointer = f"/{error.field.replace('.', '/')}" if error.field else None
        return ProblemError("bad-field", error.detail, pointer)
    kind = next((kind for each, kind in KIND_BY_ERROR if isinstance(error, each)), "internal")
    return ProblemError(kind, str(error))


KIND_BY_ERROR: Final = (  # the first one that matches: a subclass goes before its base class
    (RunEndedError, "unknown-run"),
    (RunRightError, "forbidden"),
    (TokenError, "bad-run-token"),
    (RunDenied, "run-denied"),
    (UnknownReservationError, "unknown-reservation"),
    (ResourceUnknown, "unknown-policy"),
    (AlreadySettledError, "already-settled"),
    (IdempotencyMismatchError, "idempotency-mismatch"),
    (StoreUnavailable, "store-unavailable"),
    (Closed, "stopping"),
)
