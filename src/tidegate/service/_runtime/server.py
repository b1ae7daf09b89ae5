"""Runs the service: HTTP, RESP and gRPC, in one or several processes.

The servers were chosen by measurement (bench/front.py): an asyncio protocol on uvloop with httptools's parser needs no
task for a decision in memory; gRPC's server with threads uses half the CPU time of `grpc.aio`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.setting_values import listen_error
from tidegate._runtime.event_loop import run_loop
from tidegate.errors import ConfigError
from tidegate.observe.logs import DecisionLog
from tidegate.service._config.reload import Reloader
from tidegate.service._config.settings import ListenAddress, Settings
from tidegate.service._dashboard.stored_history import StoredHistory
from tidegate.service._decisions.decider import Decider
from tidegate.service._decisions.service_directory import ServiceDirectory
from tidegate.service._decisions.stats import Stats
from tidegate.service._http import App
from tidegate.service._http.connections import (
    BACKLOG,
    Connections,
    connections_for_requests,
    fit_connections,
)
from tidegate.service._resp.server import RespServer
from tidegate.service._runtime.components import Components
from tidegate.service._runtime.file_limits import raise_descriptor_limit
from tidegate.service._runtime.logs import log_denial_counts
from tidegate.service._runtime.systemd import SystemdNotifier
from tidegate.stores._opened import OpenedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidegate._runtime.clock import Clock
    from tidegate.service._http.server import HttpServer
    from tidegate.service._runtime.telemetry import Telemetry
    from tidegate.service._runtime.worker_link import WorkerLink
    from tidegate.stores import Store

    Ready = Callable[[Settings, Components | None], object]

log: logging.Logger = logging.getLogger("tidegate.service")

LAST_RESPONSES_TIMEOUT: Final = 1.0  # seconds to send responses to calls that the stop interrupted


class Listeners(NamedTuple):
    """The listening sockets of a service; all of its workers accept connections from them.

    A worker that hangs therefore keeps no new connection waiting: the others accept it. Only gRPC opens sockets of its
    own, one per worker.
    """

    http: socket.socket
    resp: socket.socket | None = None
    egress: socket.socket | None = None

    def close(self) -> None:
        """Close the sockets in this process."""
        for listener in self:
            if listener is not None:
                listener.close()


class ServiceProcess:
    """One process of the service. `run` returns after `stop`."""

    def __init__(
        self,
        settings: Settings,
        listeners: Listeners,
        *,
        clock: Clock | None = None,
        link: WorkerLink | None = None,
    ) -> None:
        """Open the store, and prepare the servers on the listening sockets.

        With a `link`, this is one of several workers: the parent process reloads the file for all of them.
        """
        self._listeners = listeners
        self._connections = bounded_connections(settings, raise_descriptor_limit())
        self.settings = settings
        self.store: Store = open_service_store(settings, clock)
        self.denials: DecisionLog = DecisionLog("tidegate.service")
        self.decider: Decider = Decider(
            settings.policies,
            self.store,
            secrets=settings.reservation_secret,
            max_wait=settings.max_wait,
            max_priority=settings.max_priority,
            on_denial=(self.denials,),
            stats=None if link is None else Stats(link.open_counters(self.store.clock)),
        )
        for_requests = connections_for_requests(self._connections.max_connections)
        self.app: App = App(
            self.decider, replace(settings, max_concurrency=min(settings.max_concurrency, for_requests))
        )
        self.components: Components = Components(settings, self.app, link, listeners.egress)
        self.telemetry: Telemetry | None = open_telemetry(self.app) if settings.telemetry else None
        if link is not None:
            link.connect(self.app)
        source = self.app.overview.source
        identity = (source.process_id, source.started_at)
        self.directory: ServiceDirectory = ServiceDirectory(self.store, service_name(settings), identity)
        self.app.overview.directory = self.directory
        self.stored_history: StoredHistory = StoredHistory(
            self.store, self.app.overview.history, settings.name or str(settings.listen.port)
        )
        self._link = link
        self._announces = link is None or link.first
        self._systemd = SystemdNotifier(os.environ if self._announces else {})
        self.reloader: Reloader | WorkerLink = link or Reloader(settings, self.app, self.store.clock)
        self._stop = asyncio.Event()
        self._drained = asyncio.Event()

    def stop(self, *, drain: bool = True) -> None:
        """Finish active requests, then end `run`.

        With `drain`, the service first reports for `drain_for` that it is not ready, and still accepts connections. A
        second call ends that time.
        """
        if self._stop.is_set() or not drain:
            self._drained.set()
        self._stop.set()

    def request_reload(self) -> None:
        """Read the files now, whether they have changed or not (SIGHUP)."""
        self.reloader.request_reload()
        self.components.request_reload()

    def begin_stop(self) -> None:
        """Stop with draining; a further call changes nothing."""
        self._stop.set()

    async def run(self, ready: Ready | None = None) -> None:
        """Serve until stopped; call `ready` when the service accepts requests."""
        try:
            async with self.components:
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
        denial_counts = log_denial_counts(self.denials, self.store.clock)
        watchdog = self._systemd.run(self.store.clock)
        tasks = (denial_counts, watchdog, self._announce(), self._keep_history())
        background = asyncio.gather(self.reloader.run(), self.decider.blocks.watch(), *tasks)
        envoy = resp = None
        try:
            if self.settings.grpc is not None:
                from tidegate.service._envoy import service as envoy_service  # noqa: PLC0415 - needs grpcio

                bounded = replace(self.settings, max_connections=self._connections.max_connections)
                envoy = await envoy_service.serve(self.decider, bounded)
            await http.start(self._listeners.http)
            if self._listeners.resp is not None:
                resp = RespServer(self.app, self._connections)
                await resp.start(self._listeners.resp)
            self.components.start()
            if ready is not None:
                ready(self.settings, self.components)
            self._systemd.notify("READY=1")
            stopping = asyncio.create_task(self._stop.wait())
            running = [stopping, *([self.components.fetch_task] if self.components.fetch_task else [])]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            await self._drain(http)
        finally:
            # The servers and the components stop concurrently, each within `stop_within`.
            await asyncio.gather(self._stop_servers(http, background, envoy, resp), self.components.stop())
        if self.components.fetch_task is not None:
            self.components.fetch_task.result()  # raises if fetching failed: then the service fails too

    async def _announce(self) -> None:
        """Let the services that share the store list this one."""
        if self._announces:
            await self.directory.run(self.app.overview.count_decisions)

    async def _keep_history(self) -> None:
        """Continue the history of another worker, or that of the store, and write each minute to the store."""
        try:
            restored = self._link is not None and await self._link.restore_history()
            if not restored:
                await self.stored_history.restore()
                self.app.overview.history.add_mark("start", "the service started")
        except Exception:  # the page then shows the time since the start
            log.exception("the history of the dashboard was not continued")
        if self._announces:
            await self.stored_history.run()

    async def _drain(self, http: HttpServer) -> None:
        """Report that the service is not ready, and give load balancers time to notice."""
        http.begin_drain()
        self._systemd.notify("STOPPING=1")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), self.settings.drain_for)

    async def _stop_servers(
        self,
        http: HttpServer,
        background: asyncio.Future[Any],
        envoy: Any,  # noqa: ANN401 - gRPC has no types
        resp: RespServer | None,
    ) -> None:
        """Refuse connections; finish active requests, but interrupt waiting calls after `stop_within`; close all."""
        http.close_listener()
        if resp is not None:
            resp.close()
        self.app.stop()
        await asyncio.gather(
            self._finish_requests(), *(() if envoy is None else (envoy.stop(self.settings.stop_within),))
        )
        background.cancel()
        await http.stop(LAST_RESPONSES_TIMEOUT)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(background, return_exceptions=True)

    async def _finish_requests(self) -> None:
        """Wait for the active requests, and interrupt those that still wait for a permit after `stop_within`."""
        try:
            await asyncio.wait_for(self.app.idle.wait(), self.settings.stop_within)
        except TimeoutError:
            await self._close_decider()

    async def _close_decider(self) -> None:
        if not self.decider.closed:
            await self.decider.close()


def open_telemetry(app: App) -> Telemetry:
    """Export the counters of an app to OpenTelemetry."""
    from tidegate.observe import otel  # noqa: F401, PLC0415 - its error names the missing extra
    from tidegate.service._runtime.telemetry import Telemetry  # noqa: PLC0415 - needs opentelemetry

    return Telemetry(app)


def service_name(settings: Settings) -> str:
    """Return the name of this service among those that share its store."""
    return settings.name or f"{socket.gethostname()}:{settings.listen.port}"


def open_service_store(settings: Settings, clock: Clock | None = None) -> Store:
    """Open the store of the settings, with leases if `lease` is set. An error names where the store was set."""
    try:
        return OpenedStore.open(settings.store, clock=clock, lease=settings.lease).store
    except ConfigError as error:
        if error.field != "store":
            raise
        raise ConfigError(error.detail, **settings.store_origin._asdict()) from None


def bounded_connections(settings: Settings, descriptors: int | None) -> Connections:
    """Bound the number of connections by the settings and by the limit on open files."""
    addresses = 1 if settings.grpc is None else 2
    max_connections = fit_connections(settings.max_connections, descriptors, addresses)
    if max_connections < settings.max_connections:
        log.warning("max_connections is lowered to %d: the limit on open files is %d", max_connections, descriptors)
    return Connections(max_connections, settings.read_timeout, settings.idle_timeout)


def http_server(app: App, connections: Connections, clock: Clock) -> HttpServer:
    """Create the HTTP server."""
    from tidegate.service._http.server import HttpServer  # noqa: PLC0415 - its error names the missing extra

    return HttpServer(app, connections, clock)


def listen(address: ListenAddress, name: str) -> socket.socket:
    """Listen on an address; `name` is its setting, for the error."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
    except OSError as error:
        raise listen_error(address, name, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(tuple(address))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise listen_error(address, name, error) from None
    return listener


def with_address(settings: Settings, name: str, listener: socket.socket) -> Settings:
    """Return settings with the address of a listening socket: the system may have chosen its port."""
    address = ListenAddress(getattr(settings, name).host, listener.getsockname()[1])
    return replace(settings, **{name: address}, flags={**settings.flags, name: str(address)})  # type: ignore[arg-type]  # by name


def choose_ports(settings: Settings) -> Settings:
    """Return settings with free ports chosen. Raises if an address is in use."""
    for name in ("listen", "grpc", "resp", "egress"):
        address: ListenAddress | None = getattr(settings, name)
        if address is not None:
            with listen(address, name) as probe:
                settings = with_address(settings, name, probe)
    return settings


async def serve(
    settings: Settings, listeners: Listeners, ready: Ready | None = None, link: WorkerLink | None = None
) -> None:
    """Run one process of the service until SIGTERM or SIGINT; SIGHUP reloads the file."""
    service = ServiceProcess(settings, listeners, link=link)
    loop = asyncio.get_running_loop()
    # A worker may get SIGTERM twice, from the parent and sent to the process group: only SIGINT ends its draining.
    loop.add_signal_handler(signal.SIGTERM, service.stop if link is None else service.begin_stop)
    loop.add_signal_handler(signal.SIGINT, partial(service.stop, drain=False))
    if hasattr(signal, "SIGHUP"):
        loop.add_signal_handler(signal.SIGHUP, service.request_reload)

    def report_ready(settings: Settings, components: Components | None) -> None:
        log.info("serving on http://%s, process %d", settings.listen, os.getpid())
        if ready is not None:
            ready(settings, components)

    await service.run(report_ready)
    log.info("stopped")


def run(settings: Settings, ready: Ready | None = None) -> None:
    """Run the service until SIGTERM or SIGINT, in as many processes as `workers` says."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, socket.socket] = {}
        for name in ("grpc", "resp", "egress", "listen"):
            address: ListenAddress | None = getattr(settings, name)
            if address is not None:
                opened[name] = stack.enter_context(listen(address, name))
                settings = with_address(settings, name, opened[name])
        if "grpc" in opened:  # each worker binds it with SO_REUSEPORT, which would hide a conflict
            opened["grpc"].close()
        listeners = Listeners(opened["listen"], opened.get("resp"), opened.get("egress"))
        if settings.workers > 1:
            from tidegate.service._runtime.workers import run_workers  # noqa: PLC0415 - most services run one process

            run_workers(settings, listeners, ready)
        else:
            run_loop(serve(settings, listeners, ready))
