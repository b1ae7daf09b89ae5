"""Sends requests through a pool: python pool_program.py URL STORE REQUESTS TASKS KEY=LIMIT … (per PERIOD seconds)."""

import asyncio
import json
import sys

import httpx

from tidegate.outbound import Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport

PERIOD = 3  # seconds; longer than a busy machine takes to answer


async def main(url: str, store: str, requests: int, tasks: int, *keys: str) -> None:
    """Send so many requests from several tasks, and print the statuses."""
    members = [
        {"name": key, "api_key": key, "limits": [f"{limit}/{PERIOD}s"]}
        for key, limit in (each.split("=") for each in keys)
    ]
    settings = {"domain": "127.0.0.1", "name": "pool", "key": {"header": "X-Key"}, "pool": {"members": members}}
    transport = AsyncRateLimitTransport(Providers.of(settings), store)
    left, statuses = list(range(requests)), []
    async with httpx.AsyncClient(transport=transport, timeout=60) as client:

        async def work() -> None:
            while left:
                left.pop()
                statuses.append((await client.get(url)).status_code)

        await asyncio.gather(*(work() for _ in range(tasks)))
    sys.stdout.write(json.dumps(statuses))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]))
