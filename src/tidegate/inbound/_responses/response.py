"""Writes the rate limit headers of every response, and the complete response to a denied request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from copy import copy
from datetime import UTC, datetime
from functools import partial
from operator import mod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from tidegate.core._algorithms import View
from tidegate.core._bounds import SECOND, ceil_div
from tidegate.core._decision import Decision, LocalDecision, denied_without_store
from tidegate.headers import PROBLEM_TYPE, problem, write
from tidegate.headers._dialects import RETRY_AFTER, X_RATELIMIT
from tidegate.headers._writer import find_tightest
from tidegate.inbound._client.request import FrameworkRequest
from tidegate.inbound._responses.accept import mentions_json, prefers_json
from tidegate.inbound._responses.header_names import read_header_names
from tidegate.inbound._responses.next_permit import NextPermitView, shown_reset
from tidegate.inbound._responses.prepared_fields import (
    ROUND_UP,
    FieldForm,
    prepare_tightest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._policy import Policy
    from tidegate.core import Limit
    from tidegate.headers import Style
    from tidegate.headers._problem_details import Kind
    from tidegate.inbound._client.request import Request
    from tidegate.inbound._responses.prepared_fields import FieldWriter

    Fields = list[tuple[str, str]]
    RawField = tuple[bytes, bytes]
    RawFields = list[RawField]

log: logging.Logger = logging.getLogger("tidegate.inbound")

MAX_SNIFFED: Final = 64  # characters of a custom body that are read to find its type
F = TypeVar("F", tuple[str, str], tuple[bytes, bytes])  # a header field
RETRY_AFTER_FIELD: Final = RETRY_AFTER.lower().encode()
RETRY_AFTER_STATUSES: Final = (429, 503)
BODY_HEADERS: Final = ("content-type", "content-length")  # fields that describe a body
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    413: "Content Too Large",
    429: "Too Many Requests",
    503: "Service Unavailable",
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


class PlainDenial(Response):
    """The default response to a denied request, in plain text."""

    __slots__ = ()


# Returns the response to a denied request: a string, a mapping (JSON), a Response, or None for the default.
DenialHandler = Callable[[FrameworkRequest, Decision], "Response | str | bytes | Mapping[str, object] | None"]


class ResponseWriter:
    """Writes headers and denials in one style."""

    def __init__(self, headers: Style | Mapping[str, str] = "x", *, denied: DenialHandler | None = None) -> None:
        """Set the style of the headers, or custom names; `denied` returns custom responses."""
        self.style, names = read_header_names(headers)
        self.custom_denial = denied
        self._limit_field, self._remaining_field, self._reset_field = (name.lower().encode() for name in names.values())
        # The spelling of the fields that `raw_fields` writes.
        self._spelling = {name.lower().encode(): name for name in (*names.values(), RETRY_AFTER)}
        self._raw_form: FieldForm[bytes] = FieldForm(
            (self._limit_field, self._remaining_field, self._reset_field), partial(mod, b"%d")
        )
        self._text_form: FieldForm[str] = FieldForm(tuple(names.values()), str)

    def with_denied(self, denied: DenialHandler | None) -> ResponseWriter:
        """Return a writer of the same denials, with another function for custom responses; None: this one."""
        if denied is None:
            return self
        other = copy(self)
        other.custom_denial = denied
        return other

    def fields(self, decision: Decision) -> Fields:
        """Return the header fields of a decision."""
        if self.style == "x":
            return [(self._spelling[name], value.decode("ascii")) for name, value in self.raw_fields(decision)]
        fields = write(decision, self.style)
        views = decision.views
        _, (_, _, reset) = find_tightest(decision.policy_limits, views)
        shown = str(ceil_div(decision.at + shown_reset(views, reset), SECOND))
        return [(name, shown if name == X_RATELIMIT.reset else value) for name, value in fields]

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
            reset = shown_reset(views, reset)
            waits = [view[1] for view in views]
            retry = -1 if -1 in waits else max(waits)
        elif costs is None:
            view: Any = views_or_states[0]  # without costs, it is a view
            remaining, retry, reset = view
            if view.__class__ is NextPermitView:
                reset = view.next_permit
        else:
            remaining, retry, reset = limit.view(views_or_states[0], limit, costs[0], at)
        quota = limit.quota
        fields = [
            (self._limit_field, b"%d" % quota),
            self._raw_form.write_remaining(max(0, min(remaining, quota))),
            (self._reset_field, b"%d" % ((at + reset + ROUND_UP) // SECOND)),
        ]
        if retry > 0 and not decision.allowed:
            fields.append((RETRY_AFTER_FIELD, b"%d" % ((retry + ROUND_UP) // SECOND)))
        return fields

    def tightest_writer(self, policies: Sequence[Policy], *, raw: bool) -> FieldWriter:
        """Return what writes the fields of decisions about policies that were charged together. `raw`: as bytes."""
        write_decision: FieldWriter = self.raw_fields if raw else self.fields

        def write_combined(decisions: Sequence[Decision]) -> list[Any]:
            return write_decision(combine_decisions(decisions))

        if self.style != "x" or any(policy.only is None for policy in policies):
            return write_combined
        if raw:
            return prepare_tightest(policies, self._raw_form, write_combined)
        return prepare_tightest(policies, self._text_form, write_combined)

    def is_plain(self, headers: Iterable[RawField]) -> bool:
        """Return whether the denial of a request with these headers is certainly `plain_denial`."""
        return self.custom_denial is None and not mentions_json(headers)

    def _call_custom(self, request: Request, decision: Decision) -> Any:  # noqa: ANN401 - see DenialHandler
        """Call the function for custom responses; if it fails, the client gets the default one."""
        if self.custom_denial is None:
            return None
        try:
            return self.custom_denial(request, decision)
        except Exception:
            log.exception("the function `denied` failed: the default response is sent")
            return None

    def write_denial(self, request: Request, decision: Decision, policy: Policy) -> Response:
        """Build the response to a denied request, without the rate limit headers."""
        custom = self._call_custom(request, decision)
        kind = denial_kind(decision, policy)
        status = 503 if kind == "temporary-reduced-capacity" else 429
        if isinstance(custom, Response):
            return _mark_uncacheable(custom)
        if isinstance(custom, (str, bytes)):
            return _make_response(status, custom, guess_type(custom))
        if custom is not None:
            try:
                return _make_response(status, json.dumps(custom), "application/json")
            except (TypeError, ValueError):
                log.exception("the function `denied` returned what cannot be written as JSON: the default is sent")
        if prefers_json(request.header("accept")):
            content = problem(decision, kind, detail=special_detail(decision))
            return _make_response(status, json.dumps(content), PROBLEM_TYPE)
        return plain_denial(decision, policy)


class BlockedDecision(Decision):
    """The denial of a blocked client; its `retry_after` is the time until the block ends.

    A function `denied` tells it from other denials by its type.
    """

    __slots__ = ()

    @classmethod
    def until(cls, now: int, limits: tuple[Limit, ...], end: int) -> Self:
        """Deny until a time, in microseconds since 1970."""
        wait = max(1, end - now)
        return cls.of_views(now, limits, (View((0, wait, wait)),) * len(limits), within_limits=False)


class ListedDecision(BlockedDecision):
    """The denial of a client that the configuration blocks: until the file changes."""

    __slots__ = ()


def fit_to_status(fields: list[F], status: int) -> list[F]:
    """Remove Retry-After from the fields of a denied decision if the response is neither a 429 nor a 503.

    A custom denial or the application may respond to a denied request with another status.
    """
    if status in RETRY_AFTER_STATUSES:
        return fields
    return [field for field in fields if field[0] not in (RETRY_AFTER, RETRY_AFTER_FIELD)]


def plain_denial(decision: Decision, policy: Policy) -> Response:
    """Return the default response to a denied request, in plain text."""
    if denial_kind(decision, policy) == "temporary-reduced-capacity":
        return UNAVAILABLE
    detail = special_detail(decision)
    if detail is not None:
        return PlainDenial(*_make_response(429, detail, "text/plain"))
    for _, retry, _ in decision.views:
        if retry < 0:
            return NEVER_FITS_DENIAL
    return PLAIN_DENIAL


def special_detail(decision: Decision) -> str | None:
    """Return the sentence for a blocked client or a closed limit; None for other denials."""
    if isinstance(decision, BlockedDecision) and not isinstance(decision, ListedDecision):
        until = datetime.fromtimestamp(ceil_div(decision.at + decision.retry, SECOND), UTC)
        return f"Rate limit exceeded too often. Blocked until {until:%Y-%m-%dT%H:%M:%SZ}."
    for limit in decision.policy_limits:
        if not limit.quota:
            return "Rate limit exceeded. The limit is 0: no request is allowed."
    return None


def denial_kind(decision: Decision, policy: Policy) -> Kind:
    """Return the kind of a denial; a store error is not the client's fault."""
    lost = isinstance(decision, LocalDecision) and policy.on_store_error == "deny"
    if lost or denied_without_store(decision, policy.limits):
        return "temporary-reduced-capacity"
    return "abnormal-usage-detected" if isinstance(decision, BlockedDecision) else "quota-exceeded"


def guess_type(body: str | bytes) -> str:
    """Return the content type of a custom body: JSON and HTML documents are recognized, the rest is plain text."""
    start = body[:MAX_SNIFFED].strip().lower()
    start = start if isinstance(start, bytes) else start.encode("utf-8", "replace")
    if start.startswith((b"<!doctype html", b"<html")):
        return "text/html; charset=utf-8"
    if start.startswith((b"{", b"[")):
        try:
            json.loads(body)
        except ValueError:
            pass
        else:
            return "application/json"
    return "text/plain; charset=utf-8"


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


PLAIN_DENIAL: Final = PlainDenial(*_make_response(429, "Rate limit exceeded. Try again later.", "text/plain"))
NEVER_FITS_DENIAL: Final = PlainDenial(
    *_make_response(429, "Rate limit exceeded. The request costs more than the limit can ever allow.", "text/plain")
)
UNAVAILABLE: Final = PlainDenial(
    *_make_response(503, "Rate limits cannot be checked at the moment. Try again later.", "text/plain")
)
RAW_PLAIN_HEADERS: Final = raw(PLAIN_DENIAL.headers)
