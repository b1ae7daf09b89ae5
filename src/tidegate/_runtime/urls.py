"""Parse configured URLs, and show URLs without their secrets.

`split_url` and `server_url` raise ConfigError for every invalid URL. Their messages never repeat the messages of the
standard library, because these may quote a password.

This package uses `redact` for every URL in an error, a log line, a table or a `repr`.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tidegate._runtime.suggestions import did_you_mean, hint
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from urllib.parse import SplitResult

HIDDEN_TEXT: Final = "…"
MAX_SHOWN_LENGTH: Final = 80  # characters of a URL in a message
MAX_URL_LENGTH: Final = 8192  # characters
MAX_PORT: Final = 65_535
WEB_SCHEMES: Final = ("http", "https")
CHARACTERS = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*")
AUTHORITY = re.compile(r"[^/?#]*")
EMBEDDED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
HOST = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]*))?", re.ASCII)

Host = tuple[str, int | None]


def redact(url: object, *, max_length: int = MAX_SHOWN_LENGTH) -> str:
    """Return a URL without its user, password, query and fragment, shortened to `max_length` characters.

    A malformed URL may contain its password in any component, so everything before the last '@' is removed.
    """
    scheme, separator, rest = str(url).partition("://")
    if not separator:
        scheme, rest = "", scheme
    rest = _without_user(scheme.lower(), rest, known=bool(separator))
    place, mark, _ = rest.partition("?")
    if not mark:
        place, mark, _ = rest.partition("#")
    shown = f"{scheme}{separator}{_without_words_as_port(place)}{mark + HIDDEN_TEXT if mark else ''}"
    return shown if len(shown) <= max_length else f"{shown[:max_length]}{HIDDEN_TEXT}"


def redact_text(text: object) -> str:
    """Redact every URL in a string, such as the message of a driver."""
    return EMBEDDED.sub(lambda found: redact(found.group()), str(text))


def _without_user(scheme: str, rest: str, *, known: bool) -> str:
    """Remove what is, or may be, a user and a password."""
    if "@" not in rest:
        return rest
    match = AUTHORITY.match(rest)
    authority = match.group() if match else ""
    if known and not authority:  # a path: file names may have an '@'
        return rest
    if scheme in WEB_SCHEMES and "@" not in authority and _is_host(authority):
        return rest  # the path or the query of a web page may have an '@'
    return f"{HIDDEN_TEXT}@{rest.rpartition('@')[2]}"


def _without_words_as_port(place: str) -> str:
    """Remove a port that is not a number: it may be a password whose host is missing."""
    user, at, hosts = place.partition("/")[0].rpartition("@")
    if all(_is_host(host) for host in hosts.split(",")):
        return place
    return f"{user}{at}{hosts.partition(':')[0]}:{HIDDEN_TEXT}"


def _is_host(text: str) -> bool:
    return HOST.fullmatch(text) is not None


def split_url(url: object, field: str) -> SplitResult:
    """Split a URL with a scheme and well-formed hosts and ports; `field` is its name in errors."""
    if isinstance(url, str) and (len(url) > MAX_URL_LENGTH or not CHARACTERS.fullmatch(url)):
        raise _malformed(url, field, f"a URL must have at most {MAX_URL_LENGTH} characters and no control characters")
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
    except ValueError:  # it may quote the password
        advice = "check its host, the brackets of an IPv6 address and special characters"
        raise _malformed(url, field, advice) from None
    if parts is None or not parts.scheme:
        raise ConfigError(f"expected a URL such as scheme://host:port, not {redact(url)!r}", field=field)
    split_hosts(url, parts.netloc, field)
    return parts


def server_url(url: object, field: str) -> SplitResult:
    """Split the URL of a server, which may have a password; only a URL without a host may have an '@' in its path."""
    parts = split_url(url, field)
    if parts.netloc and "@" in parts.path + parts.query + parts.fragment:
        raise _malformed(url, field, "write special characters of a user, password or option as %xx ('@' is %40)")
    return parts


def split_hosts(url: object, netloc: str, field: str) -> list[Host]:
    """Return the comma-separated hosts of a URL and their ports (None: not given)."""
    found = []
    for text in netloc.rpartition("@")[2].split(","):
        match = HOST.fullmatch(text)
        port = match["port"] if match else None
        if match is None or (port and not (len(port) <= len(str(MAX_PORT)) and 1 <= int(port) <= MAX_PORT)):
            raise _malformed(url, field, f"a port is a number from 1 to {MAX_PORT}, and IPv6 addresses are in brackets")
        host = match["host"]
        if host.startswith("["):
            host = host[1:-1]
            _check_address(url, host, field)
        found.append((host, int(port) if port else None))
    return found


def _check_address(url: object, host: str, field: str) -> None:
    from ipaddress import IPv6Address  # noqa: PLC0415 - few URLs need it

    try:
        IPv6Address(host.partition("%")[0])
    except ValueError:
        raise _malformed(url, field, "its IPv6 address is malformed") from None


def _malformed(url: object, field: str, advice: str) -> ConfigError:
    return ConfigError(f"malformed URL {redact(url)!r}: {advice}", field=field)


def unknown_option(name: str, known: Sequence[str], driver: Sequence[str] = ()) -> str:
    """Return the message for an option that does not exist, with the option that was probably meant.

    `driver` are options that the driver of a store accepts; the message suggests them but does not list them.
    """
    advice = did_you_mean(name, (*known, *driver)) or f"expected one of {', '.join(known)}"
    return f"unknown option {name!r}: {advice}"


def find_opener(scheme: str, built_in: Mapping[str, str], group: str, field: str) -> Any:  # noqa: ANN401 - a function of the module that the scheme names
    """Import the function that opens URLs of a scheme: a built-in one, or one that an installed package provides.

    Both are written as `module:function`. `group` is the entry point group of packages, which cannot replace built-in
    functions. `field` is the setting that contains the URL.
    """
    module, _, function = find_scheme(scheme, built_in, group, field).partition(":")
    return getattr(import_module(module), function)


def find_scheme(scheme: str, built_in: Mapping[str, str], group: str, field: str) -> str:
    """Return where the function that opens URLs of a scheme is: `module:function`. Imports nothing."""
    openers = built_in
    if scheme not in built_in:
        from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import

        openers = {**{point.name: point.value for point in entry_points(group=group)}, **built_in}
    if scheme not in openers:
        known, near = ", ".join(f"{name}://" for name in openers), hint(scheme, openers, suffix="://")
        raise ConfigError(f"unknown scheme {scheme}://: expected one of {known}{near}", field=field)
    return openers[scheme]
