"""The request that key, limit, count and denial functions receive; the same for ASGI and WSGI."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Union
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from uuid import UUID

    from tidegate._policy import Key

MAX_KEY_LENGTH: Final = 256  # longer header values are hashed
# Headers that name another method; some applications use it instead of the request's method.
METHOD_OVERRIDES: Final = ("x-http-method-override", "x-http-method", "x-method-override")
MAX_METHOD_LENGTH: Final = 32
# The counts of `per_method`: clients cannot add others.
METHOD_COUNTS: Final = {
    each: "GET" if each == "HEAD" else each for each in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
}
REPLACEMENT_CHARACTER: Final = "\ufffd"  # replaces bytes that are not UTF-8


class Request:
    """A request, before it reaches the application.

    `address` is the client's address or None, `path` is decoded and has no query, `raw` is the ASGI scope or the WSGI
    environ. Bytes of the path that are not UTF-8 are lone surrogates, as in file names, so different paths stay
    different.
    """

    __slots__ = ("_header", "address", "mapping", "method", "path", "raw")

    def __init__(
        self,
        method: str,
        path: str,
        address: str | None,
        raw: object,
        header: Callable[[str], str | None],
        mapping: MutableMapping[str, object] | None = None,
    ) -> None:
        """Create a request; the middlewares do this. `mapping` keeps what tidegate stores in it (default: `raw`)."""
        self.method: str = method
        self.path: str = path
        self.address: str | None = address
        self.raw: object = raw
        self.mapping: Any = raw if mapping is None else mapping
        self._header = header

    def header(self, name: str) -> str | None:
        """Return the value of a header, case-insensitive; None if it is missing. Repeated headers are joined."""
        return self._header(name)

    def __repr__(self) -> str:
        """Show method, path and address."""
        return f"<Request {self.method} {self.path!r} from {self.address}>"


FrameworkRequest = Any  # a request of Starlette, FastAPI, Flask, Django or aiohttp, or the common Request
# What a key function returns: None limits by address. It may be a coroutine function, in async frameworks.
ChosenKey = Union["Key", int, "UUID", tuple[Union[str, int, "UUID"], ...], None]
KeyOf = Callable[[FrameworkRequest], ChosenKey | Awaitable[ChosenKey]]


@functools.singledispatch
def read_header(request: FrameworkRequest, name: str) -> str | None:
    """Return the value of a header; a framework whose requests have no scope or environ registers its own function."""
    environ = getattr(request, "META", None) or getattr(request, "environ", None)
    return asgi_header(request.scope, name) if environ is None else wsgi_header(environ, name)


@read_header.register
def _(request: Request, name: str) -> str | None:
    return request.header(name)


def by_address(request: FrameworkRequest) -> Key | None:
    """Limit by address, the default."""
    del request
    return None


by_address.reads_headers = True  # type: ignore[attr-defined]  # it needs nothing that an application adds to a request


def by_header(name: str, *, secret: bool = False) -> KeyOf:
    """Limit by the value of a header; requests without it are limited by address.

    A `secret` value, or a value longer than 256 characters, is hashed in the store and in logs. A client can send any
    value: verify it in the application, and keep a limit by address as well.
    """
    field = name.lower()

    def key(request: FrameworkRequest) -> Key | None:
        value = read_header(request, field)
        if not value:
            return None
        if secret or len(value) > MAX_KEY_LENGTH:
            value = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return field, value

    key.__name__ = f"by_header({field})"
    key.reads_headers = True  # type: ignore[attr-defined]  # it needs nothing that an application adds to a request
    return key


def by_api_key(name: str = "x-api-key") -> KeyOf:
    """Limit by an API key; only its hash is stored."""
    return by_header(name, secret=True)


def is_async_callable(function: object) -> bool:
    """Return whether a call returns a coroutine: of a coroutine function, or of an object with such a `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - whether it is a coroutine function


def describe_function_problem(function: object, *arguments: str, coroutines: bool = False) -> str | None:
    """Say what is wrong with an optional function that is called with these arguments; None: nothing is."""
    if function is None:
        return None
    if not callable(function):
        return "must be a function"
    if not coroutines and is_async_callable(function):
        return "must be a plain function (`def` instead of `async def`)"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return f"must be a function of {' and '.join(arguments)}, as in `lambda {', '.join(arguments)}: …`"
    return None


def decode_text(value: str) -> str:
    """Decode a WSGI string, whose bytes are written as Latin-1. Bytes that are not UTF-8 become lone surrogates."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value  # an outer middleware has decoded it already


def asgi_path(scope: Any) -> str:  # noqa: ANN401 - a scope is any mapping
    """Return the path of an ASGI scope; restore bytes that the server has replaced because they are not UTF-8."""
    path: str = scope["path"]
    raw = scope.get("raw_path")
    if not raw or REPLACEMENT_CHARACTER not in path:
        return path
    found = unquote_to_bytes(raw.partition(b"?")[0])
    return found.decode("utf-8", "surrogateescape") if found.decode("utf-8", "replace") == path else path


def asgi_header(scope: Any, name: str) -> str | None:  # noqa: ANN401 - a scope is any mapping
    """Find a header in an ASGI scope."""
    wanted = name.lower().encode("latin-1", "replace")
    found = [value for field, value in scope.get("headers", ()) if field == wanted]  # servers send names in lower case
    return b", ".join(found).decode("latin-1") if found else None


def wsgi_header(environ: Any, name: str) -> str | None:  # noqa: ANN401 - an environ is any mapping
    """Find a header in a WSGI environ."""
    field = name.upper().replace("-", "_")
    value = environ.get(field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}")
    return value or None


class EnvironHeaders(Mapping[str, str]):
    """The headers of a WSGI environ, by their names in lower case."""

    __slots__ = ("_environ",)

    def __init__(self, environ: Any) -> None:  # noqa: ANN401 - an environ is any mapping
        """Find the headers in this environ."""
        self._environ = environ

    def find(self, name: str) -> str | None:
        """Return the value of a header; None if it is missing."""
        return wsgi_header(self._environ, name)

    def __getitem__(self, name: str) -> str:
        """Return the value of a header."""
        value = self.find(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (field[5:].replace("_", "-").lower() for field in self._environ if field.startswith("HTTP_"))

    def __len__(self) -> int:
        """Return the number of headers."""
        return sum(1 for _ in self)
