"""A temporary proxy in front of an application, started with a configuration file from deploy/proxies."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import ClassVar

from tests.servers.process import Server, free_port, need, until

EXAMPLES = Path(__file__).parents[2] / "deploy" / "proxies"
ADDRESS = re.compile(r"127\.0\.0\.1(:|, port_value: )(\d+)")
OPEN = re.compile(r"^.*# fail open\n", re.MULTILINE)
CLOSED = re.compile(r"^( *)# (.*?) *# fail closed$", re.MULTILINE)
TOKEN = re.compile(r"^(\s*)(?:# )?(.*)the decision token", re.MULTILINE)
SHORT_WAIT = re.compile(r"\b(250ms|0\.25s)")
STARTING = 60.0  # seconds: a busy machine may need long to start a program of 100 MB
PINGS_FROM = "127.0.0.254"


def beside_python(name: str) -> str | None:
    """Return the path of a program: next to this Python (from a wheel), or on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    system = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    return str(beside) if beside.exists() else shutil.which(name, path=system)


class Proxy(Server):
    """One proxy.

    Of the example, only ports are others. `closed` takes the lines marked `fail closed` in place of those marked
    `fail open`, and `token` those about one, as a user would. A busy machine may answer later than a proxy should wait
    for, so a `patient` one waits for longer: what a test counts must not depend on that.
    """

    name: ClassVar[str]
    install: ClassVar[str]
    files: ClassVar[tuple[str, ...]]  # the proxy is started with the first
    on_allowed: ClassVar[bool] = True  # whether responses to allowed requests have rate limit headers
    # Status codes of a proxy that fails closed: when the store is unavailable, when the service hangs, when it is down.
    refusals: ClassVar[tuple[int, int, int]] = (503, 504, 502)

    def __init__(
        self, app: int, service: int, grpc: int = 0, *, closed: bool = False, patient: bool = True, token: str = ""
    ) -> None:
        """Write the files, for an application and a service at these ports."""
        super().__init__(need(self.find(), self.name, self.install))
        self.folder.chmod(0o755)  # some proxies change their user
        self.ports = {8000: self.port, 9000: app, 8080: service, 8081: grpc, 8002: free_port()}
        for file in self.files:
            text = self.fill((EXAMPLES / file).read_text(encoding="utf-8"))
            if closed:
                text = CLOSED.sub(r"\1\2", OPEN.sub("", text))
            if token:
                text = TOKEN.sub(rf"\1\2{token}", text)
            if patient:
                text = SHORT_WAIT.sub("20s", text)
            (self.folder / file).write_text(self.adapt(text), encoding="utf-8")

    @classmethod
    def find(cls) -> str | None:
        """Return the path of the program, or None."""
        return beside_python(cls.name)

    def fill(self, text: str) -> str:
        """Replace the ports."""
        return ADDRESS.sub(lambda found: f"127.0.0.1{found[1]}{self.ports[int(found[2])]}", text)

    def adapt(self, text: str) -> str:
        """Change a file as tests need it."""
        return text

    def environment(self) -> dict[str, str]:
        """Return environment variables that keep the program within its folder."""
        return {}

    def launch(self, command: list[str]) -> None:
        """Run the program in its folder and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            until(self.is_ready, f"the start of {self.name}", STARTING)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{(self.folder / 'log').read_text(errors='replace')[-3000:]}") from None

    def is_ready(self) -> bool:
        """Return whether it has read its file: some proxies answer 404 before."""
        if self.process is not None and self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30, source_address=(PINGS_FROM, 0))
        try:
            connection.request("GET", "/")
            response = connection.getresponse()
            return (
                response.status != http.client.NOT_FOUND
                or response.getheader("Content-Type") == "application/problem+json"
            )
        except http.client.HTTPException:
            return False
        finally:
            connection.close()
