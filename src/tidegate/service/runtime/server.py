"""Runs the service: HTTP by uvicorn's httptools protocol, gRPC in the same event loop, several processes if asked for.

The front was chosen by measurement (bench/service.py): around our decision, httptools on uvloop answers more requests
than granian's ASGI, and its protocol can be extended in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.errors import ConfigError
from tidegate.observe.logs import DecisionLog
from tidegate.service.config.reload import Reloader
from tidegate.service.config.settings import ListenAddress, Settings
from tidegate.service.decisions.decider import Decider
from tidegate.service.http import App
from tidegate.service.http.connections import (
    BACKLOG,
    Connections,
    connections_for_requests,
    fit_connections,
)
from tidegate.service.runtime.components import Components
from tidegate.service.runtime.file_limits import raise_descriptor_limit
from tidegate.service.runtime.logs import count_denials
from tidegate.stores.lease import LeasedStore
from tidegate.stores.outage import open_guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tidegate.clock import Clock
    from tidegate.service.http.server import HttpServer
    from tidegate.service.runtime.telemetry import Telemetry
    from tidegate.stores import Store

    Ready = Callable[[Settings, Components | None], object]

log = logging.getLogger("tidegate.service")

LAST_ANSWERS_TIMEOUT: Final = 1.0  # seconds for those that were woken because the service stops


class ServiceProcess:
    """One process of the service. `run` until `stop`."""

    def __init__(self, settings: Settings, listener: socket.socket, *, clock: Clock | None = None) -> None:
        """Open the store and prepare everything that answers; HTTP is served on the listening socket."""
        self._listener = listener
        self._connections = bounded_connections(settings, raise_descriptor_limit())
        self.settings = settings
        self.store = open_shared(settings, clock)
        self.denials = DecisionLog("tidegate.service")
        self.decider = Decider(
            settings.policies,
            self.store,
            secrets=settings.reservation_secret,
            max_wait=settings.max_wait,
            max_priority=settings.max_priority,
            on_denial=(self.denials,),
        )
        for_requests = connections_for_requests(self._connections.max_connections)
        self.app = App(self.decider, replace(settings, max_concurrency=min(settings.max_concurrency, for_requests)))
        self.parts = Components(settings, self.app)
        self.telemetry = open_telemetry(self.app) if settings.telemetry else None
        self.reloader = Reloader(settings, self.app, self.store.clock)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Finish what is under way, and end."""
        self._stop.set()

    async def run(self, ready: Ready | None = None) -> None:
        """Serve until stopped; `ready` is called once questions can be asked."""
        try:
            async with self.parts:
                self.app.overview.start()
                await self._serve(ready)
        finally:
            self.denials.flush()
            if self.telemetry is not None:
                await asyncio.to_thread(self.telemetry.flush)
            self.app.overview.close()
            await self._close_decider()

    async def _serve(self, ready: Ready | None) -> None:
        http = http_server(self.app, self._connections, self.store.clock)
        counting = count_denials(self.denials, self.store.clock)
        watching = asyncio.gather(self.reloader.run(), self.decider.blocks.watch(), counting)
        envoy = None
        try:
            if self.settings.grpc is not None:
                from tidegate.service.envoy import service as envoy_service  # noqa: PLC0415 - needs grpcio

                fitting = replace(self.settings, max_connections=self._connections.max_connections)
                envoy = await envoy_service.serve(self.decider, fitting)
            await http.start(self._listener)
            self.parts.start()
            if ready is not None:
                ready(self.settings, self.parts)
            stopping = asyncio.create_task(self._stop.wait())
            running = [stopping, *([self.parts.fetching] if self.parts.fetching else [])]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        finally:
            # Both parts end at the same time, each within its patience.
            await asyncio.gather(self._end(http, watching, envoy), self.parts.stop())
        if self.parts.fetching is not None:
            self.parts.fetching.result()  # if it failed, so has the service

    async def _end(self, http: HttpServer, watching: asyncio.Future[Any], envoy: Any) -> None:  # noqa: ANN401 - no types
        """Finish requests, wake those that wait for too long, return leases, close."""
        self.app.stop()
        if envoy is not None:
            await envoy.stop(self.settings.stop_within)
        try:
            await asyncio.wait_for(self.app.idle.wait(), self.settings.stop_within)
        except TimeoutError:
            await self._close_decider()  # whoever still waits is told so
        watching.cancel()
        await http.stop(LAST_ANSWERS_TIMEOUT)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(watching, return_exceptions=True)

    async def _close_decider(self) -> None:
        if not self.decider.closed:
            await self.decider.close()


