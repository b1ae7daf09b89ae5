"""Reads what a request asked for from the words of a log: the method, and the path as a server decodes it."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

from tidegate.plan._logs.batch import LogSubject

METHOD = re.compile(r"[A-Za-z][A-Za-z_-]{0,31}")
MAX_TARGET: Final = 65_536


def read_request(text: str) -> LogSubject:
    """Read a request line such as `GET /items?id=1 HTTP/1.1`; raises ValueError."""
    method, _, rest = text.partition(" ")
    target = rest.rpartition(" ")[0] if rest.rpartition(" ")[2].startswith("HTTP/") else rest
    if not METHOD.fullmatch(method) or not target:
        raise ValueError(f"expected a request such as 'GET /items HTTP/1.1', not {text[:60]!r}")
    return LogSubject(method, read_path(target))


def read_path(target: str) -> str:
    """Return the decoded path of a target, without its query: bytes that are not UTF-8 become lone surrogates."""
    if len(target) > MAX_TARGET:
        raise ValueError(f"a target of {len(target)} characters is too long")
    if not target.startswith("/"):  # an absolute target, as proxies receive it
        _, scheme, rest = target.partition("://")
        target = f"/{rest.partition('/')[2]}" if scheme else target
    path = target.partition("?")[0].partition("#")[0]
    if "%" not in path:
        return path
    return unquote_to_bytes(path.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")
