"""One interface to all client libraries: `fetch(kind, providers, urls)`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, NamedTuple

import aiohttp
import httpx
import httpx2
import requests

from tidegate.outbound import httpx as httpx_adapter
from tidegate.outbound import httpx2 as httpx2_adapter
from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.requests import RateLimitAdapter

QUICK = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing here is encrypted, and httpx loads certificates for long
KINDS = ("httpx", "httpx-async", "httpx2", "httpx2-async", "requests", "aiohttp")
# Each library with its adapter: both have the same names.
HTTPX_LIBRARIES: dict[str, Any] = {"httpx": (httpx, httpx_adapter), "httpx2": (httpx2, httpx2_adapter)}


class Fetched(NamedTuple):
    """An answer, as every client tells it."""

    status: int
    text: str
    url: str
    outcome: Any
    metrics: dict[str, int]


def fetch(kind, providers, urls, *, method="GET", body=None, headers=None, **options):
    """Fetch URLs one after another with one client."""
    arguments = (providers, urls, method, body, headers, options)
    if kind in HTTPX_LIBRARIES:
        return _httpx(*HTTPX_LIBRARIES[kind], *arguments)
    if kind == "requests":
        return _requests(*arguments)
    name = kind.removesuffix("-async")
    run = _httpx_async(*HTTPX_LIBRARIES[name], *arguments) if name in HTTPX_LIBRARIES else _aiohttp(*arguments)
    return asyncio.run(run)


def _httpx(library, adapter, providers, urls, method, body, headers, options):
    transport = adapter.RateLimitTransport(providers, transport=library.HTTPTransport(verify=QUICK), **options)
    with library.Client(transport=transport, follow_redirects=True, timeout=30) as client:
        found = []
        for url in urls:
            answer = client.request(method, url, content=body, headers=headers)
            found.append((answer.status_code, answer.text, str(answer.url), answer.extensions["tidegate"]))
        return [Fetched(*each, transport.gate.metrics()) for each in found]


async def _httpx_async(library, adapter, providers, urls, method, body, headers, options):
    inner = library.AsyncHTTPTransport(verify=QUICK)
    transport = adapter.AsyncRateLimitTransport(providers, transport=inner, **options)
    async with library.AsyncClient(transport=transport, follow_redirects=True, timeout=30) as client:
        found = []
        for url in urls:
            answer = await client.request(method, url, content=body, headers=headers)
            found.append((answer.status_code, answer.text, str(answer.url), answer.extensions["tidegate"]))
        return [Fetched(*each, transport.gate.metrics()) for each in found]


def _requests(providers, urls, method, body, headers, options):
    adapter = RateLimitAdapter(providers, **options)
    with requests.Session() as session:
        session.mount("http://", adapter)
        session.mount("https://", adapter)
        found = []
        for url in urls:
            answer = session.request(method, url, data=body, headers=headers, timeout=30)
            found.append((answer.status_code, answer.text, answer.url, vars(answer)["tidegate"]))
        return [Fetched(*each, adapter.gate.metrics()) for each in found]


async def _aiohttp(providers, urls, method, body, headers, options):
    middleware = RateLimitMiddleware(providers, **options)
    async with middleware, aiohttp.ClientSession(middlewares=[middleware]) as session:
        found = []
        for url in urls:
            async with session.request(method, url, data=body, headers=headers) as answer:
                text = await answer.text()
                found.append((answer.status, text, str(answer.url), middleware.outcome_of(answer)))
        return [Fetched(*each, middleware.gate.metrics()) for each in found]
