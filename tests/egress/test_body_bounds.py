"""Bodies in memory: bounded together, and none of them stops the gateway for long."""

import asyncio
import io
import json
import time

import pytest

from tests.cases import cases
from tests.egress.harness import OTHER_TOKEN, TOKEN, running, settled
from tests.outbound.server import as_json
from tidegate.egress._bodies import MAX_COMPLEXITY
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.json_body import complexity
from tidegate.outbound._quota.request_tokens import read_request

PATH = "/up/v1/chat/completions"
LIMITED = {"profile": "openai", "limits": ["1/1h", "90_000_000/1h unit=tokens"]}
SHAPES = {
    "lists": b"[]",
    "mappings": b'{"a":{}}',
    "numbers": b"1",
    "strings": b'""',
    "deep": b"[" * 40 + b"]" * 40,
    "slow floats": b"2.2250738585072011e-308",
    "long integers": b"1234567890" * 400,
}


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


HIDDEN = {
    "utf-16": lambda rest: ('{"model": "\\"", "input": [' + rest.decode() + "]}").encode("utf-16"),
    "backslashes": lambda rest: b'{"model": "\\\\", "input": [' + rest + b"]}",
    "quotes": lambda rest: b'{"model": "\\\\\\"", "input": [' + rest + b"]}",
}


@pytest.mark.parametrize("how", HIDDEN)
async def test_structure_cannot_be_hidden_in_a_string(upstream, how):
    """A reader that counts quotes wrongly would take the structure for a part of a string."""
    body = HIDDEN[how](b",".join([b"[]"] * 500_000))
    json.loads(body)  # valid, and slow
    async with running(upstream.url, **LIMITED) as gateway:
        status, _, answer = await gateway.send("POST", PATH, data=io.BytesIO(body))
        assert (status, json.loads(answer)["error"]["type"]) == (413, "too-large")
    assert not upstream.requests


@cases("path", [PATH, "/up/v1/files"])
@cases("shape", SHAPES)
async def test_a_body_that_takes_long_to_parse_is_refused(upstream, shape, path):
    body = listing(SHAPES[shape], 7 * 2**20)
    headers = {"Content-Type": "application/json"}
    async with running(upstream.url, **LIMITED) as gateway:
        status, _, answer = await gateway.send("POST", path, data=io.BytesIO(body), headers=headers)
        assert (status, json.loads(answer)["error"]["type"]) == (413, "too-large")
    assert not upstream.requests


@pytest.mark.parametrize("shape", SHAPES)
def test_a_body_of_the_highest_complexity_is_read_in_time(shape):
    """50 ms of processor time on the machine of the measurements; here, four times that is allowed."""
    each = complexity(listing(SHAPES[shape], 100_000), 0) / 100_000
    body = listing(SHAPES[shape], min(8 * 2**20, int(MAX_COMPLEXITY / each)))
    best = min(_read_time(body) for _ in range(3))
    assert best < 0.2


def _read_time(body):
    began = time.process_time()
    read_request(shipped_profile("openai"), "https://api.test/v1/responses", body)
    return time.process_time() - began


ROWS = json.dumps([{"id": number, "name": f"row {number}", "values": [1, 2, 3]} for number in range(45_000)])
PROMPTS = {
    "text": "a word, and another one: [see] below.\n" * 150_000,
    "code": "def f(a: int, b: str) -> dict[str, int]:\n    return {b: a, 'x': [a, {b: '\\\\'}]}\n" * 35_000,
    "json": ROWS,
    "unicode": "wörter, ünd {mehr}: " * 200_000,
}


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_a_large_prompt_is_sent(upstream, prompt):
    """Punctuation inside of a string takes no time to parse."""
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [PROMPTS[prompt]]}, ensure_ascii=False).encode()
    assert len(body) > 2_500_000
    assert min(_read_time(body) for _ in range(3)) < 0.2
    async with running(upstream.url, **LIMITED) as gateway:
        assert (await gateway.send("POST", PATH, data=io.BytesIO(body)))[0] == 200
