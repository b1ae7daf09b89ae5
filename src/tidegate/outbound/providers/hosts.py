"""Which host a URL leads to, in the one spelling that hosts are compared in."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import idna

from tidegate.errors import ConfigError
from tidegate.urls import redact

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_NAME_LENGTH: Final = 253  # characters of a name in the DNS
LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
NUMERIC_LABEL = re.compile(
    r"(?:0x[0-9a-f]*|[0-9]+)"
)  # a last label like this makes the name an IPv4 address, or nothing


def host_of(url: object) -> str:
    """Give the host of a URL: lower case, IDNA as ASCII, without user, port, brackets or a final dot.

    IP addresses are written the usual way (`::1`). Raises ConfigError where there is no host, or none that could exist.
    """
    text = str(url).strip()
    try:
        parts = urlsplit(text)
    except ValueError:  # it may quote the password
        raise ConfigError(f"has no host that can be read: {redact(text)!r}", field="url") from None
    if not parts.scheme or not parts.netloc:
        raise ConfigError(
            f"has no host: {redact(text)!r} (expected something like https://example.com/path)", field="url"
        )
    normal = _normal(parts.netloc.rpartition("@")[2])
    if normal is None or "\\" in parts.netloc:  # a slash to some, part of the user to others
        raise ConfigError(f"has no host that could exist: {redact(text)!r}", field="url")
    return normal


@lru_cache(maxsize=1024)
def _normal(host: str) -> str | None:
    """Take the port and brackets off, and write what is left the one way."""
    if not host.startswith("["):
        return normal_host(host.partition(":")[0])
    address, bracket, port = host[1:].partition("]")
    return normal_address(address) if bracket and (not port or port.startswith(":")) else None


def normal_host(host: str) -> str | None:
    """Write a name or an address the one way; None if it can be neither."""
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
    """Write an IP address the usual way, without a zone; one of IPv4 inside IPv6 as IPv4."""
    try:
        if ":" not in address:
            return str(IPv4Address(address))
        found = IPv6Address(address.partition("%")[0])
    except AddressValueError:
        return None
    return str(found.ipv4_mapped or found)


def is_loopback(host: str) -> bool:
    """Tell whether a host that is written the one way is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def suffixes(host: str) -> Iterator[str]:
    """Give a host and the domains it lies in, longest first; an address lies in none but itself."""
    yield host
    if ":" in host or NUMERIC_LABEL.fullmatch(host.rpartition(".")[2]):
        return
    while "." in host:
        host = host.partition(".")[2]
        yield host
