"""A call without a permit: it waits up to its deadline, then gets a 429 as the provider would send it."""

import asyncio
import json
from math import ceil

import pytest

from tests.egress.harness import TOKEN, running
from tests.outbound.server import Answer, as_json
from tidegate.testing import ManualClock

START = 1_728_000_000


async def denied(upstream, **fields):
    clock = ManualClock(start=START)
    async with running(upstream.url, {"timeout": 1}, clock=clock, limits=["1/1m"], **fields) as gateway:
        await gateway.get("/up/x")
        clock.advance(18.5)
        status, headers, body = await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"})
        assert status == 429
        exact = float(headers["X-Tidegate-Retry-After"])
        assert 41.5 <= exact <= 42.0  # a permit counts a little longer than the provider's period
        assert headers["Retry-After"] == str(ceil(exact))
        assert headers["Retry-After-Ms"] == str(ceil(exact * 1000))
        clock.advance(exact - 0.001)
        assert (await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"}))[0] == 429
        clock.advance(0.0011)
        assert (await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"}))[0] == 200
        return headers, json.loads(body)


async def test_a_denial_is_problem_details_without_a_profile(upstream):
    _, body = await denied(upstream)
    assert body["status"] == 429
    assert body["violated-policies"] == ["1m"]
    assert "provider up: rate limit reached (1m). Please try again in 41" in body["detail"]


@pytest.mark.parametrize(
    ("profile", "read"),
    [
        ("openai", lambda body: (body["error"]["code"], body["error"]["message"])),
        ("anthropic", lambda body: (body["error"]["type"], body["error"]["message"])),
        ("google", lambda body: (body["error"]["status"], body["error"]["message"])),
        ("mistral", lambda body: (body["type"], body["message"])),
        ("bedrock", lambda body: (body["__type"], body["message"])),
        ("azure", lambda body: (body["error"]["code"], body["error"]["message"])),
    ],
)
async def test_a_denial_has_the_form_of_its_provider(upstream, profile, read):
    _, body = await denied(upstream, profile=profile)
    kind, message = read(body)
    assert kind in {
        "rate_limit_exceeded",
        "rate_limit_error",
        "RESOURCE_EXHAUSTED",
        "rate_limited",
        "ThrottlingException",
    }
    assert "try again in 41." in message
    if profile == "google":
        assert body["error"]["details"][0]["retryDelay"].startswith("41.")


async def test_what_never_fits_says_that_no_retry_helps(upstream):
    fields = {"limits": ["10/1m", "100/1m unit=tokens"], "strict": True, "profile": "openai"}
    async with running(upstream.url, **fields) as gateway:
        body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 4000}]}
        status, headers, _ = await gateway.send("POST", "/up/v1/chat/completions", json=body)
        assert (status, headers["X-Should-Retry"]) == (429, "false")
        assert "Retry-After" not in headers
    assert not upstream.requests


async def test_a_call_waits_for_its_permit_and_says_how_long(upstream):
    clock = ManualClock(start=START)
    async with running(upstream.url, clock=clock, limits=["1/10s"]) as gateway:
        await gateway.get("/up/x")
        waiting = asyncio.create_task(gateway.get("/up/x"))
        counts = gateway.gateway.stats.counts("local", "up")
        while not counts.waiting:
            await asyncio.sleep(0.005)
        clock.advance(11)
        status, headers, _ = await waiting
        assert (status, float(headers["X-Tidegate-Waited"])) == (200, 11.0)
        assert (counts.requests, counts.waited) == (2, 11_000_000)


async def test_the_deadline_is_that_of_the_file_unless_the_call_has_one(upstream):
    clock = ManualClock(start=START)
    settings = {"timeout": 5, "whole_timeout": "50s"}
    async with running(upstream.url, settings, clock=clock, limits=["1/1h"]) as gateway:
        await gateway.get("/up/x")
        counts = gateway.gateway.stats.counts("local", "up")
        for given, seconds in ((None, 5), ("20", 20), ("7s", 7), ("9999", 50)):
            headers = {} if given is None else {"X-Tidegate-Timeout": given}
            call = asyncio.create_task(gateway.get("/up/x", headers=headers))
            while not counts.waiting:
                await asyncio.sleep(0.005)
            clock.advance(seconds - 0.5)
            await asyncio.sleep(0.02)
            assert not call.done()
            clock.advance(0.6)
            assert (await call)[0] == 429


@pytest.mark.parametrize(
    "header", [{"X-Tidegate-Timeout": "soon"}, {"X-Tidegate-Timeout": "-1"}, {"X-Tidegate-Priority": "x"}]
)
async def test_a_malformed_option_is_refused(upstream, header):
    async with running(upstream.url) as gateway:
        status, _, body = await gateway.get("/up/x", headers=header)
        assert (status, json.loads(body)["error"]["type"]) == (400, "bad-header")


