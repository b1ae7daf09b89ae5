"""A temporary HAProxy."""

from __future__ import annotations

from tests.servers.proxy import Proxy


class Haproxy(Proxy):
    """One HAProxy."""

    name = "haproxy"
    install = "apt-get install haproxy"
    files = ("haproxy.cfg", "haproxy.lua")
    refusals = (503, 503, 503)

    def command(self) -> list[str]:
        """Return the command that starts it."""
        return [self.program, "-db", "-f", "haproxy.cfg"]
