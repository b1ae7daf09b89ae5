"""A call that reaches the provider long after its permit was taken: its tokens count from then on."""

import pytest

from tests.egress.harness import running
from tests.outbound.flows import settle
from tests.outbound.server import as_json
from tidegate.egress._addresses import AddressCheck
from tidegate.testing import ManualClock

START = 1_728_000_000
NOT_NOW = {"X-Tidegate-Timeout": "0"}
LARGE = "x" * 600_000  # sent in several pieces


async def pieces():
    """A body that arrives in pieces; its length is declared, because the provider reads no chunks."""
    yield b"first"
    yield b"second"


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"limits": ["10000/1m unit=tokens"], "profile": "openai"}, {"json": {"max_tokens": 6000}}),
        ({"limits": ["1_000_000/1m unit=tokens"], "profile": "openai"}, {"json": {"max_tokens": 600_000, "x": LARGE}}),
        (
            {"limits": ["10000/1m"], "endpoints": [{"path": "/*", "cost": 6000}]},
            {"data": pieces, "headers": {"Content-Length": "11"}},
        ),
    ],
    ids=["small", "large", "streamed"],
)
async def test_permits_count_from_when_the_body_was_written(upstream, fields, body):
    """The gateway waits for the name of the provider to be resolved."""
    clock, delays = ManualClock(start=START), [5.0]

    async def look_up(_host, _port):
        clock.advance(delays.pop())
        return ["127.0.0.1"]

    usage = {"prompt_tokens": 1, "completion_tokens": 600_000 if "x" in body.get("json", {}) else 6000}
    upstream.respond = lambda _request: as_json({"usage": usage})
    url = upstream.url.replace("127.0.0.1", "up.test")
    addresses = AddressCheck(["up.test"], look_up)
    async with running(url, {"allow_private": ["up.test"]}, addresses, clock=clock, **fields) as gateway:

        async def status():
            options = {name: value() if callable(value) else value for name, value in body.items()}
            options["headers"] = {**NOT_NOW, **options.get("headers", {})}
            return (await gateway.send("POST", "/up/v1/chat/completions", **options))[0]

        assert await status() == 200
        assert clock.now() == START + 5
        clock.advance(65.29 - 5)
        assert await status() == 429
        clock.advance(0.02)
        assert await status() == 200
    first, second = (request.body for request in upstream.requests)
    assert first == second
    assert not delays


async def test_a_request_without_a_body_counts_from_the_attempt_that_was_sent(upstream):
    """The first attempts do not reach the provider: its name is not resolved."""
    clock, attempts = ManualClock(start=START), []

    async def look_up(_host, _port):
        attempts.append(clock.now())
        await settle()  # what was started before the connection was opened
        clock.advance(1.0)
        if len(attempts) < 3:
            raise OSError("no such name")
        return ["127.0.0.1"]

    fields = {"limits": ["10000/1m"], "endpoints": [{"path": "/*", "cost": 6000}], "retries": {"max": 5}}
    url = upstream.url.replace("127.0.0.1", "up.test")
    addresses = AddressCheck(["up.test"], look_up)
    async with running(url, {"allow_private": ["up.test"]}, addresses, clock=clock, **fields) as gateway:
        assert (await gateway.get("/up/x"))[0] == 200
        clock.advance(attempts[2] + 60.2 - clock.now())
        assert (await gateway.get("/up/x", headers=NOT_NOW))[0] == 429
        clock.advance(0.2)
        assert (await gateway.get("/up/x", headers=NOT_NOW))[0] == 200
