"""Writes the rate limit headers of every response, and the complete response to a denied request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tidegate.core.bounds import SECOND
from tidegate.core.decision import Decision, LocalDecision
from tidegate.headers import PROBLEM_TYPE, check_style, problem, write
from tidegate.headers.dialects import IETF, RETRY_AFTER, X_RATELIMIT
from tidegate.headers.writer import find_tightest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate.headers import Style
    from tidegate.headers.problem_details import Kind
    from tidegate.inbound.client.request import Request
    from tidegate.policy import Policy

    Fields = list[tuple[str, str]]
    RawField = tuple[bytes, bytes]
    RawFields = list[RawField]

MAX_ACCEPT_LENGTH: Final = 1024  # longer Accept headers are truncated
CACHED_REMAINING: Final = 1024
LIMIT_FIELD, REMAINING_FIELD, RESET_FIELD = (name.lower().encode() for name in X_RATELIMIT[:3])
F = TypeVar("F", tuple[str, str], tuple[bytes, bytes])  # a header field
RETRY_AFTER_FIELD: Final = RETRY_AFTER.lower().encode()
RETRY_AFTER_STATUSES: Final = (429, 503)
EXPOSE_HEADERS: Final = "Access-Control-Expose-Headers"
REMAINING_FIELDS: Final = [(REMAINING_FIELD, b"%d" % number) for number in range(CACHED_REMAINING)]
ROUND_UP: Final = SECOND - 1
EXPOSED_HEADERS: Final = {
    "x": ", ".join((*X_RATELIMIT[:3], RETRY_AFTER)),
    "ietf": f"{IETF.state}, {IETF.policy}, {RETRY_AFTER}",
    "both": ", ".join((*X_RATELIMIT[:3], IETF.state, IETF.policy, RETRY_AFTER)),
    "none": RETRY_AFTER,
}
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    413: "Content Too Large",
    429: "Too Many Requests",
    503: "Service Unavailable",
}


CANONICAL_NAMES: Final = {  # of the fields that `raw_fields` writes
    name.lower().encode(): name for name in (*X_RATELIMIT[:3], RETRY_AFTER, EXPOSE_HEADERS)
}


class Response(NamedTuple):
    """A complete response."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def line(self) -> str:
        """The status line for WSGI."""
        return f"{self.status} {REASONS.get(self.status, 'Status')}"


# Returns the response to a denied request: a string, a mapping (JSON), a Response, or None for the default.
Denying = Callable[["Request", Decision], "Response | str | bytes | Mapping[str, object] | None"]


