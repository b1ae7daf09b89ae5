"""Send calls to a language model within its quota, with one of several libraries; `token_limiters` runs this.

python token_clients.py NAME URL CALLS CONCURRENCY REQUESTS TOKENS

It runs in an environment with the library, so it imports nothing of the other modules. A call that is refused, by the
provider or by the library itself, is sent again after a second, until it succeeds.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Call = Callable[[], Awaitable[Any]]

MODEL: Final = "gpt-4o-mini"
MESSAGES: Final = [{"role": "user", "content": "What is the price of a litre of milk? " * 52}]  # about 500 tokens
INPUT: Final = len(json.dumps(MESSAGES)) // 4  # tokens, as the provider counts them
MAX_TOKENS: Final = 1000
PAUSE: Final = 1.0  # seconds after a refusal


def plain(url: str, _requests: int, _tokens: int) -> Call:
    """The SDK of OpenAI, with its own two retries."""
    client = importlib.import_module("openai").AsyncOpenAI(base_url=url, api_key="key")
    return lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS)


def tidegate(url: str, requests: int, tokens: int) -> Call:
    """The SDK with tidegate's transport."""
    openai, outbound = importlib.import_module("openai"), importlib.import_module("tidegate.outbound")
    transports = importlib.import_module("tidegate.outbound.httpx2")
    limits = [f"{requests}/1m", f"{tokens}/1m unit=tokens name=tpm"]
    providers = outbound.Providers.of({"domain": "127.0.0.1", "limits": limits, "profile": "openai"})
    transport = transports.AsyncRateLimitTransport(providers)
    http = openai.DefaultAsyncHttpxClient(transport=transport)
    client = openai.AsyncOpenAI(base_url=url, api_key="key", http_client=http, max_retries=0)
    return lambda: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS)


def token_throttle(url: str, requests: int, tokens: int) -> Call:
    """The SDK, with a reservation of the maximum before each call and a refund after it."""
    library, openai = importlib.import_module("token_throttle"), importlib.import_module("openai")
    quotas = [
        library.Quota(metric="requests", limit=requests, per_seconds=60),
        library.Quota(metric="tokens", limit=tokens, per_seconds=60),
    ]
    config = library.PerModelConfig(quotas=library.UsageQuotas(quotas))
    limiter = library.RateLimiter(config, backend=library.MemoryBackendBuilder())
    client = openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0)

    async def call() -> None:
        reservation = await limiter.acquire_capacity({"requests": 1, "tokens": INPUT + MAX_TOKENS}, MODEL)
        used = {"requests": 1, "tokens": 0}
        try:
            reply = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS)
            used["tokens"] = reply.usage.total_tokens
        finally:
            await limiter.refund_capacity(used, reservation)

    return call


def litellm(url: str, requests: int, tokens: int) -> Call:
    """The router of litellm, with limits of its deployment and routing by usage."""
    library: Any = importlib.import_module("litellm")
    library.suppress_debug_info = True
    settings = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "key", "rpm": requests, "tpm": tokens}
    deployments = [{"model_name": MODEL, "litellm_params": settings}]
    router = library.Router(
        model_list=deployments, routing_strategy="usage-based-routing-v2", enable_pre_call_checks=True
    )
    return lambda: router.acompletion(model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS)


async def send_all(call: Call, count: int, concurrency: int) -> dict[str, float]:
    """Send so many calls, a number of them at the same time."""
    left = list(range(count))
    failed = 0
    begun = time.monotonic()

    async def work() -> None:
        nonlocal failed
        while left:
            left.pop()
            while True:
                try:
                    await call()
                    break
                except Exception as error:
                    if getattr(error, "status_code", 429) != 429:  # a refusal of a library may have none
                        raise
                    failed += 1
                    await asyncio.sleep(PAUSE)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return {"begun": begun, "seconds": time.monotonic() - begun, "failed": failed}


async def main(name: str, url: str, *numbers: int) -> None:
    """Send the calls and print what happened, as JSON."""
    count, concurrency, requests, tokens = numbers
    call = {"plain": plain, "tidegate": tidegate, "token-throttle": token_throttle, "litellm": litellm}[name]
    print(json.dumps(await send_all(call(url, requests, tokens), count, concurrency)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
