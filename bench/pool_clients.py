"""Send calls to several deployments of a language model with tidegate's pool or litellm's router; see `pool_routers`.

python pool_clients.py NAME STORE CALLS CONCURRENCY STALL URL,REQUESTS,TOKENS …

Each process of a load runs this, in an environment with the library. STALL is for how many seconds the first call of
tidegate blocks its event loop after it has its permit, as the import of a module may do.
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
MAX_TOKENS: Final = 1000
PAUSE: Final = 1.0  # seconds after a refusal
Deployment = tuple[str, int, int]  # the URL, and the quotas of requests and tokens per minute


def tidegate(store: str, stall: float, deployments: list[Deployment]) -> Call:
    """An HTTP client with tidegate's transport; the processes share a store."""
    httpx, outbound = importlib.import_module("httpx"), importlib.import_module("tidegate.outbound")
    transports = importlib.import_module("tidegate.outbound.httpx")
    members = [
        {"name": f"d{place}", "url": url, "limits": [f"{requests}/1m", f"{tokens}/1m unit=tokens name=tpm"]}
        for place, (url, requests, tokens) in enumerate(deployments)
    ]
    settings = {"domain": "llm.test", "profile": "openai", "strict": True}
    providers = outbound.Providers.of({**settings, "pool": {"members": members}})
    stalls = [stall]

    class StallingTransport(httpx.AsyncHTTPTransport):  # type: ignore[misc,name-defined]  # httpx is imported here
        """Blocks the event loop before the first request is sent."""

        async def handle_async_request(self, request: Any) -> Any:  # noqa: ANN401 - as above
            if stalls:
                time.sleep(stalls.pop())  # noqa: ASYNC251 - that is what is measured
            return await super().handle_async_request(request)

    transport = transports.AsyncRateLimitTransport(providers, store, StallingTransport())
    client = httpx.AsyncClient(transport=transport, timeout=60)

    async def call() -> None:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS}
        (await client.post("http://llm.test/chat/completions", json=body)).raise_for_status()

    return call


def litellm(_store: str, _stall: float, deployments: list[Deployment]) -> Call:
    """The router of litellm, with limits of its deployments and routing by usage; each process counts for itself."""
    library: Any = importlib.import_module("litellm")
    library.suppress_debug_info = True
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}", "api_base": url, "api_key": "key", "rpm": requests, "tpm": tokens,
            },
        }
        for url, requests, tokens in deployments
    ]  # fmt: skip
    router = library.Router(model_list=models, routing_strategy="usage-based-routing-v2", enable_pre_call_checks=True)
    return lambda: router.acompletion(model=MODEL, messages=MESSAGES, max_tokens=MAX_TOKENS)


async def send_all(call: Call, count: int, concurrency: int) -> dict[str, float]:
    """Send so many calls, a number of them at the same time; a refused call is sent again after a second."""
    left, failed, begun = list(range(count)), 0, time.monotonic()

    async def work() -> None:
        nonlocal failed
        while left:
            left.pop()
            while True:
                try:
                    await call()
                    break
                except Exception as error:
                    status = getattr(getattr(error, "response", None), "status_code", None)
                    if (status or getattr(error, "status_code", 429)) != 429:
                        raise
                    failed += 1
                    await asyncio.sleep(PAUSE)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return {"seconds": time.monotonic() - begun, "failed": failed}


async def main(name: str, store: str, count: int, concurrency: int, stall: float, *listed: str) -> None:
    """Send the calls and print what happened, as JSON."""
    deployments = [(url, int(requests), int(tokens)) for url, requests, tokens in (each.split(",") for each in listed)]
    call = {"tidegate": tidegate, "litellm": litellm}[name](store, stall, deployments)
    print(json.dumps(await send_all(call, count, concurrency)))


if __name__ == "__main__":
    calls, at_once, blocked = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    asyncio.run(main(sys.argv[1], sys.argv[2], calls, at_once, blocked, *sys.argv[6:]))
