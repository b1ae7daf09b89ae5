"""Serves the files of the dashboard. They contain no data, so they need no token; /v1/overview does."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tidegate.service._api.problems import HTTPReply

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

CONTENT_TYPES: Final = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
INDEX_PAGE: Final = "index.html"
# Only files of this service are loaded, nothing inline is executed, and no string can become markup: a hostile key
# stays text.
CONTENT_SECURITY_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
SECURITY_HEADERS: Final = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


def read_files(*, token: bool) -> dict[str, HTTPReply]:
    """Return all files by URL path; `access.json` contains whether the page needs a `token`."""
    found = {"/dashboard/access.json": HTTPReply(200, json.dumps({"token": token}).encode(), headers=SECURITY_HEADERS)}
    for file in files(__package__).joinpath("static").iterdir():
        content_type = CONTENT_TYPES.get(suffix(file))
        if content_type is not None:
            path = "/" if file.name == INDEX_PAGE else f"/dashboard/{file.name}"
            found[path] = HTTPReply(200, file.read_bytes(), content_type, SECURITY_HEADERS)
    return found


def suffix(file: Traversable) -> str:
    """Return the extension of a file name, with the dot."""
    return file.name[file.name.rfind(".") :]
