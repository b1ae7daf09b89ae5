"""Authenticates requests by token and host name. Tokens are compared in constant time."""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final

from tidegate.headers import _cross_site as cross_site
from tidegate.service._api.problems import ProblemError
from tidegate.service._config.values import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidegate.service._config.settings import Settings

HOST: Final = re.compile(rb"(\[[\w.:%~-]*\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?", re.ASCII)  # the characters of RFC 3986
VERSIONS: Final = ("1.1", "1.0")
SINGLE_FIELDS: Final = (b"host", b"authorization", b"x-tidegate-token", b"content-type", b"idempotency-key")
BEARER_PREFIX: Final = b"bearer "
CROSS_SITE: Final = (
    "requests from pages of other sites are refused if no decision token is set; a proxy that forwards the header "
    "fields of its client must remove Origin and Sec-Fetch-Site, or a decision token must be set"
)


class Authenticator:
    """Checks whether a request is allowed.

    Without any token, every client that can connect may do everything; with only an admin token, every client may
    request decisions. The settings allow that on loopback, or with `open: true`. On loopback, a page in a browser of
    this machine must not get access by a host name of its own that resolves to this machine (DNS rebinding): the Host
    has to be a name of this machine.
    """

    def __init__(self, settings: Settings) -> None:
        """Use the tokens of the settings."""
        self._decision = _encode(settings.decision_token)
        self._admin = _encode(settings.admin_token)
        self._metrics = _encode(settings.metrics_token)
        self._open_metrics = settings.metrics_token == NO_TOKEN
        self.open: bool = self._decision is None and self._admin is None
        self._last_host: bytes | None = None  # the host name that was accepted last: usually the next one, too
        self._local = self._decision is None and settings.listen.loopback

    def check(self, headers: dict[bytes, bytes], *, admin: bool) -> None:
        """Raise unless the request is allowed."""
        if self.open or (self._decision is None and not admin):
            self.check_site(headers)
            if self._local and (host := headers.get(b"host", b"")) != self._last_host:
                check_host(host)
                self._last_host = host
            return
        is_admin, is_decision = self.find_rights(find_token(headers))
        if is_admin or (is_decision and not admin):
            return
        if is_decision:
            raise ProblemError("forbidden", "this needs the admin token")
        if admin and self._admin is None:
            raise ProblemError("forbidden", "no admin token is configured: set admin_token or admin_token_file")
        raise ProblemError("unauthorized", "send the token as 'Authorization: Bearer …' or as 'X-Tidegate-Token: …'")

    def check_proxy(self, headers: dict[bytes, bytes]) -> None:
        """Raise unless the request may ask for a decision as a proxy does. A page of another site may not."""
        self.check(headers, admin=False)
        self.check_site(headers)

    def check_metrics(self, headers: dict[bytes, bytes]) -> None:
        """Raise unless the request may read the metrics: with `metrics_token`, or with a token for decisions.

        With `metrics_token: none`, every client that can connect may read them.
        """
        if self._open_metrics and self._decision is not None:
            return
        if self._metrics is None or self._open_metrics:
            self.check(headers, admin=False)
            return
        token = find_token(headers)
        known = (each for each in (self._metrics, self._decision, self._admin) if each is not None)
        if not sum(hmac.compare_digest(token, each) for each in known):  # all comparisons are always made
            raise ProblemError("unauthorized", "/metrics needs the metrics token, as 'Authorization: Bearer …'")

    def may_decide(self, headers: dict[bytes, bytes]) -> bool:
        """Return whether the client may request decisions."""
        try:
            self.check(headers, admin=False)
        except ProblemError:
            return False
        return True

    def find_rights(self, token: bytes) -> tuple[bool, bool]:
        """Return whether a token is the admin token, and whether it is the decision token."""
        # Both comparisons are always made, so that the time does not depend on the first.
        is_admin = self._admin is not None and hmac.compare_digest(token, self._admin)
        is_decision = self._decision is not None and hmac.compare_digest(token, self._decision)
        return is_admin, is_decision

    def check_site(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a request from a page of another site if no token is needed: the browser may run on this machine.

        A page can send a simple request (GET, HEAD, or a POST that is not JSON) to any server without a preflight, and
        any request if a proxy answers the preflight. Browsers send the site of the page in `Sec-Fetch-Site` or in
        `Origin`; the page can set neither.
        """
        sent = b"origin" in headers or b"sec-fetch-site" in headers
        if sent and self._decision is None and is_cross_site(headers):
            raise ProblemError("forbidden", CROSS_SITE)


def is_cross_site(headers: dict[bytes, bytes]) -> bool:
    """Return whether a page of another site sends the request through a browser."""
    fields = (headers.get(name) for name in (b"sec-fetch-site", b"origin", b"host"))
    return cross_site.is_cross_site(*(None if each is None else each.decode("latin-1") for each in fields))


def check_fields(fields: Sequence[tuple[bytes, bytes]], version: str) -> None:
    """Refuse a head that a proxy before the service may have read in another way, as RFC 9112 demands or allows.

    Another version of HTTP, no Host (section 3.2), a transfer coding that is not decoded (6.1), or a field twice of
    which only one value counts.
    """
    if version not in VERSIONS:
        raise ProblemError("bad-request", "expected HTTP/1.1 or HTTP/1.0")
    names = [name for name, _ in fields]
    for name in SINGLE_FIELDS:
        if names.count(name) > 1:
            raise ProblemError("bad-request", f"expected one {name.decode().title()} field, not {names.count(name)}")
    if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in fields):
        raise ProblemError("bad-request", "expected no Transfer-Encoding but chunked")
    hosts = [value for name, value in fields if name == b"host"]
    if not hosts and version != "1.0":
        raise ProblemError("bad-request", "expected a Host field: HTTP/1.1 requires it")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise ProblemError("bad-request", "the Host field must be a host name or an address, with or without a port")


def check_host(host: bytes) -> None:
    """Refuse a Host that is not a name of this machine."""
    if not cross_site.is_local_host(host.decode("latin-1")):
        message = "the Host must be localhost or a loopback address, because no decision token is set"
        raise ProblemError("forbidden", message)


def find_token(headers: dict[bytes, bytes]) -> bytes:
    """Return the token; X-Tidegate-Token takes precedence, because a proxy may forward its client's Authorization."""
    own = headers.get(b"x-tidegate-token")
    if own is not None:
        return own
    value = headers.get(b"authorization", b"")
    return value[len(BEARER_PREFIX) :].strip() if value[: len(BEARER_PREFIX)].lower() == BEARER_PREFIX else b""


def _encode(token: str | None) -> bytes | None:
    return None if token is None else token.encode()
