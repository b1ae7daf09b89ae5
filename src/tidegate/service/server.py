"""Runs the service: HTTP by granian, gRPC beside it in the same event loop, several processes if asked for.

Granian was chosen by figures (bench/service.py): with an empty handler it answers several times as many requests as
uvicorn with h11, and more than uvicorn with uvloop and httptools.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock, TaskSignal
from tidegate.core.bounds import SECOND
from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.observe.logs import DecisionLog
from tidegate.service.desk import Desk
from tidegate.service.http import App
from tidegate.service.parts import Parts
from tidegate.service.reloading import Reloader
from tidegate.service.settings import Address, Settings
from tidegate.stores.failure import open_guarded
from tidegate.stores.lease import LeasedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate.service.telemetry import Telemetry
    from tidegate.stores import Store

    Ready = Callable[[Settings, Parts | None], object]

log = logging.getLogger("tidegate.service")

STARTING: Final = 10 * SECOND
LOOK: Final = SECOND // 100
LAST: Final = 1.0  # seconds for those that were woken because the service stops
HEADER_TIMEOUT: Final = 10_000  # milliseconds
BACKLOG: Final = 1024


class Service:
    """One process of the service. `run` until `stop`."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        """Open the store and prepare everything that answers."""
        self.settings = settings
        self.store = open_shared(settings, clock)
        self.desk = Desk(
            settings.rules,
            self.store,
            secrets=settings.reservation_secret,
            max_wait=settings.max_wait,
            on_denial=(DecisionLog("tidegate.service"),),
        )
        self.app = App(self.desk, settings)
        self.parts = Parts(settings, self.app)
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
            if self.telemetry is not None:
                await asyncio.to_thread(self.telemetry.flush)
            self.app.overview.close()
            self.app.bodies.close()
            await self._close_desk()

    async def _serve(self, ready: Ready | None) -> None:
        server = http_server(self.app, self.settings)
        serving = asyncio.create_task(server.serve())
        watching = asyncio.gather(self.reloader.run(), self.desk.blocks.watch())
        envoy = None
        try:
            if self.settings.grpc is not None:
                from tidegate.service.envoy import service as envoy_service  # noqa: PLC0415 - needs grpcio

                envoy = await envoy_service.serve(self.desk, self.settings)
            await self._listening(serving)
            self.parts.start()
            if ready is not None:
                ready(self.settings, self.parts)
            stopping = asyncio.create_task(self._stop.wait())
            running = [stopping, serving, *([self.parts.fetching] if self.parts.fetching else [])]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
        finally:
            # Both parts end at the same time, each within its patience.
            await asyncio.gather(self._end(server, serving, watching, envoy), self.parts.stop())
        if self.parts.fetching is not None:
            self.parts.fetching.result()  # if it failed, so has the service

    async def _listening(self, serving: asyncio.Task[None]) -> None:
        """Wait until the server takes connections."""
        clock = self.store.clock
        deadline = clock.steady() + STARTING
        host, port = self.settings.listen
        while True:
            if serving.done():
                serving.result()
                raise ConfigError(f"the server ended at once on {self.settings.listen}", field="listen")
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                if clock.steady() > deadline:
                    raise StoreUnavailable(f"the server does not answer on {self.settings.listen}") from None
                await clock.wait_async(TaskSignal(), clock.steady() + LOOK)
                continue
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return

    async def _end(self, server: Any, serving: asyncio.Task[None], watching: asyncio.Future[Any], envoy: Any) -> None:  # noqa: ANN401 - no types
        """Finish requests, wake those that wait for too long, return leases, close."""
        self.app.stop()
        if envoy is not None:
            await envoy.stop(self.settings.stop_within)
        for patience in (self.settings.stop_within, LAST):
            try:
                await asyncio.wait_for(self.app.idle.wait(), patience)
                break
            except TimeoutError:
                await self._close_desk()  # whoever still waits is told so
        watching.cancel()
        server.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(serving, watching, return_exceptions=True)

    async def _close_desk(self) -> None:
        if not self.desk.closed:
            await self.desk.close()


def open_telemetry(app: App) -> Telemetry:
    """Tell OpenTelemetry of an app."""
    from tidegate.observe import otel  # noqa: F401, PLC0415 - says which extra is missing
    from tidegate.service.telemetry import Telemetry  # noqa: PLC0415 - needs it

    return Telemetry(app)


def open_shared(settings: Settings, clock: Clock | None = None) -> Store:
    """Open the store of the settings, leased if they say so."""
    store = open_guarded(settings.store, clock=clock)
    return store if settings.lease is None or store.instant else LeasedStore(store, settings.lease)


def http_server(app: App, settings: Settings) -> Any:  # noqa: ANN401 - loaded when it is needed
    """Make the HTTP server."""
    try:
        from granian.constants import HTTPModes, Interfaces  # noqa: PLC0415 - only the service needs it
        from granian.http import HTTP1Settings  # noqa: PLC0415 - as above
        from granian.server.embed import Server  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError("the service needs granian: pip install 'tidegate[service]'") from error
    return Server(
        app,
        address=settings.listen.host,
        port=settings.listen.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.auto,
        websockets=False,
        backlog=BACKLOG,
        backpressure=settings.max_concurrency + 64,  # those above are told so, not left waiting
        http1_settings=HTTP1Settings(header_read_timeout=HEADER_TIMEOUT),
        log_enabled=False,
    )


def take_addresses(settings: Settings) -> Settings:
    """Refuse an address that is taken (our processes share theirs, so the system would not), and choose free ports."""
    for name in ("listen", "grpc"):
        address: Address | None = getattr(settings, name)
        if address is None:
            continue
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(tuple(address))
                probe.listen(1)
                chosen = Address(address.host, probe.getsockname()[1])
        except OSError as error:
            message = f"cannot listen on {address}: {error.strerror or error}"
            raise ConfigError(message, field=name) from None
        settings = replace(settings, **{name: chosen}, flags={**settings.flags, name: str(chosen)})  # type: ignore[arg-type]  # by name
    return settings


async def serve(settings: Settings, ready: Ready | None = None) -> None:
    """Run one process of the service until SIGTERM or SIGINT; SIGHUP reads the file again."""
    service = Service(settings)
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, service.stop)
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, service.reloader.ask)
    log.info("serving on http://%s, process %d", settings.listen, os.getpid())
    await service.run(ready)
    log.info("stopped")


def run(settings: Settings, ready: Ready | None = None) -> None:
    """Run the service until SIGTERM or SIGINT, in as many processes as the settings say."""
    settings = take_addresses(settings)
    if settings.workers > 1:
        from tidegate.service.workers import run_workers  # noqa: PLC0415 - most run one process

        run_workers(settings, ready)
    else:
        asyncio.run(serve(settings, ready))


def leave() -> None:
    """End the process at once, everything being closed.

    Threads of granian may still want the interpreter while that shuts down, which Rust takes for a fault: it would
    abort, now and then.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
