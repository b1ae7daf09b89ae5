"""A gateway in the event loop of a test, and requests as bytes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from tidegate._limiter.limiter import AsyncLimiter
from tidegate.egress import load_egress
from tidegate.egress._gateway import EgressGateway
from tidegate.egress._server import EgressServer
from tidegate.outbound import AsyncGate, Providers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tidegate.egress._addresses import AddressCheck

TOKEN = "token-of-research-1234"  # noqa: S105 - of a test
OTHER_TOKEN = "token-of-another-5678"  # noqa: S105 - of a test
KEY = "sk-the-key-of-the-provider"


class Running(NamedTuple):
    """A gateway that listens, and a client."""

    gateway: EgressGateway
    url: str
    port: int
    client: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a GET and return the status, the headers and the body."""
        return await self.send("GET", path, **options)

    async def send(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return the status, the headers and the body."""
        options.setdefault("allow_redirects", False)
        async with self.client.request(method, self.url + path, **options) as response:
            return response.status, dict(response.headers), await response.read()


def provider(**fields: object) -> dict[str, object]:
    """Describe the provider `up`."""
    fields.setdefault("name", "up")
    fields.setdefault("limits", ["1000/1m"])
    return {"domain": "127.0.0.1", **fields}


@asynccontextmanager
async def running(
    url: str, settings: dict[str, Any] | None = None, addresses: AddressCheck | None = None, **fields: Any
) -> AsyncIterator[Running]:
    """Run a gateway to one provider, `up`, at a URL."""
    store = fields.pop("store", "memory://")
    clock, spending = fields.pop("clock", None), fields.pop("spending", None)
    chosen = {"upstreams": {"up": url}, "allow_private": ["127.0.0.1"], "listen": "127.0.0.1:0", **(settings or {})}
    gate = AsyncGate(Providers.of(provider(**fields)), store, clock=clock, reload=None, spending=spending)
    async with serving(gate, chosen, addresses) as found:
        yield found


@asynccontextmanager
async def serving(
    gate: AsyncGate, settings: dict[str, Any], addresses: AddressCheck | None = None
) -> AsyncIterator[Running]:
    """Run a gateway over a gate."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    gateway = EgressGateway(gate, load_egress(settings), addresses=addresses)
    try:
        async with (
            gateway,
            EgressServer(gateway, listener),
            aiohttp.ClientSession(auto_decompress=False) as client,
        ):
            yield Running(gateway, f"http://127.0.0.1:{port}", port, client)
    finally:
        await gate.close()
        await asyncio.sleep(0)


async def used_by(gateway: Running, caller: str) -> dict[str, int]:
    """Return what a caller has used of its own limits, which the gateway counts in its store."""
    (found,) = (each for each in gateway.gateway.callers.all if each.name == caller)
    async with AsyncLimiter(found.policy, store=gateway.gateway.gate.store) as limiter:
        return {name: usage.used for name, usage in (await limiter.usage(caller)).items()}


async def raw(port: int, request: bytes) -> bytes:
    """Send bytes and return all that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    return answer


async def settled(condition: Any, seconds: float = 20.0) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def settled_by(url: str, path: str, body: object, quota: int, token: str = "") -> dict[str, int]:
    """Return what a gateway has counted, by unit, from limits called `day_UNIT` that are never used up.

    An estimate says what is left of them: as if the call were sent, if it could be sent now.
    """
    headers = {"X-Tidegate-Token": token} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/egress/estimate", json={"url": path, "body": body}, headers=headers) as response,
    ):
        answer = await response.json()
    own = answer["cost"] if answer["wait"] == 0 else {}
    used = {name[4:]: quota - left for name, left in answer["remaining"].items() if name.startswith("day_")}
    return {unit: amount - own.get(unit, 0) for unit, amount in used.items()}
