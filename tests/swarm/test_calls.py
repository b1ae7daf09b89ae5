"""Limits around tool calls: blocks and decorators, and the 429 responses that they detect."""

import asyncio
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest
import requests

from tests.cases import cases
from tests.swarm.conftest import START
from tidegate import ConfigError, Denied
from tidegate.swarm import AsyncMemoryLimiter, Capacity, MemoryLimiter
from tidegate.swarm._limited_calls import refusal_of


@pytest.fixture
def limiter(clock):
    with MemoryLimiter(clock=clock) as limiter:
        limiter.set_capacity("search", 2, 60)
        yield limiter


def test_limited_as_a_block(limiter):
    with limiter.limited("search") as decision:
        assert decision.allowed
        assert limiter.get_capacity("search") == Capacity("search", 1, 2, 60.0, 1)
    assert limiter.get_capacity("search") == Capacity("search", 1, 2, 60.0, 0), "the permit comes back with time"
    with limiter.limited("search", return_token=True):
        pass
    assert limiter.get_capacity("search") == Capacity("search", 1, 2, 60.0, 0), "or at once, if asked for"


def test_limited_as_a_decorator(limiter, clock):
    @limiter.limited(lambda tool, **_: tool, timeout=5, cost=lambda tool, pages: pages)
    def search(tool, pages):
        """Search."""
        return f"{tool} {pages}"

    assert search.__doc__ == "Search."
    assert search("search", pages=2) == "search 2"
    with pytest.raises(Denied):
        search("search", pages=1)
    assert clock.now() == START + 5


def test_other_errors_are_raised_and_not_announced(limiter):
    with pytest.raises(ZeroDivisionError), limiter.limited("search"):
        raise ZeroDivisionError
    assert limiter.get_capacity("search") == Capacity("search", 1, 2, 60.0, 0)


def http_error(status, **headers):
    request = httpx.Request("GET", "http://127.0.0.1/")
    response = httpx.Response(status, headers=headers, request=request)
    return httpx.HTTPStatusError("refused", request=request, response=response)


def requests_error(status, **headers):
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers)
    return requests.HTTPError("refused", response=response)


class OwnError(Exception):
    """As those of AI clients: the status is the exception's own."""

    def __init__(self, status, **headers):
        super().__init__(status)
        self.status_code = status
        self.headers = headers


@cases("make", [http_error, requests_error, OwnError])
@cases(
    ("status", "headers", "received"),
    [
        (429, {}, ("received 429 response", None)),
        (429, {"retry-after": "12"}, ("received 429 response", 12.0)),
        (429, {"retry-after": formatdate(START + 7, usegmt=True)}, ("received 429 response", 7.0)),
        (429, {"retry-after": "soon"}, ("received 429 response", None)),
        (503, {"retry-after": "5"}, ("received 503 response", 5.0)),
        (503, {}, None),
        (500, {"retry-after": "5"}, None),
        (404, {}, None),
    ],
)
def test_refusals_are_read_from_exceptions(make, status, headers, received):
    assert refusal_of(make(status, **headers), START) == received


def test_other_exceptions_are_not_refusals():
    for error in (None, ValueError("x"), OSError(429, "x"), Weird()):
        assert refusal_of(error, START) is None


class Weird(Exception):  # noqa: N818 - not one of ours
    response = SimpleNamespace(status_code="429?", headers=7)


def test_a_429_is_announced(limiter, clock):
    with pytest.raises(httpx.HTTPStatusError), limiter.limited("search"):
        raise http_error(429, **{"retry-after": "12"})
    capacity = limiter.get_capacity("search")
    assert (capacity.total, capacity.frozen_for, capacity.in_flight) == (1, 12.0, 0)


def test_a_429_is_not_announced_with_announce_off(limiter):
    with pytest.raises(httpx.HTTPStatusError), limiter.limited("search", announce=False):
        raise http_error(429)
    assert limiter.get_capacity("search").total == 2


async def test_async_blocks_and_decorators(clock):
    async with AsyncMemoryLimiter(clock=clock) as limiter:
        await limiter.set_capacity("search", 2, 60)

        @limiter.limited("search", timeout=1)
        async def search(question):
            await asyncio.sleep(0)
            if question == "too much":
                raise http_error(429)
            return question.upper()

        assert await search("what") == "WHAT"
        async with limiter.limited("search"):
            assert await limiter.get_capacity("search") == Capacity("search", 0, 2, 60.0, 1)
        clock.advance(60)
        with pytest.raises(httpx.HTTPStatusError):
            await search("too much")
        assert await limiter.get_capacity("search") == Capacity("search", 1, 1, 60.0, 0)
        with pytest.raises(ConfigError, match="is not a coroutine function"):
            limiter.limited("search")(len)


def test_invalid_uses_are_refused(limiter):
    async def coroutine():
        """Do nothing."""

    with pytest.raises(ConfigError, match="is a coroutine function"):
        limiter.limited("search")(coroutine)
    with pytest.raises(ConfigError, match="as a decorator"), limiter.limited(lambda: "search"):
        pass
