"""Bodies in memory: bounded together, and none of them stops the gateway for long."""

import asyncio
import io
import json
import time

import pytest

from tests.egress.harness import OTHER_TOKEN, TOKEN, running, settled
from tests.outbound.server import as_json
from tidegate.egress.bodies import MAX_COMPLEXITY
from tidegate.outbound.providers.profile_file import shipped_profile
from tidegate.outbound.quota.json_body import complexity
from tidegate.outbound.quota.request_tokens import read_request

PATH = "/up/v1/chat/completions"
LIMITED = {"profile": "openai", "limits": ["1/1h", "90_000_000/1h unit=tokens"]}
SHAPES = {"lists": b"[]", "mappings": b'{"a":{}}', "numbers": b"1", "strings": b'""', "deep": b"[" * 40 + b"]" * 40}


def listing(shape, size):
    return b'{"model": "m", "user": "\\u0041", "input": [' + b",".join([shape] * (size // (len(shape) + 1))) + b"]}"


async def test_the_bodies_of_waiting_requests_are_bounded_in_sum(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": ["x" * 50_000]}).encode()
    async with running(upstream.url, {"max_held_bodies": 220_000, "timeout": "60s"}, **LIMITED) as gateway:
        assert (await gateway.send("POST", PATH, data=body))[0] == 200
        await settled(lambda: gateway.gateway.held.size == 0)
        waiting = [asyncio.create_task(gateway.send("POST", PATH, data=body)) for _ in range(4)]
        await settled(lambda: gateway.gateway.held.size > 200_000)
        status, headers, answer = await gateway.send("POST", PATH, data=body)
        assert (status, json.loads(answer)["error"]["type"], headers["Retry-After"]) == (503, "bodies-full", "1")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await settled(lambda: gateway.gateway.held.size == 0)


async def test_one_caller_cannot_fill_the_memory_for_bodies(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": ["x" * 50_000]}).encode()
    callers = {"a": {"token": TOKEN}, "b": {"token": OTHER_TOKEN}}
    settings = {"callers": callers, "max_held_bodies": 220_000, "timeout": "60s"}
    limits = {"profile": "openai", "limits": ["2/1h", "90_000_000/1h unit=tokens"]}
    own, other = ({"Authorization": f"Bearer {token}"} for token in (TOKEN, OTHER_TOKEN))
    async with running(upstream.url, settings, **limits) as gateway:
        assert (await gateway.send("POST", PATH, data=body, headers=own))[0] == 200
        await settled(lambda: gateway.gateway.held.size == 0)
        assert (await gateway.send("POST", PATH, data=body, headers=own))[0] == 200
        waiting = [asyncio.create_task(gateway.send("POST", PATH, data=body, headers=own)) for _ in range(2)]
        await settled(lambda: gateway.gateway.held.size > 100_000)
        status, _, answer = await gateway.send("POST", PATH, data=body, headers=own)
        assert (status, json.loads(answer)["error"]["type"]) == (503, "bodies-full")
        assert "of caller a" in json.loads(answer)["error"]["message"]
        waiting.append(asyncio.create_task(gateway.send("POST", PATH, data=body, headers=other)))
        await settled(lambda: gateway.gateway.held.size > 150_000)  # another caller is not locked out
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await settled(lambda: gateway.gateway.held.size == 0)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_body_that_takes_long_to_parse_is_refused(upstream, shape):
    body = listing(SHAPES[shape], 7 * 2**20)
    async with running(upstream.url, **LIMITED) as gateway:
        status, _, answer = await gateway.send("POST", PATH, data=io.BytesIO(body))
        assert (status, json.loads(answer)["error"]["type"]) == (413, "too-large")
    assert not upstream.requests


@pytest.mark.parametrize("shape", SHAPES)
def test_a_body_of_the_highest_complexity_is_read_in_time(shape):
    """50 ms of processor time on the machine of the measurements; here, four times that is allowed."""
    each = complexity(listing(SHAPES[shape], 100_000)) / 100_000
    body = listing(SHAPES[shape], min(8 * 2**20, int(MAX_COMPLEXITY / each)))
    best = min(_read_time(body) for _ in range(3))
    assert best < 0.2


def _read_time(body):
    began = time.process_time()
    read_request(shipped_profile("openai"), "https://api.test/v1/responses", body)
    return time.process_time() - began


async def test_a_large_text_is_sent(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": ["a word, and another one.\n" * 60_000]}).encode()
    async with running(upstream.url, **LIMITED) as gateway:
        assert (await gateway.send("POST", PATH, data=io.BytesIO(body)))[0] == 200
