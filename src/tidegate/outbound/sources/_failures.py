"""Says what failed in a fetch (DNS, TLS, a refused connection) without quoting the URL, which may contain secrets."""

from __future__ import annotations

import socket
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def explain(error: BaseException) -> str:
    """Describe an error by its cause: the libraries in between wrap it several times."""
    for cause in causes(error):
        if isinstance(cause, socket.gaierror):
            return f"DNS: the host cannot be resolved ({cause.strerror or cause})"
        if isinstance(cause, ssl.SSLError):
            said = (getattr(cause, name, None) for name in ("verify_message", "reason", "strerror"))
            return f"TLS: {next(filter(None, said), 'the handshake failed')}"
        if isinstance(cause, ConnectionRefusedError):
            return "refused: the host refused the connection"
        if isinstance(cause, ConnectionError):
            return "broken: the connection was closed"
    systems = (cause.strerror for cause in causes(error) if isinstance(cause, OSError) and cause.strerror)
    return next(systems, type(error).__name__)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and the members of groups; each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [more for more in (each.__cause__, each.__context__) if more is not None]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
