"""Detects requests that a page of another site sends through a browser, and Hosts that name this machine."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Final

SAME_SITE: Final = ("same-origin", "none")  # a page of this server, or a URL that a user has typed


def is_cross_site(site: str | None, origin: str | None, host: str | None) -> bool:
    """Return whether a page of another site sends the request: by its Sec-Fetch-Site, or its Origin and Host."""
    if site is not None:
        return site not in SAME_SITE
    return origin is not None and origin.partition("://")[2] != host


def is_local_host(host: str) -> bool:
    """Return whether a Host, with or without a port, is localhost or a loopback address."""
    name = host.lower()
    if not name.endswith("]"):
        before, colon, port = name.rpartition(":")
        name = before if colon and port.isdigit() else name
    name = name.strip("[]")
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
