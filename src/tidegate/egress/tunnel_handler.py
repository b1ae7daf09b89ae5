"""Opens tunnels (CONNECT) and upgraded connections, and settles them when they are closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from aiohttp import web

from tidegate.egress.calls import UpstreamResponse, describe_failure
from tidegate.egress.messages import NOTE, EgressError, bracketed, denial
from tidegate.egress.options import read_options
from tidegate.egress.tunnels import TUNNEL_NOTE, client_end, run_tunnel, stream_end, upgraded_end
from tidegate.errors import Denied

if TYPE_CHECKING:
    from multidict import CIMultiDict

    from tidegate.egress.callers import EgressCaller
    from tidegate.egress.exchange import EgressExchange
    from tidegate.egress.gateway import EgressGateway
    from tidegate.outbound.quota.exchange import SendResult
    from tidegate.reservation import AsyncReservation

SWITCHING_PROTOCOLS: Final = 101


class TunnelHandler:
    """Handles requests after which the connection carries another protocol."""

    def __init__(self, gateway: EgressGateway) -> None:
        """Handle them for a gateway."""
        self._gateway = gateway

    async def upgrade(
        self,
        request: web.BaseRequest,
        exchange: EgressExchange,
        headers: CIMultiDict[str],
        result: SendResult[UpstreamResponse],
        own: AsyncReservation | None,
    ) -> web.StreamResponse:
        """Pass on what a connection carries after the provider has switched protocols; it counts as a request."""
        native = result.response.native
        headers["Connection"], headers["Upgrade"] = "Upgrade", native.headers.get("Upgrade", "")
        exchange.count("tunnels")
        try:
            upstream = upgraded_end(native)
            response = web.StreamResponse(status=SWITCHING_PROTOCOLS, reason=native.reason, headers=headers)
            await response.prepare(request)
            await run_tunnel(client_end(request), upstream, self._gateway.settings.upstream_timeout)
        finally:
            native.close()
            self._gateway.background.start(self._settle_tunnel(result, own))
        return response

    async def _settle_tunnel(self, result: SendResult[UpstreamResponse], own: AsyncReservation | None) -> None:
        if result.settlement is not None:
            await self._gateway.gate.run(result.settlement.settle_flow(None))
        if own is not None:
            await own.commit()

    async def open(
        self, request: web.BaseRequest, exchange: EgressExchange, caller: EgressCaller, authority: str
    ) -> web.StreamResponse:
        """Open a tunnel to a host of a provider, counted as one request."""
        if not self._gateway.settings.tunnels:
            message = f"tunnels (CONNECT) are refused: {TUNNEL_NOTE}. Use /NAME or /to/HOST as base URL"
            raise EgressError(403, "tunnels-refused", message)
        provider, host, port = self._gateway.routes.find_tunnel(authority)
        exchange.host, exchange.path = host, ""
        self._gateway.note_target(exchange, caller, provider)
        options = read_options(request.headers, self._gateway.settings, caller, provider)
        exchange.begin_wait()
        try:
            charge = await self._gateway.gate.acquire(
                f"https://{bracketed(host)}/", None, options.timeout, options.priority
            )
        except Denied as denied:
            exchange.count("denied")
            raise denial(denied, provider, "") from None
        finally:
            exchange.end_wait()
        try:
            reader, writer = await self._connect(host, port)
        except (OSError, TimeoutError) as error:
            await charge.cancel()
            exchange.count("failed")
            failure = TimeoutError() if isinstance(error, TimeoutError) else error
            raise describe_failure(failure, provider.name) from None
        exchange.count("requests")
        exchange.count("tunnels")
        try:
            response = web.StreamResponse(status=200, reason="Connection established", headers={NOTE: TUNNEL_NOTE})
            await response.prepare(request)
            await run_tunnel(client_end(request), stream_end(reader, writer), self._gateway.settings.upstream_timeout)
        finally:
            writer.close()
            self._gateway.background.start(charge.commit())
        return response

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a host, at an address that was checked."""
        async with asyncio.timeout(self._gateway.settings.connect_timeout):
            last: OSError | None = None
            for address in await self._gateway.addresses.addresses(host, port):
                self._gateway.addresses.check(address)
                try:
                    return await asyncio.open_connection(address, port)
                except OSError as error:
                    last = error
            raise last or OSError("no address")
