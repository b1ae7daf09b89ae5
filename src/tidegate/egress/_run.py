"""Runs a gateway in a process of its own, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import TYPE_CHECKING, cast

from tidegate._policy.setting_values import listen_error
from tidegate._runtime.event_loop import freeze_heap, run_loop
from tidegate.egress._gateway import EgressGateway
from tidegate.egress._reload import EgressFile
from tidegate.egress._server import EgressServer
from tidegate.egress._settings import check_names
from tidegate.errors import ConfigError
from tidegate.outbound._providers.registry import Providers
from tidegate.outbound._quota.gate import AsyncGate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._policy.setting_values import ListenAddress
    from tidegate.egress._settings import EgressSettings
    from tidegate.outbound._providers.registry import Permissions

    Ready = Callable[[str, list[str]], object]

log: logging.Logger = logging.getLogger("tidegate.egress")


def run(settings: EgressSettings, ready: Ready | None = None, address: ListenAddress | None = None) -> None:
    """Serve until stopped; `ready` is called with the URL and the names of the providers.

    The file is read again when it changes; `address` replaces the one in it.
    """
    providers = Providers.load(
        settings.providers, settings.provider_dirs, permissions=cast("Permissions", settings.permissions)
    )
    if not len(providers):
        raise ConfigError("needs at least one provider: set providers or provider_dirs", file=settings.file)
    check_names(settings, providers)
    with listen(settings) as listener:
        run_loop(serve(settings, providers, listener, ready, address))


def listen(settings: EgressSettings) -> socket.socket:
    """Listen on the address of the settings."""
    address = settings.listen
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise listen_error(address, "listen", error) from None


async def serve(
    settings: EgressSettings,
    providers: Providers,
    listener: socket.socket,
    ready: Ready | None = None,
    address: ListenAddress | None = None,
) -> None:
    """Serve on a socket until SIGTERM or SIGINT; SIGHUP reads the file again."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    spending = None if settings.spending is None else settings.spending.open()
    gate = AsyncGate(providers, settings.store, bus=settings.bus, spending=spending)
    try:
        async with EgressGateway(gate, settings) as gateway, EgressServer(gateway, listener):
            file = EgressFile(gateway.rules, providers, gate.clock, gateway.use, address)
            if hasattr(signal, "SIGHUP"):
                loop.add_signal_handler(signal.SIGHUP, file.request_reload)
            watching = asyncio.create_task(file.run())
            freeze_heap()
            port = listener.getsockname()[1]
            if ready is not None:
                ready(f"http://{settings.listen._replace(port=port)}", [provider.name for provider in providers])
            await stop.wait()
            watching.cancel()
    finally:
        await gate.close()
        if spending is not None:
            spending.close()
