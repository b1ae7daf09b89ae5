"""The host of a URL, normalised so that hosts can be compared."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import idna

from tidegate._runtime.urls import redact
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAME_LENGTH: Final = 253  # characters of a DNS name
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMERIC_LABEL = re.compile(
    r"(?:0x[0-9a-f]*|[0-9]+)"
)  # a name whose last label is numeric is an IPv4 address, or invalid


def host_of(url: object) -> str:
    """Return the host of a URL: lower case, IDNA as ASCII, without user, port, brackets or final dot.

    IP addresses are in their usual form (`::1`). Raises ConfigError if there is no host, or an invalid one.
    """
    text = str(url).strip()
    try:
        parts = urlsplit(text)
    except ValueError:  # its message may contain the password
        raise _no_valid_host(text) from None
    if not parts.scheme or not parts.netloc:
        raise ConfigError(
            f"expected a URL with a host, such as https://example.com/path, not {redact(text)!r}", field="url"
        )
    normal = _normal(parts.netloc.rpartition("@")[2])
    if normal is None or "\\" in parts.netloc:  # URL parsers disagree about a backslash
        raise _no_valid_host(text)
    return normal


def _no_valid_host(text: str) -> ConfigError:
    return ConfigError(
        f"expected a URL with a valid host, such as https://example.com/path, not {redact(text)!r}", field="url"
    )


@lru_cache(maxsize=1024)
def _normal(host: str) -> str | None:
    """Remove port and brackets, and normalise the rest."""
    if not host.startswith("["):
        return normal_host(host.partition(":")[0])
    address, bracket, port = host[1:].partition("]")
    return normal_address(address) if bracket and (not port or port.startswith(":")) else None


def normal_host(host: str) -> str | None:
    """Normalise a name or an address; None if it is neither."""
    host = unquote(host)
    if ":" in host:
        return normal_address(host)
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True, transitional=False).decode("ascii")
        except idna.IDNAError:
            return None
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if NUMERIC_LABEL.fullmatch(labels[-1]):
        return normal_address(host)
    good = len(host) <= MAX_NAME_LENGTH and all(LABEL.fullmatch(label) for label in labels)
    return host if good else None


def normal_address(address: str) -> str | None:
    """Normalise an IP address, without a zone; an IPv4 address mapped into IPv6 becomes IPv4."""
    try:
        if ":" not in address:
            return str(IPv4Address(address))
        found = IPv6Address(address.partition("%")[0])
    except AddressValueError:
        return None
    return str(found.ipv4_mapped or found)


def is_loopback(host: str) -> bool:
    """Return whether a normalised host is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def suffixes(host: str) -> Iterator[str]:
    """Yield a host and its parent domains, longest first; an address has none."""
    yield host
    if ":" in host or NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        return
    while "." in host:
        host = host.partition(".")[2]
        yield host
