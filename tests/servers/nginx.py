"""A temporary nginx."""

from __future__ import annotations

from tests.servers.proxy import Proxy

# Like the nginx.conf of the system around files in conf.d; nginx writes only to the folder.
TEMPLATE = """daemon off;
pid nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxied;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
{text}}}
"""


class Nginx(Proxy):
    """One nginx."""

    name = "nginx"
    install = "apt-get install nginx"
    files = ("nginx.conf",)
    refusals = (500, 500, 500)

    def adapt(self, text: str) -> str:
        """Insert the example into a complete configuration."""
        return TEMPLATE.format(text=text)

    def command(self) -> list[str]:
        """Return the command that starts it."""
        folder = self.folder
        return [self.program, "-p", str(folder), "-e", str(folder / "log"), "-c", str(folder / "nginx.conf")]
