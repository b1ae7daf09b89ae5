"""One connection on the RESP port, with the bounds on size and time that HTTP connections have.

- Common commands on a store in memory are answered before `data_received` returns. For all others, one task at a time
  runs the complete commands that have arrived; what arrives meanwhile is the next batch.
- A command has to be complete within `read_timeout`; an idle connection is closed after `idle_timeout`.
- A client that does not read its replies is disconnected after `read_timeout`; until then, nothing more is read.
- Input that is not a command ends the connection: the commands before it are answered, then the error is sent.
- If the client disconnects, its commands are cancelled, so that they are not charged without a reply.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tidegate.service._decisions.policy_limiters import MAX_BATCH
from tidegate.service._http.connections import NEVER_TICKS
from tidegate.service._resp.parser import MAX_COMMAND, HttpInputError, parse
from tidegate.service._resp.replies import write_error
from tidegate.service._resp.session import Session

if TYPE_CHECKING:
    from tidegate.service._http.app import App
    from tidegate.service._http.connections import Connections
    from tidegate.service._resp.commands import Commands
    from tidegate.service._resp.parser import Command

log: logging.Logger = logging.getLogger("tidegate.service")

MAX_UNPARSED: Final = 4 * MAX_COMMAND  # bytes that are read ahead while commands run
MIN_SENT: Final = 16 * 1024  # bytes of its replies that a client has to read within `read_timeout`


class RespConnection(asyncio.Protocol):
    """One connection of a client."""

    transport: asyncio.Transport

    def __init__(self, app: App, commands: Commands, connections: Connections, number: int) -> None:
        """Serve this app, within the bounds of these connections."""
        self.ticks_left: int = connections.read_ticks
        self._app = app
        self._commands = commands
        self._connections = connections
        self._idle_ticks = connections.idle_ticks
        self._session = Session(app, number)
        self._unparsed = b""
        self._task: asyncio.Task[None] | None = None
        self._error: str | None = None  # sent after the commands that are running
        self._reading_paused = False
        self._writing_paused = False
        self._unsent = 0  # bytes that the client had not read at the last check
        self._stopping = False  # the service stops: close after the commands that are running
        self._finished = False  # the last reply was sent: further input is discarded

    # ---- the transport -----------------------------------------------------------------------------------------------

    def begin_handshake(self, transport: asyncio.Transport) -> None:
        """Count the connection before its TLS handshake, which has to be complete within `read_timeout`."""
        self.transport = transport
        self._connections.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        self.transport = transport  # type: ignore[assignment]  # a stream
        peer = transport.get_extra_info("peername")
        self._session.address = peer[0] if isinstance(peer, tuple) else ""
        if self._finished:  # it was closed during its handshake
            self.transport.abort()
        else:
            self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio calls it
        """Cancel the commands of a client that is gone."""
        self._finished = True
        self._unparsed = b""
        self._connections.remove(self)
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> None:
        """Cancel the commands of a client that has closed its side; then the transport closes."""
        self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        """Answer common commands at once; keep the rest for the next batch."""
        if self._finished:
            return
        if not self._unparsed and self._task is None and not self._writing_paused and self._session.may_decide_now:
            replies = self._commands.decide_usual(data)
            if replies is not None:
                self._renew_wait()
                self.transport.write(replies)
                return
        self._unparsed += data
        if self._task is None:
            self._parse()
        self._limit_input()

    def pause_writing(self) -> None:
        """Run no further commands until the client has read its replies."""
        self._writing_paused = True
        self._limit_input()
        self._limit_wait()

    def resume_writing(self) -> None:
        """Continue."""
        self._writing_paused = False
        self._unsent = 0
        self.ticks_left = self._connections.read_ticks  # nothing was read from the client meanwhile
        self._limit_wait()
        if self._task is None and not self._finished:
            self._parse()
        self._limit_input()

    def _limit_input(self) -> None:
        """Stop reading while too much input waits, or while the client does not read; continue afterwards."""
        pause = not self._finished and (self._writing_paused or len(self._unparsed) > MAX_UNPARSED)
        if pause == self._reading_paused or self.transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        """Start to run the complete commands in the input, if there are any; refuse invalid input."""
        if self._writing_paused:
            return
        try:
            commands, consumed, error = parse(self._unparsed, MAX_BATCH)
        except HttpInputError:
            self._refuse_http()
            return
        self._unparsed = self._unparsed[consumed:]
        if error is not None:
            self._error = error
            self._unparsed = b""
        if commands and not self._throttle_now(commands):
            self._connections.begin_request(self)
            self._task = asyncio.get_running_loop().create_task(self._run(commands))
        elif error is not None:
            self._refuse(error)
        self._limit_wait()

    def _throttle_now(self, commands: list[Command]) -> bool:
        """Answer CL.THROTTLE commands at once, if possible; further complete commands wait for a task."""
        if len(commands) == MAX_BATCH or not self._session.may_decide_now:
            return False
        replies = self._commands.throttle_now(commands)
        if replies is not None:
            self._renew_wait()
            self.transport.write(replies.encode())
        return replies is not None

    async def _run(self, commands: list[Command]) -> None:
        """Run commands and send their replies, then continue with the input that has arrived meanwhile."""
        try:
            await self._commands.run(self._session, commands, self._write)
        except asyncio.CancelledError:
            if self._finished:
                return  # the client is gone: the store refunds what was charged
            self.drop()
            raise
        except Exception:
            log.exception("the commands of a connection failed")
            self.drop()
            return
        finally:
            self._task = None
        if not self._finished:
            self._continue()

    def _write(self, replies: str) -> None:
        """Send the replies of some commands."""
        if not self._finished:
            self.transport.write(replies.encode())

    def _continue(self) -> None:
        """Go on after the replies, or close if they were the last ones."""
        self._connections.begin_wait(self)
        if self._session.closing or (self._stopping and self._error is None):
            self._close()
        elif self._error is not None:
            self._refuse(self._error)
        else:
            self._parse()
            self._limit_input()

    # ---- closing -----------------------------------------------------------------------------------------------------

    def _refuse(self, error: str) -> None:
        """Send an error about invalid input as the last reply; the client has `read_timeout` to read it."""
        self._app.decider.stats.errors.add("bad-request")
        self.transport.write(write_error("ERR", f"Protocol error: {error}").encode())
        self._finished = True
        self._limit_input()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has reset the connection
                self.transport.write_eof()
            self._limit_wait()
        else:
            self.transport.close()

    def _refuse_http(self) -> None:
        """Close at once: a page in a browser may have sent this."""
        self._commands.report_http()
        self.drop()

    def _close(self) -> None:
        """Close as soon as the client has read what was sent."""
        self._finished = True
        self._unparsed = b""
        self.transport.close()
        self._limit_wait()

    def drop(self) -> None:
        """Close at once."""
        self._finished = True
        self.transport.abort()

    def shutdown(self) -> None:
        """Close after the commands that are running, because the service stops."""
        self._stopping = True
        if self._task is None and not self._finished:
            self._close()

    # ---- time --------------------------------------------------------------------------------------------------------

    def _limit_wait(self) -> None:
        """Bound the time for the next action of the client."""
        if self._finished or self._writing_paused:
            self.ticks_left = min(self.ticks_left, self._connections.read_ticks)
        elif self._task is not None:
            self.ticks_left = NEVER_TICKS
        elif not self._unparsed:
            self.ticks_left = self._connections.idle_ticks
        else:  # since the beginning of the command
            self.ticks_left = min(self.ticks_left, self._connections.read_ticks)

    def _renew_wait(self) -> None:
        """Record that commands were answered at once; once in a tick is enough."""
        if self.ticks_left != self._idle_ticks:
            self.ticks_left = self._idle_ticks
            self._connections.renew_wait(self)

    def expire(self) -> None:
        """Close the connection of a client that took too long."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and (not self._unsent or unsent <= self._unsent - MIN_SENT):
            self._unsent = unsent
            self.ticks_left = self._connections.read_ticks  # slow, but still reading
        elif unsent or self._finished:
            self.drop()
        elif self._unparsed:
            self._refuse(f"the command was not received within {self._connections.read_timeout:g} s")
        else:
            self._close()
