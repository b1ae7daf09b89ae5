"""Follows a tutorial literally, as a reader does: saves its files, runs its commands, and compares what they print.

- A block with a title is saved under this name.
- `sh` blocks run one after another; a block with "leave it running" runs in the background until the page ends, once
  its port accepts connections. Exported variables apply to the following blocks.
- A `text` block is what the commands before it print; … stands for any characters.
- The install block does not run: the packages are in the environment of the tests.

Ports of the page are replaced by free ones, so that tutorials can run at the same time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tests.docs.blocks import blocks_of
from tests.servers.process import free_port, until

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tests.docs.blocks import Block

PORT = re.compile(r"(?<![\d.])(?:4222|8000|8080|8090|9000)(?!\d)")
DEFAULT_PORT = "8080"  # of the service, if the page names no other
STAYS = "leave it running"
COMMAND_TIMEOUT = 90  # seconds
STARTING = 60  # seconds
ENDING = 20  # seconds


class Tutorial:
    """A tutorial that is followed in a folder. A context manager: it stops what is left running."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page, self.folder = page, folder
        self.blocks = blocks_to_follow(page)
        self.ports: dict[str, str] = {}
        self.exports: list[str] = []
        self.running: list[subprocess.Popen[bytes]] = []
        self.output = ""
        scripts = Path(sys.executable).parent
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("TIDEGATE_", "RATE_LIMIT"))
        }
        self.env |= {"PATH": f"{scripts}{os.pathsep}{self.env['PATH']}", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        self.env |= {"TIDEGATE_LISTEN": f"127.0.0.1:{self.port(DEFAULT_PORT)}"}
        self.env |= {"TIDEGATE_URL": f"http://127.0.0.1:{self.port(DEFAULT_PORT)}", "COLUMNS": "120"}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(ENDING)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def port(self, documented: str) -> str:
        """Return the free port that replaces a port of the page."""
        if documented not in self.ports:
            self.ports[documented] = str(free_port())
        return self.ports[documented]

    def replace_ports(self, text: str) -> str:
        """Replace the ports in a text."""
        return PORT.sub(lambda found: self.port(found[0]), text)

    def follow(self) -> int:
        """Follow the page, and return how many outputs were compared."""
        compared = 0
        for block in self.blocks:
            if block.title:
                self.save(block)
            elif block.label == "sh":
                self.run(block)
            elif block.label == "text":
                self.compare(block)
                compared += 1
        return compared

    def save(self, block: Block) -> None:
        """Save a file."""
        assert block.title
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.replace_ports(block.code) + "\n", encoding="utf-8")

    def run(self, block: Block) -> None:
        """Run the commands of a block."""
        code = self.replace_ports(block.code)
        if "pip install" in code:
            return
        if STAYS in code:
            self.start(block, code)
            return
        self.exports += [line for line in code.splitlines() if line.startswith("export ")]
        script = "\n".join([*self.exports, code])
        command = ["bash", "-c", script]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # in one terminal
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        self.output = done.stdout

    def start(self, block: Block, code: str) -> None:
        """Start a program that stays, and wait for its port."""
        port = self.port_of(block.code)
        until(lambda: not answers(port), f"an earlier program to leave port {port}", ENDING)
        script = "\n".join([*self.exports, f"exec {code}"])
        log = self.folder / f"program-{len(self.running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running.append(process)

        def accepts() -> bool:
            assert process.poll() is None, f"{self.page.name}:{block.line}: it ended: {log.read_text()}"
            return answers(port)

        until(accepts, f"{self.page.name}:{block.line} to accept connections", STARTING)

    def port_of(self, code: str) -> str:
        """Return the port of a program: the last one in its command, the first one in its file, or the default."""
        files = "".join(block.code for block in self.blocks if block.title and block.title in code)
        documented = PORT.findall(code)[-1:] or PORT.findall(files)[:1] or [DEFAULT_PORT]
        return self.port(documented[0])

    def compare(self, block: Block) -> None:
        """Compare what the last commands printed with the page."""
        wanted = [line for line in self.replace_ports(block.code).splitlines() if line.strip()]
        printed = [line for line in self.output.splitlines() if line.strip()]
        place = f"{self.page.name}:{block.line}: it printed\n{self.output}"
        if wanted[-1].strip() == "…":
            wanted.pop()
            printed = printed[: len(wanted)]
        assert len(wanted) == len(printed), place
        for line, found in zip(wanted, printed, strict=True):
            pattern = r"\s+".join(re.escape(word).replace("…", ".*") for word in line.split())
            assert re.fullmatch(pattern, " ".join(found.split())), f"{place}\nwhich does not match {line!r}"


def blocks_to_follow(page: Path) -> list[Block]:
    """Return the blocks of the section "Tutorial" of a page; without one, the whole page is a tutorial."""
    headings = [
        (number, line)
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
        if line.startswith("## ")
    ]
    start = next((number for number, line in headings if line.startswith("## Tutorial")), 0)
    end = next((number for number, _ in headings if number > start > 0), None)
    return [block for block in blocks_of(page) if start < block.line and (end is None or block.line < end)]


def answers(port: str) -> bool:
    """Return whether a port of this machine accepts connections."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
        return True
    return False
