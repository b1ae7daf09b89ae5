"""The limit of open files and sockets of this process."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # pragma: no cover - Windows has no such limit
    resource = None  # type: ignore[assignment]  # as said


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit to the hard one, as far as the system allows; gives the limit (None: there is none)."""
    if resource is None:  # pragma: no cover - Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses what its hard limit seems to allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return None if soft == resource.RLIM_INFINITY else soft
