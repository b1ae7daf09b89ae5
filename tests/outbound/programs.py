"""Programs that tests start as processes of their own: python programs.py NAME arguments."""

import asyncio
import os
import random
import select
import signal
import ssl
import sys
import time

import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport
from tidegate.outbound.sources import SourceRunner, read_source


async def send(url: str, store: str, limit: int, period: float, tasks: int, seconds: float) -> None:
    """Send from many tasks: each once, or for so many seconds."""
    providers = Providers.of({"domain": "127.0.0.1", "limit": limit, "period": f"{period}s"})
    transport = AsyncRateLimitTransport(providers, store)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:

        async def work() -> None:
            await client.get(url)
            while time.monotonic() < until:
                await client.get(url)

        workers = [asyncio.create_task(work()) for _ in range(tasks)]
        if seconds:
            await asyncio.sleep(seconds)
            for worker in workers:
                worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class ReportingTransport(httpx.AsyncHTTPTransport):
    """Writes a byte to a pipe before each request and after each answer; a fatal one ends within the first request."""

    def __init__(self, pipe: int, context: ssl.SSLContext, *, fatal: bool = False) -> None:
        super().__init__(verify=context)
        self.pipe = pipe
        self.fatal = fatal

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        os.write(self.pipe, b".")
        if self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await super().handle_async_request(request)
        os.write(self.pipe, b".")
        return answer


def be_killed(url: str, folder: str, kills: int, limit: int, period: float, seed: int) -> None:
    """Run services on one folder, one after another, each killed at a random moment; the last one ends by itself.

    The moment is a random while after a random number of requests and answers, or after a while without any; the last
    one is killed in mid-request.
    """
    draw = random.Random(seed)
    providers = Providers.of({"domain": "127.0.0.1", "limit": limit, "period": f"{period}s"})
    sources = [read_source({"name": f"s{i}", "url": f"{url}/{i}", "interval": "10ms"}) for i in range(6)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def serve(pipe: int, each: int | None, *, fatal: bool = False) -> None:
        transport = ReportingTransport(pipe, context, fatal=fatal)
        options = {"data": folder, "workers": 3, "cycle": 0.05, "grace": 0.2, "transport": transport}
        async with SourceRunner(providers, sources, **options) as service:
            running = asyncio.create_task(service.run())
            while each is None or any(row["ok"] < each for row in service.describe()):
                await asyncio.sleep(0.01)
            service.stop()
            await running

    nowhere = os.open(os.devnull, os.O_WRONLY)
    asyncio.run(serve(nowhere, 1))  # imports what is imported late
    for _ in range(kills):
        mine, theirs = os.pipe()
        child = os.fork()
        if not child:
            asyncio.run(serve(theirs, None))
        os.close(theirs)
        for _ in range(draw.randrange(9)):
            if not select.select([mine], [], [], 0.3)[0]:
                break
            os.read(mine, 1)
        time.sleep(draw.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(mine)
    child = os.fork()
    if not child:
        asyncio.run(serve(nowhere, None, fatal=True))
    os.waitpid(child, 0)
    asyncio.run(serve(nowhere, 3))


if __name__ == "__main__":
    _, program, *words = sys.argv
    if program == "be_killed":
        url, folder, kills, limit, period, seed = words
        be_killed(url, folder, int(kills), int(limit), float(period), int(seed))
    else:
        print("ready", flush=True)  # noqa: T201 - how it answers
        sys.stdin.readline()
        url, store, limit, period, tasks, seconds = words
        asyncio.run(send(url, store, int(limit), float(period), int(tasks), float(seconds)))
