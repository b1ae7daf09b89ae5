"""The drawings of ARCHITECTURE.md are what runs: the layers of the contract, and the functions of a traced call."""

import asyncio
import re
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.service.harness import InProcessService
from tidegate import Limiter
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.inbound.starlette import limit
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.testing import ManualClock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
DRAWN = re.compile(r"▼ ([\w/]+\.py) +([\w.<>]+)")
MAX_WORDS = 2500
OPENAI = "domain: api.openai.com\nprofile: openai\nlimits: [100/1m, 100000/1m unit=tokens]\n"


def drawing(name):
    """The text of a drawing."""
    found = re.search(rf"<!-- drawing: {name} -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert found, f"there is no drawing {name!r}"
    return found[1]


def drawn_functions(name):
    functions = [found.groups() for found in DRAWN.finditer(drawing(name))]
    assert len(functions) >= 4, "a drawing of a call names functions"
    return functions


def entered_by(call):
    """The functions of the package that a call enters, as (file, name), in the order of their first call."""
    seen = {}

    def profile(frame, event, _argument):
        _, package, file = frame.f_code.co_filename.rpartition("/src/tidegate/")
        if event == "call" and package:
            seen.setdefault((file, frame.f_code.co_qualname), len(seen))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(seen)


def misplaced(name, call):
    """What a drawing has that a call does not enter, or not in this order."""
    waiting = drawn_functions(name)
    for function in entered_by(call):
        if waiting and function == waiting[0]:
            waiting = waiting[1:]
    return waiting


def test_the_layers_are_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (each["layers"] for each in contracts if each["id"] == "layers")
    drawn = [re.split(r" {2,}", line)[0].split(" | ") for line in drawing("layers").splitlines()]
    internal = {"__main__", "_demo", "testing"}  # above everything that users of the library import
    expected = [[name.strip("() ") for name in layer.split("|")] for layer in layers]
    assert drawn == [layer for layer in expected if not internal & {*layer}]


def test_a_decision_enters_what_is_drawn():
    with Limiter(["100/1m", "1000/1h sliding_log"], observer=lambda _record: None) as limiter:
        assert misplaced("decision", lambda: limiter.try_acquire("user:42", cost=3)) == []


def test_a_request_enters_what_is_drawn():
    @limit("100/1m")
    async def search(_request):
        return PlainTextResponse("found")

    app = RateLimitMiddleware(Starlette(routes=[Route("/search", search)]), config=None)

    async def ask():
        transport = httpx.ASGITransport(app, client=("192.0.2.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            assert (await client.get("/search")).text == "found"

    assert misplaced("request", lambda: asyncio.run(ask())) == []


def test_a_call_enters_what_is_drawn(tmp_path):
    file = tmp_path / "openai.yaml"
    file.write_text(OPENAI, encoding="utf-8")
    body = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}
    provider = httpx.MockTransport(lambda _request: httpx.Response(200, json=body))
    transport = RateLimitTransport(Providers.load(files=[file]), transport=provider, clock=ManualClock())
    with httpx.Client(transport=transport) as client:
        question = {"model": "gpt-4o", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]}
        assert misplaced("call", lambda: client.post("https://api.openai.com/v1/chat/completions", json=question)) == []


def test_a_request_of_the_service_enters_what_is_drawn():
    async def ask():
        async with InProcessService(policies={"api": "5/1m"}) as service:
            assert (await service.post("acquire", {"policy": "api", "key": "user:42"})).json()["allowed"]

    assert misplaced("service", lambda: asyncio.run(ask())) == []


def test_the_page_is_short():
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    assert len(prose.split()) <= MAX_WORDS


@pytest.mark.parametrize("name", ["decision", "request", "call", "service"])
def test_a_function_that_is_not_entered_is_found(name):
    assert misplaced(name, lambda: None) == drawn_functions(name)