class ResponseWriter:
    """Writes headers and denials in one style."""

    def __init__(self, style: Style = "x", *, expose: bool = False, denied: Denying | None = None) -> None:
        """Set the style of the headers; `expose` them to other origins; `denied` returns custom responses."""
        check_style(style)
        self.style = style
        self.custom_denial = denied
        self._extra: Fields = [(EXPOSE_HEADERS, EXPOSED_HEADERS[style])] if expose else []
        self._raw_extra = raw(self._extra)

    def fields(self, decision: Decision) -> Fields:
        """Return the header fields of a decision."""
        if self.style == "x":
            return [(CANONICAL_NAMES[name], value.decode("ascii")) for name, value in self.raw_fields(decision)]
        return [*write(decision, self.style), *self._extra]

    def raw_fields(self, decision: Decision) -> RawFields:
        """Return the header fields of a decision as bytes, for ASGI."""
        if self.style != "x":
            return raw(self.fields(decision))
        # The same as `write`, but in bytes, by position and faster: this runs for every request.
        _, at, limits, views_or_states, costs = decision
        limit = limits[0]
        if len(limits) > 1:
            views = decision.views
            limit, (remaining, _, reset) = find_tightest(limits, views)
            waits = [view[1] for view in views]
            retry = -1 if -1 in waits else max(waits)
        elif costs is None:
            remaining, retry, reset = views_or_states[0]  # type: ignore[misc]  # without costs, it is a view
        else:
            remaining, retry, reset = limit.view(views_or_states[0], limit, costs[0], at)
        quota = limit.quota
        fields = [
            (LIMIT_FIELD, b"%d" % quota),
            _remaining(min(remaining, quota)),
            (RESET_FIELD, b"%d" % ((at + reset + ROUND_UP) // SECOND)),
            *self._raw_extra,
        ]
        if retry > 0 and not decision.allowed:
            fields.append((RETRY_AFTER_FIELD, b"%d" % ((retry + ROUND_UP) // SECOND)))
        return fields

    def writer(self, policy: Policy) -> Callable[[Decision], RawFields]:
        """Return the fastest function that writes the fields of a policy: a single sliding_log has a fast path."""
        limits = policy.limits
        limit = limits[0]
        if self.style != "x" or len(limits) > 1 or not limit.rules.rolling:
            return self.raw_fields
        quota, length, general = limit.quota, limit.length, self.raw_fields
        first, extra = (LIMIT_FIELD, b"%d" % quota), tuple(self._raw_extra)
        # Cache of one reset field: (after, until, field). It is valid for charges in the interval (after, until].
        last: tuple[int, int, RawField] = (0, 0, first)

        def fields(decision: Decision) -> RawFields:
            nonlocal last
            state = decision[3][0]  # by position: a fast path
            if not decision[0] or decision[2] is not limits or state is None or state[0] is not limit:
                return general(decision)
            # The same as view_log for a state whose last entry is this request.
            _, log, _, tail, base = state
            at = log.times[tail - 1]
            if at < decision[1]:
                return general(decision)
            after, until, reset = last
            if not after < at <= until:
                second = (at + length + ROUND_UP) // SECOND
                until = second * SECOND - length
                reset = (RESET_FIELD, b"%d" % second)
                last = (until - SECOND, until, reset)
            left = quota - log.sums[tail - 1] + base
            return [
                first,
                REMAINING_FIELDS[left] if left < CACHED_REMAINING else (REMAINING_FIELD, b"%d" % left),
                reset,
                *extra,
            ]

        return fields

    def write_denial(
        self, request: Request, decision: Decision, policy: Policy, kind: Kind = "quota-exceeded"
    ) -> Response:
        """Build the response to a denied request, without the rate limit headers."""
        custom = self.custom_denial(request, decision) if self.custom_denial is not None else None
        if custom is None and not prefers_json(request.header("accept")):
            return plain_denial(decision, policy, kind)
        kind = denial_kind(decision, policy, kind)
        status = 503 if kind == "temporary-reduced-capacity" else 429
        if isinstance(custom, Response):
            return _mark_uncacheable(custom)
        if isinstance(custom, (str, bytes)):
            return _make_response(status, custom, "text/plain; charset=utf-8")
        if custom is not None:
            return _make_response(status, json.dumps(custom), "application/json")
        return _make_response(status, json.dumps(problem(decision, kind)), PROBLEM_TYPE)


def fit_to_status(fields: list[F], status: int) -> list[F]:
    """Remove Retry-After from the fields of a denied decision if the response is neither a 429 nor a 503.

    A custom denial or the application may respond to a denied request with another status.
    """
    if status in RETRY_AFTER_STATUSES:
        return fields
    return [field for field in fields if field[0] not in (RETRY_AFTER, RETRY_AFTER_FIELD)]


def plain_denial(decision: Decision, policy: Policy, kind: Kind = "quota-exceeded") -> Response:
    """Return the default response to a denied request, in plain text."""
    if denial_kind(decision, policy, kind) == "temporary-reduced-capacity":
        return UNAVAILABLE
    for _, retry, _ in decision.views:
        if retry < 0:
            return NEVER_FITS_DENIAL
    return PLAIN_DENIAL


def denial_kind(decision: Decision, policy: Policy, kind: Kind) -> Kind:
    """Return the kind of a denial; a store error is not the client's fault."""
    lost = isinstance(decision, LocalDecision) and policy.on_store_error == "deny"
    return "temporary-reduced-capacity" if lost else kind


def _remaining(left: int) -> RawField:
    return REMAINING_FIELDS[left] if left < CACHED_REMAINING else (REMAINING_FIELD, b"%d" % left)


def _make_response(status: int, body: str | bytes, kind: str) -> Response:
    content = body.encode("utf-8", "replace") if isinstance(body, str) else body
    return _mark_uncacheable(Response(status, content, (("Content-Type", kind), ("Content-Length", str(len(content))))))


def _mark_uncacheable(response: Response) -> Response:
    """Mark the response as uncacheable (RFC 6585), unless it has Cache-Control."""
    if any(name.lower() == "cache-control" for name, _ in response.headers):
        return response
    return response._replace(headers=(*response.headers, ("Cache-Control", "no-store")))


def json_response(status: int, content: object) -> Response:
    """Build a JSON response."""
    return _make_response(status, json.dumps(content), "application/json")


def raw(fields: Iterable[tuple[str, str]]) -> RawFields:
    """Encode header fields for ASGI."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in fields]


def combine_decisions(decisions: Sequence[Decision]) -> Decision:
    """Combine several decisions about one request, so that headers show the tightest of all limits."""
    if len(decisions) == 1:
        return decisions[0]
    limits = tuple(limit for decision in decisions for limit in decision.policy_limits)
    views = tuple(view for decision in decisions for view in decision.views)
    return Decision.of_views(max(decision.at for decision in decisions), limits, views, within_limits=all(decisions))


def mentions_json(headers: Iterable[RawField]) -> bool:
    """Return whether Accept mentions JSON at all; if not, `prefers_json` need not be called."""
    for name, value in headers:  # noqa: SIM110 - any() would create a generator for each denial
        if name == b"accept" and b"json" in value.lower():
            return True
    return False


def prefers_json(accept: str | None) -> bool:
    """Return whether an Accept header prefers JSON to plain text; never raises.

    Of the types that are named, the larger q wins, then the first. `*/*` means plain text.
    """
    accept = accept[:MAX_ACCEPT_LENGTH].lower() if accept else ""
    if "json" not in accept:
        return False
    best: dict[bool, tuple[float, int]] = {}
    for place, entry in enumerate(accept.split(",")):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        is_json = kind in ("application/json", PROBLEM_TYPE)
        if is_json or kind in ("text/plain", "text/*"):
            weight = (_quality(parameters), -place)
            best[is_json] = max(best.get(is_json, (0.0, 0)), weight)
    wanted = best.get(True, (0.0, 0))
    return wanted[0] > 0 and wanted > best.get(False, (0.0, 0))


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return quality if 0 <= quality <= 1 else 0.0
    return 1.0


PLAIN_DENIAL: Final = _make_response(429, "Rate limit exceeded. Try again later.", "text/plain")
NEVER_FITS_DENIAL: Final = _make_response(
    429, "Rate limit exceeded. The request costs more than the limit can ever allow.", "text/plain"
)
UNAVAILABLE: Final = _make_response(503, "Rate limits cannot be checked at the moment. Try again later.", "text/plain")
RAW_PLAIN_HEADERS: Final = raw(PLAIN_DENIAL.headers)
