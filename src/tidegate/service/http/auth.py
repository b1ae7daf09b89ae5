"""Who may come in: tokens, host names. Decision and admin tokens are apart; both are compared in constant time."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final

from tidegate.service.config.values import ListenAddress
from tidegate.service.http.problems import ProblemError

if TYPE_CHECKING:
    from tidegate.service.config.settings import Settings

BEARER_PREFIX: Final = b"bearer "
SAME_SITE: Final = (b"same-origin", b"none")  # a page of ours, or what a person has typed
CROSS_SITE: Final = (
    "without a decision token, no page of another site may ask; a proxy that passes its client's header fields on "
    "has to leave out Origin and Sec-Fetch-Site, or to send the token"
)


class Authenticator:
    """Decides who may ask what.

    With no token at all, everybody who can connect may do everything, and with only an admin token everybody may
    decide; the settings allow that on loopback only, or when told so. There, a page in a browser of this machine must
    not get in by a host name of its own that leads to us (DNS rebinding): the Host has to be one of the machine itself.
    """

    def __init__(self, settings: Settings) -> None:
        """Take the tokens."""
        self._decision = _hashable(settings.decision_token)
        self._admin = _hashable(settings.admin_token)
        self.open = self._decision is None and self._admin is None
        self._last: bytes | None = None  # the host name that was let in last: mostly it is the next one, too
        self._local = self._decision is None and settings.listen.loopback

    def check(self, headers: dict[bytes, bytes], *, admin: bool) -> None:
        """Let in, or refuse."""
        if self.open or (self._decision is None and not admin):
            if self._local and (host := headers.get(b"host", b"")) != self._last:
                check_host(host)
                self._last = host
            return
        token = token_of(headers)
        # All comparisons are made, whatever the first of them says.
        is_admin = self._admin is not None and hmac.compare_digest(token, self._admin)
        is_decision = self._decision is not None and hmac.compare_digest(token, self._decision)
        if is_admin or (is_decision and not admin):
            return
        if is_decision:
            raise ProblemError("forbidden", "this needs the admin token")
        if admin and self._admin is None:
            raise ProblemError("forbidden", "no admin token is configured: set admin_token or admin_token_file")
        raise ProblemError("unauthorized", "send the token as 'Authorization: Bearer …' or as 'X-Tidegate-Token: …'")

    def check_site(self, headers: dict[bytes, bytes]) -> None:
        """Refuse a page of another site where no token is needed: its reader's browser is on this machine, too.

        A page can send a simple request (GET, HEAD, or a POST that is not JSON) anywhere without asking. Browsers say
        which site it comes from in `Sec-Fetch-Site`, or else in `Origin`; neither can be set by the page.
        """
        if self._decision is None and is_cross_site(headers):
            raise ProblemError("forbidden", CROSS_SITE)


def is_cross_site(headers: dict[bytes, bytes]) -> bool:
    """Tell whether a browser sends a request for a page of another site."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in SAME_SITE
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def check_host(host: bytes) -> None:
    """Refuse a name that is not this machine's own."""
    name = host.lower().decode("latin-1")
    if not name.endswith("]"):
        before, colon, port = name.rpartition(":")
        name = before if colon and port.isdigit() else name
    if not ListenAddress(name.strip("[]"), 0).loopback:
        message = "without a decision token, only this machine may ask: by the name localhost or a loopback address"
        raise ProblemError("forbidden", message)


def token_of(headers: dict[bytes, bytes]) -> bytes:
    """Find the token: a proxy passes its client's Authorization on, so ours has a field of its own, too."""
    own = headers.get(b"x-tidegate-token")
    if own is not None:
        return own
    value = headers.get(b"authorization", b"")
    return value[len(BEARER_PREFIX) :].strip() if value[: len(BEARER_PREFIX)].lower() == BEARER_PREFIX else b""


def _hashable(token: str | None) -> bytes | None:
    return None if token is None else token.encode()
