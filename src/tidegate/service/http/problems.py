"""What is answered when there is no decision: problem details (RFC 9457)."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from tidegate.errors import Closed, ConfigError, RateLimitError, ResourceUnknown, StoreUnavailable
from tidegate.headers import PROBLEM_TYPE
from tidegate.service.decisions.idempotency import IdempotencyMismatchError
from tidegate.service.decisions.reservation_ids import AlreadySettledError
from tidegate.service.http.json_protocol import BadFieldError

PROBLEM_PREFIX: Final = "urn:tidegate:problem:"
JSON_CONTENT_TYPE: Final = b"application/json"
PROBLEM_CONTENT_TYPE: Final = PROBLEM_TYPE.encode()

# kind: status, title. Clients may go by the type (PREFIX and the kind) or by the status.
KINDS: Final[dict[str, tuple[int, str]]] = {
    "bad-request": (400, "The request cannot be understood"),
    "unauthorized": (401, "A token is needed"),
    "forbidden": (403, "This token, or this host name, is not allowed that"),
    "not-found": (404, "There is nothing here"),
    "unknown-policy": (404, "No such policy or domain"),
    "unknown-reservation": (404, "No such reservation"),
    "method-not-allowed": (405, "This method is not for this path"),
    "timeout": (408, "The request was not received in time"),
    "already-settled": (409, "The reservation is settled already"),
    "too-large": (413, "The request is too large"),
    "unsupported-type": (415, "The request has to be application/json"),
    "bad-field": (422, "A field of the request cannot be used"),
    "idempotency-mismatch": (422, "This idempotency key belongs to another request"),
    "head-too-large": (431, "The header fields are too large"),
    "internal": (500, "The service failed"),
    "busy": (503, "Too many requests are under way"),
    "stopping": (503, "The service is stopping"),
    "store-unavailable": (503, "The store cannot be asked"),
    "bus-unavailable": (503, "The bus cannot be reached"),
}


class HTTPReply(NamedTuple):
    """An answer: status, body, its type, and further header fields."""

    status: int
    body: bytes
    type: bytes = JSON_CONTENT_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ProblemError(Exception):
    """An answer that is no decision."""

    def __init__(self, kind: str, detail: str = "", pointer: str | None = None, *, allow: str = "") -> None:
        """Say which kind, and what exactly; of a method that is not allowed, which are."""
        super().__init__(detail or KINDS[kind][1])
        self.kind = kind
        self.pointer = pointer
        self.allow = allow

    def reply(self) -> HTTPReply:
        """Word the answer."""
        status, title = KINDS[self.kind]
        body: dict[str, object] = {
            "type": PROBLEM_PREFIX + self.kind,
            "title": title,
            "status": status,
            "detail": str(self),
        }
        if self.pointer is not None:
            body["pointer"] = self.pointer
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if status == 401:  # noqa: PLR2004 - RFC 9110 wants it there
            headers = ((b"www-authenticate", b'Bearer realm="tidegate"'),)
        elif status == 503:  # noqa: PLR2004 - when to come again
            headers = ((b"retry-after", b"1"),)
        elif self.allow:  # RFC 9110 wants it on a 405
            headers = ((b"allow", self.allow.encode()),)
        return HTTPReply(status, json.dumps(body).encode(), PROBLEM_CONTENT_TYPE, headers)


def problem_of(error: RateLimitError) -> ProblemError:
    """Translate what the decider raises."""
    if isinstance(error, BadFieldError):
        kind = "bad-field" if error.pointer else "bad-request"
        return ProblemError(kind, error.detail, error.pointer or None)
    if isinstance(error, ResourceUnknown):
        reservation = "reservation" in str(error)
        return ProblemError("unknown-reservation" if reservation else "unknown-policy", str(error))
    if isinstance(error, ConfigError):
        pointer = f"/{error.field.replace('.', '/')}" if error.field else None
        return ProblemError("bad-field", str(error), pointer)
    kind = next((kind for each, kind in BY_ERROR if isinstance(error, each)), "internal")
    return ProblemError(kind, str(error))


BY_ERROR: Final = (
    (AlreadySettledError, "already-settled"),
    (IdempotencyMismatchError, "idempotency-mismatch"),
    (StoreUnavailable, "store-unavailable"),
    (Closed, "stopping"),
)
