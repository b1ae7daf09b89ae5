"""The files of the page. There is no data in them, so they need no token; what they show is asked for with one."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from tidegate.service.http.problems import HTTPReply

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

CONTENT_TYPES: Final = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
INDEX_PAGE: Final = "index.html"
# Only what we serve ourselves is loaded, nothing is inline, and no text can become markup: a hostile key stays a text.
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
    """Read every file once, by the path it is served at; `access.json` tells the page whether it needs a `token`."""
    found = {"/dashboard/access.json": HTTPReply(200, json.dumps({"token": token}).encode(), headers=SECURITY_HEADERS)}
    for file in files(__package__).joinpath("static").iterdir():
        kind = CONTENT_TYPES.get(suffix(file))
        if kind is not None:
            path = "/" if file.name == INDEX_PAGE else f"/dashboard/{file.name}"
            found[path] = HTTPReply(200, file.read_bytes(), kind, SECURITY_HEADERS)
    return found


def suffix(file: Traversable) -> str:
    """Tell what a file's name ends with, the dot included."""
    return file.name[file.name.rfind(".") :]
