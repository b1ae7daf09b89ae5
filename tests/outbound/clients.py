"""The four clients behind one way to use them: `fetch(kind, providers, urls)`."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, NamedTuple

import aiohttp
import httpx
import requests

from tidegate.outbound.aiohttp import RateLimitMiddleware
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.outbound.requests import RateLimitAdapter

QUICK = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing here is encrypted, and httpx loads certificates for long
KINDS = ("httpx", "httpx-async", "requests", "aiohttp")


class Fetched(NamedTuple):
    """An answer, as every client tells it."""

    status: int
    text: str
    url: str
    outcome: Any
    metrics: dict[str, int]


def fetch(kind, providers, urls, *, method="GET", body=None, headers=None, **options):
    """Fetch URLs one after another with one client."""
    if kind == "httpx":
        return _httpx(providers, urls, method, body, headers, options)
    if kind == "requests":
        return _requests(providers, urls, method, body, headers, options)
    run = _httpx_async if kind == "httpx-async" else _aiohttp
    return asyncio.run(run(providers, urls, method, body, headers, options))


def _httpx(providers, urls, method, body, headers, options):
    transport = RateLimitTransport(providers, transport=httpx.HTTPTransport(verify=QUICK), **options)
    with httpx.Client(transport=transport, follow_redirects=True, timeout=30) as client:
        found = []
        for url in urls:
            answer = client.request(method, url, content=body, headers=headers)
            found.append((answer.status_code, answer.text, str(answer.url), answer.extensions["tidegate"]))
        return [Fetched(*each, transport.gate.metrics()) for each in found]


async def _httpx_async(providers, urls, method, body, headers, options):
    transport = AsyncRateLimitTransport(providers, transport=httpx.AsyncHTTPTransport(verify=QUICK), **options)
    async with httpx.AsyncClient(transport=transport, follow_redirects=True, timeout=30) as client:
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