async def test_a_higher_priority_goes_first_within_the_rights_of_the_caller(upstream):
    clock = ManualClock(start=START)
    callers = {"high": {"token": TOKEN, "max_priority": 50}, "low": {"token": TOKEN + "2", "max_priority": 0}}
    async with running(upstream.url, {"callers": callers}, clock=clock, limits=["1/10s"]) as gateway:
        await gateway.get("/up/first", headers={"X-Api-Key": TOKEN})
        asked = [("low", TOKEN + "2", "100"), ("plain", TOKEN, "0"), ("high", TOKEN, "40")]
        calls = []
        for name, token, priority in asked:
            headers = {"X-Api-Key": token, "X-Tidegate-Priority": priority, "X-Tidegate-Timeout": "100"}
            calls.append(asyncio.create_task(gateway.get(f"/up/{name}", headers=headers)))
            while gateway.gateway.gate.metrics()["waiting"] < len(calls):
                await asyncio.sleep(0.005)
        for number in range(3):
            clock.advance(11)
            while len(upstream.requests) < number + 2:
                await asyncio.sleep(0.005)
        await asyncio.gather(*calls)
    assert [request.path for request in upstream.requests[1:]] == ["/high", "/low", "/plain"]


async def test_a_refusal_of_the_provider_is_passed_on_and_learned_from(upstream):
    upstream.respond = lambda _request: Answer(429, (("Retry-After", "30"),), (b"slow down",))
    async with running(upstream.url) as gateway:
        status, headers, body = await gateway.get("/up/x")
        assert (status, headers["Retry-After"], body) == (429, "30", b"slow down")
        status, headers, _ = await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"})
        assert status == 429
        assert 20 <= int(headers["Retry-After"]) <= 30
        assert gateway.gateway.stats.counts("local", "up").refused == 1
    assert len(upstream.requests) == 1


async def test_a_refused_call_is_retried_as_the_providers_file_says(upstream):
    answers = iter([Answer(429, (("Retry-After", "1"),), (b"",)), as_json({"ok": 1})])
    upstream.respond = lambda _request: next(answers)
    clock = ManualClock(start=START)
    async with running(upstream.url, clock=clock, retries=1, profile="openai") as gateway:
        call = asyncio.create_task(gateway.send("POST", "/up/x", json={"a": 1}))
        while not call.done():
            clock.advance(0.5)
            await asyncio.sleep(0.005)
        assert (await call)[0] == 200
    assert [json.loads(request.body) for request in upstream.requests] == [{"a": 1}, {"a": 1}]


# ---- estimates -------------------------------------------------------------------------------------------------------


async def test_all_retries_together_have_the_deadline_of_the_call():
    """A connection that is lost again and again: each attempt waits for a permit, but not longer than the deadline."""
    accepted = asyncio.Semaphore(0)

    async def lose(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        accepted.release()

    server = await asyncio.start_server(lose, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    clock = ManualClock(start=START)
    async with running(url, clock=clock, limits=["1/10s"], retries=5) as gateway:
        call = asyncio.create_task(gateway.get("/up/x", headers={"X-Tidegate-Timeout": "15"}))
        for seconds in (10.5, 5):
            async with asyncio.timeout(10):
                await accepted.acquire()
                while not gateway.gateway.gate.metrics()["waiting"]:
                    await asyncio.sleep(0.005)
            assert not call.done()
            clock.advance(seconds)
        async with asyncio.timeout(10):
            assert (await call)[0] == 429
    server.close()


async def test_an_estimate_says_what_a_call_would_cost_and_wait(upstream):
    clock = ManualClock(start=START)
    fields = {"limits": ["1/1m", "10_000/1m unit=tokens name=tpm"], "profile": "openai"}
    question = {"url": "/up/v1/chat/completions", "body": {"model": "m", "max_tokens": 500, "messages": []}}
    async with running(upstream.url, clock=clock, **fields) as gateway:
        status, _, body = await gateway.send("POST", "/v1/egress/estimate", json=question)
        found = json.loads(body)
        assert (status, found["provider"], found["allowed"], found["wait"]) == (200, "up", True, 0.0)
        assert found["cost"]["requests"] == 1
        assert 500 <= found["cost"]["tokens"] <= 530
        await gateway.send("POST", "/up/v1/chat/completions", json=question["body"])
        found = json.loads((await gateway.send("POST", "/v1/egress/estimate", json=question))[2])
        assert not found["allowed"]
        assert 60 <= found["wait"] <= 60.5
        assert len(upstream.requests) == 1
        assert (await gateway.send("POST", "/v1/egress/estimate", data=b"[]"))[0] == 400
        assert (await gateway.send("POST", "/v1/egress/estimate", json={"url": "/no/x"}))[0] == 404