def open_telemetry(app: App) -> Telemetry:
    """Tell OpenTelemetry of an app."""
    from tidegate.observe import otel  # noqa: F401, PLC0415 - says which extra is missing
    from tidegate.service.runtime.telemetry import Telemetry  # noqa: PLC0415 - needs it

    return Telemetry(app)


def open_shared(settings: Settings, clock: Clock | None = None) -> Store:
    """Open the store of the settings, leased if they say so."""
    store = open_guarded(settings.store, clock=clock)
    return store if settings.lease is None or store.instant else LeasedStore(store, settings.lease)


def bounded_connections(settings: Settings, descriptors: int | None) -> Connections:
    """Bound the connections by the settings and by the limit of descriptors."""
    addresses = 1 if settings.grpc is None else 2
    fitting = fit_connections(settings.max_connections, descriptors, addresses)
    if fitting < settings.max_connections:
        log.warning("max_connections is lowered to %d: the limit of open files is %d", fitting, descriptors)
    return Connections(fitting, settings.read_timeout, settings.idle_timeout)


def http_server(app: App, connections: Connections, clock: Clock) -> HttpServer:
    """Make the HTTP server."""
    from tidegate.service.http import protocol  # noqa: F401, PLC0415 - says which extra is missing
    from tidegate.service.http.server import HttpServer  # noqa: PLC0415 - needs it

    return HttpServer(app, connections, clock)


def listen(address: ListenAddress, name: str) -> socket.socket:
    """Listen on the address of this setting."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
    except OSError as error:
        raise _cannot_listen(address, name, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(tuple(address))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(address, name, error) from None
    return listener


def _cannot_listen(address: ListenAddress, name: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {address}: {error.strerror or error}", field=name)


def with_address(settings: Settings, name: str, listener: socket.socket) -> Settings:
    """Put the address of a listening socket, whose port the system may have chosen, into the settings."""
    address = ListenAddress(getattr(settings, name).host, listener.getsockname()[1])
    return replace(settings, **{name: address}, flags={**settings.flags, name: str(address)})  # type: ignore[arg-type]  # by name


def take_addresses(settings: Settings) -> Settings:
    """Refuse an address that is taken, and choose free ports."""
    for name in ("listen", "grpc"):
        address: ListenAddress | None = getattr(settings, name)
        if address is not None:
            with listen(address, name) as probe:
                settings = with_address(settings, name, probe)
    return settings


async def serve(settings: Settings, listener: socket.socket, ready: Ready | None = None) -> None:
    """Run one process of the service until SIGTERM or SIGINT; SIGHUP reads the file again."""
    service = ServiceProcess(settings, listener)
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, service.stop)
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, service.reloader.request_reload)
    log.info("serving on http://%s, process %d", settings.listen, os.getpid())
    await service.run(ready)
    log.info("stopped")


def run(settings: Settings, ready: Ready | None = None) -> None:
    """Run the service until SIGTERM or SIGINT, in as many processes as the settings say."""
    if settings.grpc is not None:
        with listen(settings.grpc, "grpc") as probe:  # the processes bind it themselves, even beside a stranger
            settings = with_address(settings, "grpc", probe)
    with listen(settings.listen, "listen") as listener:
        settings = with_address(settings, "listen", listener)
        if settings.workers > 1:
            from tidegate.service.runtime.workers import run_workers  # noqa: PLC0415 - most run one process

            run_workers(settings, listener, ready)
        else:
            run_loop(serve(settings, listener, ready))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new event loop: uvloop's, if it is installed."""
    try:
        import uvloop  # noqa: PLC0415 - some systems have none
    except ImportError:
        factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
