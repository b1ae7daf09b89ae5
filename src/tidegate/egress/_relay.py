"""Passes the body of a response on, chunk by chunk as it arrives, and settles what it used.

A slow reader slows the provider down: nothing is read ahead beyond the socket buffers. If the client goes away,
the call to the provider is ended; if the provider does, the connection to the client is closed, so that it notices.
Either way the call is settled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

from tidegate._policy.units import is_money
from tidegate.egress._run_tokens import end_when_stopped
from tidegate.errors import Denied, RateLimitError
from tidegate.outbound._quota.token_usage import UsageReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from multidict import CIMultiDict

    from tidegate._limiter.reservation import AsyncReservation
    from tidegate.agents import AsyncRun
    from tidegate.egress._calls import UpstreamResponse
    from tidegate.egress._settings import EgressSettings
    from tidegate.outbound._providers.provider import Provider
    from tidegate.outbound._quota.exchange import SendResult
    from tidegate.outbound._quota.gate import AsyncGate
    from tidegate.stores._cancellation import BackgroundTasks

FIRST_ERROR_STATUS: Final = 400
BAD_GATEWAY: Final = 502


class Meter:
    """Reads what a response used, and settles its call: with the gate, and with the limits of its caller."""

    def __init__(
        self,
        gate: AsyncGate,
        provider: Provider,
        result: SendResult[UpstreamResponse],
        own: AsyncReservation | None,
        background: BackgroundTasks,
        on_settled: Callable[[Meter], object],
        *,
        counts_tokens: bool,
        expects_output: bool = False,
    ) -> None:
        """Meter a response that has begun; `own` is the reservation of the caller's own limits."""
        self._on_settled = on_settled
        self._gate = gate
        self._background = background
        self._settlement = result.settlement
        self._own = own
        native = result.response.native
        self._failed = native.status >= FIRST_ERROR_STATUS
        coding = native.headers.get("Content-Encoding", "")
        self.reader: UsageReader | None = None
        if self._settlement is not None:
            self._settlement.open(coding)
            self.reader = self._settlement.reader
        self._reads = self.reader is None and counts_tokens  # itself: only the limits of the caller count tokens
        if self._reads:
            self.reader = UsageReader(coding, provider.counting)
        if self.reader is not None and expects_output and not self._failed:
            self.reader.expects_output = True
        self.used: dict[str, int] | None = None
        self.money: int = 0  # in millionths of its currency
        self._reserved = result.outcome.cost
        self.parts: dict[Any, int] = {}
        self._open = True
        self.complete = False  # whether the whole response was sent

    async def feed(self, piece: bytes) -> None:
        """Read the next piece."""
        if self._reads and self.reader is not None:
            self.reader.feed(piece)
        elif self._settlement is not None and self._settlement.feed(piece):
            await self._gate.run(self._settlement.renew_flow())

    async def settle(self, *, complete: bool) -> None:
        """Settle, once; `complete` is whether the whole body has arrived."""
        if not self._open:
            return
        self._open, self.complete = False, complete
        if self.reader is not None:
            if complete:
                self.reader.end()
            self.used = self.reader.result()
            self.parts = dict(self.reader.parts)
        if self._gate.store.instant:
            await self._settle()
        else:  # a client that has its response may disconnect meanwhile, which cancels the task of the request
            await asyncio.shield(self._background.start(self._settle()))

    async def _settle(self) -> None:
        try:
            await self._commit()
        finally:
            self._on_settled(self)

    async def _commit(self) -> None:
        if self._settlement is not None:
            try:
                await self._gate.run(self._settlement.settle_flow())
            finally:  # it is known even if the client disconnects while the store settles
                self._read_money(self._settlement.charged_units)
        if self._own is not None:
            try:
                await self._own.commit(self._own_cost())
            except Exception as error:  # noqa: BLE001 - a store may raise any: the client has its response
                self._gate.note_unsettled(f"caller {self._own.key}", error)

    def _read_money(self, charged: Mapping[str, int] | None) -> None:
        """Note what the call cost; what was reserved, if the provider charges that."""
        units = self._reserved if charged is None else charged
        if isinstance(units, Mapping):
            money = {unit: amount for unit, amount in units.items() if is_money(unit)}
            self.money = sum(money.values())
            if money:
                self.used = {**(self.used or {}), **money}

    def _own_cost(self) -> dict[str, int] | None:
        """Return what the caller's limits are charged; None: what was reserved."""
        if self._own is None:
            return None
        units = {limit.unit for limit in self._own.policy.limits}
        used = self.used if self.used is not None or not self._failed else dict.fromkeys(units - {"requests"}, 0)
        reader, least = self.reader, {}
        if used is not None and reader is not None and (reader.lacks_input or reader.lacks_output):
            least = self._own_reserved()
            used = {**used, **(reader.result_with_output(0) or {})}
        return {unit: max(amount, least.get(unit, 0)) for unit, amount in (used or {}).items() if unit in units} or None

    def _own_reserved(self) -> dict[str, int]:
        """Return what is reserved from the caller's limits, by unit."""
        own = self._own
        return {} if own is None else {x.unit: cost for x, cost in zip(own.policy.limits, own.costs, strict=True)}

    def settle_later(self) -> None:
        """Settle in a task of its own: the task of the request was cancelled."""
        if self._open and (self._settlement is not None or self._own is not None or self.reader is not None):
            self._background.start(self._settle_quietly())

    async def _settle_quietly(self) -> None:
        with suppress(RateLimitError):  # the estimate stays charged
            await self.settle(complete=False)


