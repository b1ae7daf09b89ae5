"""How commands call a running service: lines of JSON over a loopback connection, with a token.

The service writes `control.json` (its port, process id, token, and the URL of its HTTP API) into its data folder,
readable by its owner only: any process that can read this file can control the service.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final, Self

from tidegate._runtime.files import make_private_folder, replace_private
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.outbound._control_file import CONTROL_FILE, no_service_error, read_control_file
from tidegate.outbound.sources._source import parse_source

if TYPE_CHECKING:
    from pathlib import Path

    from tidegate.outbound.sources._runner import SourceRunner

MAX_MESSAGE_BYTES: Final = 2**20
ANSWER_TIMEOUT: Final = 10.0  # seconds


class ControlServer:
    """The server in the service. An async context manager."""

    def __init__(self, service: SourceRunner, url: str | None = None) -> None:
        """Serve commands for this service; `url` is that of its HTTP API, for commands that call it."""
        self._service = service
        self._url = url
        self._path = service.data / CONTROL_FILE
        self._added_folder = service.data / "sources"
        self._token = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        """Listen, and write the control file."""
        if self._path.exists() and is_running(self._path):
            raise ConfigError(f"another service is using this folder, see {self._path}", file=str(self._service.data))
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=MAX_MESSAGE_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        address = {"port": port, "pid": os.getpid(), "token": self._token, "url": self._url}
        replace_private(self._path, json.dumps(address))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), ANSWER_TIMEOUT)
            writer.write(json.dumps(self._respond(line)).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, RecursionError, TimeoutError):
            pass  # a malformed or vanished client gets no response
        finally:
            writer.close()

    def _respond(self, line: bytes) -> dict[str, Any]:
        command = json.loads(line)
        token = command.get("token") if isinstance(command, dict) else None
        if not isinstance(token, str) or not hmac.compare_digest(token.encode(), self._token.encode()):
            return {"error": "wrong token"}
        try:
            return self._execute(command)
        except ConfigError as error:
            return {"error": str(error)}

    def _execute(self, command: dict[str, Any]) -> dict[str, Any]:
        verb = command.get("verb")
        if verb == "add":
            text = str(command.get("text", ""))
            source = parse_source(text, str(command.get("file")))
            self._keep(source.name, text)
            reply = self._service.add(source)
            provider = self._service.gate.providers.match(source.url)
            return {"added": source.name, "limited": provider is not None, "says": reply,
                    "provider": provider.name if provider else None}  # fmt: skip
        if verb == "remove":
            name = str(command.get("name", ""))
            reply = self._service.remove(name)
            (self._added_folder / f"{name}.yaml").unlink(missing_ok=True)
            return {"removed": name, "says": reply}
        if verb == "run":
            return {"says": self._service.run_now(str(command.get("name", "")))}
        if verb == "sources":
            return {"sources": self._service.describe(), "metrics": self._service.gate.metrics(),
                    "recovered": self._service.recovered, "problems": self._service.problems}  # fmt: skip
        if verb == "stop":
            self._service.stop()
            return {"stopping": True}
        return {"error": f"unknown verb {verb!r}"}

    def _keep(self, name: str, text: str) -> None:
        """Save an added source for restarts, in a private file: its headers may contain secrets."""
        path = self._added_folder / f"{name}.yaml"
        try:
            make_private_folder(self._added_folder)
            replace_private(path, text)
        except OSError as error:
            raise ConfigError(
                f"the source is not added: it cannot be stored: {error.strerror or error}", file=str(path)
            ) from None


def send_command(data: Path, **command: object) -> dict[str, Any]:
    """Send a command to the service that uses a data folder."""
    address = read_control_file(data)
    try:
        with socket.create_connection(("127.0.0.1", address["port"]), timeout=ANSWER_TIMEOUT) as connection:
            connection.sendall(json.dumps({**command, "token": address["token"]}).encode() + b"\n")
            with connection.makefile("rb") as response:
                reply: dict[str, Any] = json.loads(response.readline())
    except (OSError, ValueError, KeyError) as error:
        raise no_service_error(data, error) from None
    if "error" in reply:
        raise ConfigError(reply["error"])
    return reply


def is_running(path: Path) -> bool:
    """Return whether a service uses the folder of a control file."""
    try:
        send_command(path.parent, verb="sources")
    except StoreUnavailable:
        return False
    except ConfigError:
        return True
    return True
