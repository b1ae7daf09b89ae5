"""Opens tunnels (CONNECT) and upgraded connections, and settles them when they are closed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from aiohttp import web

from tidegate.egress._caller_limits import PER_REQUEST, settle_quietly
from tidegate.egress._calls import UpstreamResponse, describe_failure
from tidegate.egress._messages import NOTE, EgressError, bracketed
from tidegate.egress._options import read_options
from tidegate.egress._tunnels import TUNNEL_NOTE, client_end, run_tunnel, stream_end, upgraded_end
from tidegate.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from multidict import CIMultiDict

    from tidegate._limiter.reservation import AsyncReservation
    from tidegate.egress._callers import EgressCaller
    from tidegate.egress._exchange import EgressExchange
    from tidegate.egress._gateway import EgressGateway
    from tidegate.egress._tunnels import TunnelEnd
    from tidegate.outbound._quota.exchange import SendResult
    from tidegate.outbound._quota.pending_charge import AsyncPendingCharge

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
        *,
        expected: bool,
    ) -> web.StreamResponse:
        """Pass on what a connection carries after the provider has switched protocols; it counts as a request.

        `expected`: the client asked for that.
        """
        native = result.response.native
        headers["Connection"], headers["Upgrade"] = "Upgrade", native.headers.get("Upgrade", "")
        response = web.StreamResponse(status=SWITCHING_PROTOCOLS, headers=headers)
        try:
            upstream = upgraded_end(native, expected=expected)
            exchange.count("tunnels")
            await self._run(request, exchange, response, upstream)
        except ConnectionResetError as error:
            exchange.count("failed")
            raise describe_failure(error, exchange.provider) from None
        finally:
            native.close()
            self._gateway.background.start(self._settle_tunnel(result, own))
        return response

    async def _settle_tunnel(self, result: SendResult[UpstreamResponse], own: AsyncReservation | None) -> None:
        if result.settlement is not None:
            await self._gateway.gate.run(result.settlement.settle_flow())
        if own is not None:
            await own.commit()

    async def open(
        self, request: web.BaseRequest, exchange: EgressExchange, caller: EgressCaller, authority: str
    ) -> web.StreamResponse:
        """Open a tunnel to a host of a provider, counted as one request."""
        if not self._gateway.settings.tunnels:
            message = f"tunnels (CONNECT) are refused: {TUNNEL_NOTE}. Use /NAME or /to/HOST as the base URL"
            raise EgressError(403, "tunnels-refused", message)
        provider, host, port = self._gateway.routes.find_tunnel(authority)
        exchange.host, exchange.path = host, ""
        self._gateway.note_target(exchange, caller, provider)
        gateway, charge = self._gateway, None
        options = read_options(request.headers, gateway.settings, caller)
        if any(limit.unit not in PER_REQUEST for limit in caller.limits):
            raise uncountable(f"caller {caller.name}")
        sender = gateway.limits.charge(caller, gateway.limits.cost_of_tunnel(caller))
        gateway.use_options(caller, options._replace(tag=""), sender)
        exchange.begin_wait()
        try:
            url = f"https://{bracketed(host)}/"
            charge = await gateway.gate.acquire(url)
            exchange.end_wait()
            reader, writer = await self._connect(host, port)
        except BaseException as error:  # noqa: BLE001 - also a cancellation: raised again below
            settling = gateway.background.start(self._settle(charge, gateway.limits.reservation(sender), sent=False))
            if not isinstance(error, asyncio.CancelledError):
                await asyncio.shield(settling)
            if isinstance(error, ConfigError):
                raise uncountable(f"provider {provider.name}") from None
            failure = describe_failure(error, provider.name) if isinstance(error, OSError) else error
            raise gateway.describe_error(failure, exchange, caller, provider, sender) from None
        exchange.count("requests")
        exchange.count("tunnels")
        response = web.StreamResponse(status=200, reason="Connection established", headers={NOTE: TUNNEL_NOTE})
        try:
            await self._run(request, exchange, response, stream_end(reader, writer))
        finally:
            writer.close()
            gateway.background.start(self._settle(charge, gateway.limits.reservation(sender), sent=True))
        return response

    async def _run(
        self, request: web.BaseRequest, exchange: EgressExchange, response: web.StreamResponse, upstream: TunnelEnd
    ) -> None:
        """Begin the response, and pass bytes on in both directions until the tunnel ends."""
        try:
            await response.prepare(request)
            client = client_end(request)
        except ConnectionError:
            exchange.problem = "client-gone"
            return
        await run_tunnel(client, upstream, self._gateway.settings.first_byte_timeout)

    @staticmethod
    async def _settle(charge: AsyncPendingCharge | None, own: AsyncReservation | None, *, sent: bool) -> None:
        """Keep the permits of a tunnel that was open, and free its slots; return all of one that was not."""
        with suppress(StoreUnavailable):
            if charge is not None:
                await (charge.commit() if sent else charge.cancel())
        if own is not None:
            await settle_quietly(own, arrived=sent)

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


def uncountable(whose: str) -> EgressError:
    """Return the refusal of a tunnel inside which limits could not be counted."""
    message = f"{whose} has limits of tokens or money, which cannot be counted inside a tunnel"
    return EgressError(403, "tunnels-refused", f"{message}. Use /NAME or /to/HOST as the base URL")
