"""Finds the Denied in the errors of an SDK, which wraps the errors of its HTTP client in its own."""

from __future__ import annotations

from typing import Final

from tidegate.errors import Denied

MAX_LINKS: Final = 100  # errors of a chain that are looked at


def find_denied(error: BaseException) -> Denied | None:
    """Return the Denied that caused an error; None: the error has another cause.

    Looks at the error itself, at its causes, and at the errors of an exception group. It is for SDKs that report each
    error of their HTTP client as a connection error of their own.
    """
    waiting: list[BaseException] = [error]
    for _ in range(MAX_LINKS):
        if not waiting:
            break
        link = waiting.pop(0)
        if isinstance(link, Denied):
            return link
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
        cause = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if cause is not None:
            waiting.append(cause)
    return None
