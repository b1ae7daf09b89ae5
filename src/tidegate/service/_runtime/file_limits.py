"""The limit on open files and sockets (file descriptors) of this process."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # pragma: no cover - Windows has no such limit
    resource = None  # type: ignore[assignment]  # see above


def raise_descriptor_limit() -> int | None:
    """Raise the soft limit to the hard limit if the system allows it. Returns the limit, or None if there is none."""
    if resource is None:  # pragma: no cover - Windows
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS may refuse its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return None if soft == resource.RLIM_INFINITY else soft
