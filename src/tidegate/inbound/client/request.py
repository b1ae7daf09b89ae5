"""A request as keys, limits and answers are chosen by: the same for ASGI and WSGI."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from tidegate.policy import Key

MAX_KEY_LENGTH: Final = 256  # characters of a header that stand in a key as they are
# Headers by which a client asks to be taken for another method; the application may do so or not.
METHOD_OVERRIDES: Final = ("x-http-method-override", "x-http-method", "x-method-override")
LONGEST_METHOD: Final = 32
REPLACED: Final = "\ufffd"  # what stands for a byte that is no UTF-8


class Request:
    """What there is to know of a request before the application has seen it.

    `address` is the client's (None: it has none), `path` is decoded and without the query, `raw` is the ASGI scope or
    the WSGI environ. Bytes of the path that are no UTF-8 stand in it as lone surrogates, as in the names of files, so
    that different paths stay different.
    """

    __slots__ = ("_header", "address", "method", "path", "raw")

    def __init__(
        self,
        method: str,
        path: str,
        address: str | None,
        raw: Any,  # noqa: ANN401 - as the server gives it
        header: Callable[[str], str | None],
    ) -> None:
        """Made by the middlewares."""
        self.method = method
        self.path = path
        self.address = address
        self.raw = raw
        self._header = header

    def header(self, name: str) -> str | None:
        """Give the value of a header, whatever its case; None: it is not there. Sent twice, its values are joined."""
        return self._header(name)

    def __repr__(self) -> str:
        """Show what is asked, by whom."""
        return f"<Request {self.method} {self.path!r} from {self.address}>"


KeyOf = Callable[[Request], "Key | None"]  # None: no such key, the address is taken


def by_address(request: Request) -> Key | None:
    """Limit by address, the default."""
    del request
    return None


def by_header(name: str, *, secret: bool = False) -> KeyOf:
    """Limit by the value of a header; requests without it are limited by address, not all together.

    A `secret` value, and one longer than 256 characters, stands in the store and in logs as its hash only. A client can
    send any value: see that the application checks it, and keep a limit by address beside.
    """
    field = name.lower()

    def key(request: Request) -> Key | None:
        value = request.header(field)
        if not value:
            return None
        if secret or len(value) > MAX_KEY_LENGTH:
            value = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return field, value

    return key


def by_api_key(name: str = "x-api-key") -> KeyOf:
    """Limit by an API key, which is kept as a hash."""
    return by_header(name, secret=True)


def asgi_path(scope: Any) -> str:  # noqa: ANN401 - a scope holds anything
    """Give the path of an ASGI scope; servers write every byte that is no UTF-8 as the same character."""
    path: str = scope["path"]
    raw = scope.get("raw_path")
    if not raw or REPLACED not in path:
        return path
    found = unquote_to_bytes(raw.partition(b"?")[0])
    return found.decode("utf-8", "surrogateescape") if found.decode("utf-8", "replace") == path else path


def asgi_header(scope: Any, name: str) -> str | None:  # noqa: ANN401 - a scope holds anything
    """Find a header in an ASGI scope."""
    wanted = name.lower().encode("latin-1", "replace")
    found = [value for field, value in scope.get("headers", ()) if field == wanted]  # servers write names small
    return b", ".join(found).decode("latin-1") if found else None


def wsgi_header(environ: Any, name: str) -> str | None:  # noqa: ANN401 - an environ holds anything
    """Find a header in a WSGI environ."""
    field = name.upper().replace("-", "_")
    value = environ.get(field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}")
    return value or None
