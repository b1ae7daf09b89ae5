"""When aiohttp releases a response, its slot is free again, whether the body was read or not."""

import asyncio

import aiohttp

from tests.cases import cases
from tests.outbound.flows import settle
from tests.outbound.server import Answer, QuotaServer
from tidegate.outbound import Providers
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.stores import MemoryStore

USAGE = b'{"usage": {"total_tokens": 42}}'


def used(store, known):
    policy = known.match("http://127.0.0.1").policy
    (peeked,) = store.apply("peek", ((policy, "127.0.0.1", (0,) * len(policy.limits)),))
    return [said.limit.burst - said.remaining for said in peeked.limits]


@cases("tokens", [(), ("50000/1m unit=tokens",)])
@cases("body", [b"", b"x", b"x" * 300_000, USAGE])
@cases("read", [0, 1, -1])
@cases("end", ["release", "close", "leave"])
def test_a_slot_is_freed_when_the_response_is_released(tokens, body, read, end):
    known = Providers.of(
        {
            "domain": "127.0.0.1",
            "limits": ["100/1m", *tokens],
            "concurrency": {"limit": 1, "lease": "10m"},
            **({"estimate": {"tokens": 10}} if tokens else {}),
        }
    )
    store = MemoryStore()

    async def run(url):
        middleware = RateLimitMiddleware(known, store, timeout=0)
        async with middleware, aiohttp.ClientSession(middlewares=[middleware]) as session:
            answer = await session.get(url)
            if read:
                await answer.content.read(read)
            if end == "leave":
                async with answer:
                    pass
            else:
                getattr(answer, end)()
            await settle()
            return used(store, known)

    with QuotaServer(respond=lambda _request: Answer(pieces=(body,))) as server:
        calls, *counted, slots = asyncio.run(run(server.url))
    assert (calls, slots) == (1, 0)
    whole = read == -1 or (read and len(body) == read)
    assert counted == ([42 if body == USAGE and whole else 10] if tokens else [])