class StreamWatch:
    """Ends a stream that makes no progress: a client that reads nothing, or a provider that sends nothing."""

    def __init__(self, request: web.BaseRequest, native: aiohttp.ClientResponse, settings: EgressSettings) -> None:
        """Watch until `close`."""
        self._request = request
        self._native = native
        self._limits = settings.first_byte_timeout, settings.client_timeout
        self._tick = min(self._limits)
        self._loop = asyncio.get_running_loop()
        self.writing = False
        self.chunks = 0
        self._denied: Denied | None = None  # why its run was stopped
        self.stalled = False  # the provider has sent nothing for too long
        self._seen = (-1, False)
        self._since = self._loop.time()
        self._timer = self._loop.call_later(self._tick, self._check)

    def _check(self) -> None:
        now, state = self._loop.time(), (self.chunks, self.writing)
        if state != self._seen:
            self._seen, self._since = state, now
        elif now - self._since >= self._limits[self.writing] * 0.99:
            if self.writing and self._request.transport is not None:
                self._request.transport.abort()  # the task of the request is cancelled
            else:
                self.stalled = True
                self._native.close()
            return
        self._timer = self._loop.call_later(self._tick, self._check)

    def stop(self, denied: Denied) -> None:
        """End the stream: its run was stopped."""
        self._denied = denied
        self._native.close()

    def raise_if_ended(self) -> None:
        """Raise why the stream was ended here, if it was."""
        if self._denied is not None:
            raise self._denied
        if self.stalled:
            raise TimeoutError

    def close(self) -> None:
        """Stop watching."""
        self._timer.cancel()


async def relay(
    request: web.BaseRequest,
    upstream: UpstreamResponse,
    headers: CIMultiDict[str],
    meter: Meter | None,
    settings: EgressSettings,
    run: AsyncRun | None = None,
) -> web.StreamResponse:
    """Send a provider's response to the client, with the standard reason phrase: its own may contain the key."""
    native = upstream.native
    response: web.StreamResponse | None = None
    try:
        if native.content.is_eof() and native.method != "HEAD" and not upstream.looked_at:
            response = await send_whole(request, upstream, headers, meter)
        else:
            response = web.StreamResponse(status=native.status, headers=headers)
            await response.prepare(request)
            await stream_body(request, upstream, response, meter, settings, run)
    except (aiohttp.ClientError, TimeoutError, ConnectionError, Denied) as error:
        # The client must not mistake what it received for the whole response.
        upstream.problem = problem_of(error, request)
        native.close()
        if meter is not None:
            await meter.settle(complete=False)
        if request.transport is not None:
            request.transport.close()
        return web.Response(status=BAD_GATEWAY) if response is None else response  # neither can be sent any more
    except BaseException:
        native.close()
        if meter is not None:
            meter.settle_later()
        raise
    if meter is not None:
        await meter.settle(complete=True)
    return response


def problem_of(error: Exception, request: web.BaseRequest) -> str:
    """Return why a response was not sent as a whole."""
    if isinstance(error, Denied):
        return "cut-off"
    if request.transport is None or request.transport.is_closing():
        return "client-gone"
    return "upstream-timeout" if isinstance(error, TimeoutError) else "upstream-failed"


async def send_whole(
    request: web.BaseRequest, upstream: UpstreamResponse, headers: CIMultiDict[str], meter: Meter | None
) -> web.StreamResponse:
    """Send a response whose body has already arrived, in one piece."""
    native = upstream.native
    body = native.content.read_nowait()
    if body and meter is not None:
        await meter.feed(body)
    response = web.Response(status=native.status, headers=headers, body=body)
    await response.prepare(request)
    await response.write_eof()
    return response


async def stream_body(
    request: web.BaseRequest,
    upstream: UpstreamResponse,
    response: web.StreamResponse,
    meter: Meter | None,
    settings: EgressSettings,
    run: AsyncRun | None,
) -> None:
    """Send the chunks of a body as they arrive, until a stop of its run ends them."""
    readany, write = upstream.native.content.readany, response.write
    watch = StreamWatch(request, upstream.native, settings)
    stopping = None if run is None else asyncio.create_task(end_when_stopped(run, watch.stop))
    try:
        piece = upstream.looked_at or await readany()
        while piece:
            if meter is not None:
                await meter.feed(piece)
            watch.chunks += 1
            watch.writing = True
            await write(piece)
            watch.writing = False
            piece = await readany()
        watch.raise_if_ended()
        await response.write_eof()
    except aiohttp.ClientError:
        watch.raise_if_ended()
        raise
    finally:
        watch.close()
        if stopping is not None:
            stopping.cancel()
