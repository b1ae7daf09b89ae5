"""Tells systemd that the service is ready, alive or stopping (`Type=notify`, `WatchdogSec=`)."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Final

from tidegate._runtime.clock import TaskSignal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidegate._runtime.clock import Clock

log: logging.Logger = logging.getLogger("tidegate.service")

PINGS_PER_TIMEOUT: Final = 3  # systemd restarts a service that has sent no ping within its timeout


class SystemdNotifier:
    """Sends messages to the socket that systemd names; does nothing if systemd has not started the service."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Read the address of the socket and the timeout of the watchdog."""
        variables = os.environ if environment is None else environment
        self._address = variables.get("NOTIFY_SOCKET", "")
        timeout = variables.get("WATCHDOG_USEC", "")
        self._timeout = int(timeout) if timeout.isdigit() else 0

    def notify(self, state: str) -> None:
        """Send a message such as READY=1; a socket that does not accept it is logged, and not used again."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(0)  # the event loop never waits for systemd
                sender.sendto(state.encode(), address)
        except BlockingIOError:
            return  # the next ping follows soon
        except OSError as error:
            log.warning("cannot notify systemd at %s: %s", self._address, error.strerror)
            self._address = ""

    async def run(self, clock: Clock) -> None:
        """Send pings to the watchdog, as long as the event loop runs."""
        while self._address and self._timeout:
            self.notify("WATCHDOG=1")
            await clock.wait_async(TaskSignal(), clock.steady() + self._timeout // PINGS_PER_TIMEOUT)
