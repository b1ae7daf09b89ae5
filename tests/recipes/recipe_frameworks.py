"""The examples of docs/howto/agent-frameworks.md, against the real packages."""

import inspect
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import agents
import fastmcp
import pytest
from celery.contrib.testing.worker import start_worker
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from mcp.client.client import Client
from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models.function import FunctionModel

from tests.docs.blocks import blocks_of, run_blocks
from tidegate.agents import AsyncRun, RunDenied
from tidegate.agents.langchain import AsyncRunCallback
from tidegate.agents.pydantic_ai import RunBudget
from tidegate.inbound.mcp import ToolDenial, ToolLimits
from tidegate.outbound import find_denied

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "agent-frameworks.md"
QUESTION = "Which river is the longest?"


async def example(name):
    """Run an example of the page in the current folder, and return its names."""
    names = {"__name__": "__main__"}
    for result in run_blocks(PAGE, [block for block in blocks_of(PAGE) if block.recipe == name], names):
        if inspect.iscoroutine(result):
            await result
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- pydantic-ai -----------------------------------------------------------------------------------------------------


async def test_pydantic_ai_is_charged_before_each_call_and_settled_to_its_usage():
    ask = (await example("framework-pydantic-ai"))["ask"]
    output, usage, rows = await ask(QUESTION)
    assert "the Nile" in output
    (planner,) = usage.children
    assert planner.name == "planner"
    assert usage.used["tool:search"] == 1
    assert 0 < usage.used["tokens"] < 1000
    assert {(row.tool, row.model) for row in rows if row.node == "research/planner"} == {("search", ""), ("", "test")}


async def test_pydantic_ai_is_stopped_before_the_call():
    calls = []

    def respond(messages, info):
        calls.append(messages)
        return ModelResponse(parts=[TextPart("done")])

    async with AsyncRun("r", store="memory://", limits="3_000/run unit=tokens") as run:
        agent = Agent(FunctionModel(respond), capabilities=[RunBudget(run, estimate={"tokens": 4_000})])
        with pytest.raises(RunDenied, match="3000 of 3000 tokens left, and the call needs 4000"):
            await agent.run(QUESTION)
        assert not calls
        free = Agent(FunctionModel(respond), name="free", capabilities=[RunBudget(run)])
        await free.run(QUESTION)
        assert {(child.name, child.status) for child in (await run.usage()).children} == {
            ("agent", "closed"),
            ("free", "closed"),
        }
        assert len(calls) == 1, "without an estimate, models are not charged"


# ---- LangChain -------------------------------------------------------------------------------------------------------


async def test_langgraph_is_stopped_before_the_call():
    names = await example("framework-langchain")
    assert [names["ask"](QUESTION) for _ in range(2)] == ["The Nile."] * 2
    run = names["run"]
    assert run.usage().used == {"tokens": 240, "tool:search": 2, "requests": 4}
    assert names["ask"](QUESTION) == "The Nile."
    with pytest.raises(RunDenied, match="3940 of 4300 tokens left"):
        names["ask"](QUESTION)
    assert {(row.tool, row.used["requests"]) for row in run.report() if row.tool} == {("search", 4)}


async def test_langgraph_in_tasks():
    usage = {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}
    model = GenericFakeChatModel(messages=iter([AIMessage("yes", usage_metadata=usage)] * 9))
    async with AsyncRun("r", store="memory://", limits="4_200/run unit=tokens") as run:
        config = {"callbacks": [AsyncRunCallback(run, estimate={"tokens": 4_000})]}
        assert (await model.ainvoke(QUESTION, config)).content == "yes"
        assert (await model.ainvoke(QUESTION, config)).content == "yes"
        with pytest.raises(RunDenied):
            await model.ainvoke(QUESTION, config)
        assert (await run.usage()).used == {"tokens": 240, "requests": 2}


# ---- OpenAI Agents SDK -----------------------------------------------------------------------------------------------


def openai_model(*outputs):
    class Fake(agents.Model):
        calls = 0

        async def get_response(self, *_args, **_options):
            output = outputs[min(self.calls, len(outputs) - 1)]
            type(self).calls += 1
            usage = agents.Usage(requests=1, input_tokens=100, output_tokens=20, total_tokens=120)
            return agents.ModelResponse(output=[output], usage=usage, response_id=None)

        def stream_response(self, *_args, **_options):
            raise NotImplementedError

    return Fake()


def said(text):
    content = ResponseOutputText(text=text, type="output_text", annotations=[])
    return ResponseOutputMessage(id="1", content=[content], role="assistant", status="completed", type="message")


def calls_tool(number):
    arguments = json.dumps({"query": "rivers"})
    return ResponseFunctionToolCall(
        id=f"f{number}", call_id=f"c{number}", name="search", arguments=arguments, type="function_call"
    )


async def test_openai_agents_are_charged():
    ask = (await example("framework-openai-agents"))["ask"]
    output, usage = await ask(QUESTION, openai_model(calls_tool(1), said("The Nile.")))
    assert output == "The Nile."
    assert usage.used == {"tokens": 240, "tool:search": 1, "requests": 3}
    assert [child.name for child in usage.children] == ["planner"]


async def test_openai_agents_are_stopped_before_the_call():
    ask = (await example("framework-openai-agents"))["ask"]
    error, usage = await ask(QUESTION, openai_model(calls_tool(1), calls_tool(2), said("never")))
    denied = find_denied(error)  # the SDK raises an error of its own about a tool
    assert isinstance(denied, RunDenied)
    assert denied.limit == "tool:search-run"
    assert usage.used["tool:search"] == 1


# ---- MCP -------------------------------------------------------------------------------------------------------------


async def test_the_tools_of_the_official_sdk():
    names = await example("framework-mcp")
    async with Client(names["server"]) as client:
        for _ in range(2):
            result = await client.call_tool("forecast", {"city": "Ulm"})
            assert (result.content[0].text, result.is_error) == ("Sunny in Ulm.", False)
        denied = await client.call_tool("forecast", {"city": "Ulm"})
        assert denied.is_error
        assert "was not called: the rate limit of 2 requests per 1m is used up. Try again in" in denied.content[0].text
        about = denied.meta["tidegate/rate-limit"]
        assert (about["code"], about["tool"], about["limits"]) == (429, "forecast", ["1m"])
        assert 0 < about["retry_after"] <= 60
        assert len((await client.list_tools()).tools) == 1, "only calls are limited"
    async with Client(names["server"]) as again:
        assert (await again.call_tool("forecast", {"city": "Ulm"})).is_error, "a new session is no new identity"
    await names["limits"].close()
    renewed = await example("framework-mcp")
    async with Client(renewed["server"]) as client:
        assert (await client.call_tool("forecast", {"city": "Ulm"})).is_error, "the store is durable"
    await renewed["limits"].close()


async def test_the_tools_of_fastmcp():
    names = await example("framework-fastmcp")
    async with fastmcp.Client(names["server"]) as client:
        for _ in range(2):
            assert (await client.call_tool("forecast", {"city": "Ulm"})).data == "Sunny in Ulm."
        denied = await client.call_tool("forecast", {"city": "Ulm"}, raise_on_error=False)
        assert denied.is_error
        assert "Try again in" in denied.content[0].text
        assert denied.meta["tidegate/rate-limit"]["code"] == 429
    await names["limits"].close()


@pytest.mark.parametrize("kind", ["mcp", "fastmcp"])
async def test_the_error_of_the_protocol_has_code_429(kind):
    limits = ToolLimits({"t": "1/1m"}, errors="protocol")
    if kind == "mcp":
        server = MCPServer("s", middleware=[limits.middleware()])
        server.tool(name="t")(lambda: "ok")
    else:
        server = fastmcp.FastMCP("s")
        server.add_middleware(limits.fastmcp_middleware())
        server.tool(name="t")(lambda: "ok")
    async with (Client if kind == "mcp" else fastmcp.Client)(server) as client:
        await client.call_tool("t", {})
        with pytest.raises(MCPError) as caught:
            await client.call_tool("t", {})
    assert caught.value.error.code == 429
    assert not -32099 <= caught.value.error.code <= -32020
    assert caught.value.error.data["retry_after"] <= 60
    assert "Try again in" in caught.value.error.message


async def test_costs_identities_and_all_tools_together():
    limits = ToolLimits({"a": "10/1m", "*": "6/1m"}, costs={"a": 4})
    middleware = limits.middleware()

    class Context:
        method = "tools/call"
        params = {"name": "a", "arguments": {}}  # noqa: RUF012 - of one test

    async def call_next(_):
        return "called"

    async def call(client, subject=None, tool="a"):
        token = AccessToken(token="t", client_id=client, scopes=[], subject=subject)  # noqa: S106 - of a test
        reset = auth_context_var.set(AuthenticatedUser(token))
        context = Context()
        context.params = {"name": tool, "arguments": {}}
        try:
            return await middleware(context, call_next)
        finally:
            auth_context_var.reset(reset)

    assert await call("one") == "called"
    assert (await call("one")).is_error, "4 of 6 are used, and it costs 4"
    assert await call("two") == "called"
    assert await call("one", "alice") == "called"
    assert (await call("one", "alice")).is_error
    assert await call("one", "bob") == "called"
    assert [await call("one", tool="b") for _ in range(2)] == ["called"] * 2
    assert (await call("one", tool="b")).is_error
    never = await ToolLimits({"a": "3/1m"}, costs={"a": 4}).reserve("a", "x")
    assert isinstance(never, ToolDenial)
    assert never.retry_after is None
    assert "Do not try again" in never.message


# ---- Celery ----------------------------------------------------------------------------------------------------------


async def test_celery_queues_a_task_again_for_the_exact_time():
    names = await example("framework-celery")
    app, fetch = names["app"], names["fetch"]
    began = time.monotonic()
    with start_worker(app, pool="threads", concurrency=2, perform_ping_check=False, loglevel="ERROR"):
        results = [fetch.delay(number) for number in range(5)]
        found = [each.get(timeout=60, disable_sync_subtasks=False) for each in results]
    took = time.monotonic() - began
    assert found == list(range(5))
    assert took >= 1.9, "two in a second: the last one in the third window"
    names["Fetch"].limiter.close()


# ---- Scrapy ----------------------------------------------------------------------------------------------------------

SPIDER = """
import json, sys, time
import scrapy
from scrapy.crawler import CrawlerProcess

names = {{}}
exec(open("settings.py").read(), names)
times = []

class Spider(scrapy.Spider):
    name = "s"

    async def start(self):
        for number in range({count}):
            yield scrapy.Request("http://127.0.0.1:{port}/" + str(number), dont_filter=True)

    def parse(self, response):
        times.append(response.status)

process = CrawlerProcess({{**names["SETTINGS"], "LOG_LEVEL": "ERROR", "TELNETCONSOLE_ENABLED": False}})
process.crawl(Spider)
process.start()
print(json.dumps(times))
"""


class Counting(BaseHTTPRequestHandler):
    arrivals: list[tuple[float, str]]
    refuse_first = False

    def do_GET(self):
        self.arrivals.append((time.monotonic(), self.path))
        refused = self.refuse_first and len(self.arrivals) == 1
        self.send_response(429 if refused else 200)
        if refused:
            self.send_header("Retry-After", "2")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("refuse", [False, True])
def test_scrapy_obeys_quotas_and_retry_after(folder, refuse):
    handler = type("Handler", (Counting,), {"arrivals": [], "refuse_first": refuse})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / "providers").mkdir()
    limit = "100/1s" if refuse else "3/1s fixed_window"
    (folder / "providers" / "local.yaml").write_text(f"domain: 127.0.0.1\nlimits: [{limit}]\n")
    (folder / "settings.py").write_text(next(b.code for b in blocks_of(PAGE) if b.recipe == "framework-scrapy"))
    (folder / "spider.py").write_text(SPIDER.format(count=1 if refuse else 7, port=server.server_port))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    try:
        done = subprocess.run(
            [sys.executable, "spider.py"], capture_output=True, text=True, timeout=90, env=environment, check=False
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    times = [at for at, _ in handler.arrivals]
    if refuse:
        assert len(times) == 2
        assert times[1] - times[0] >= 2, "the retry waits for as long as Retry-After says"
    else:
        assert json.loads(done.stdout.splitlines()[-1]) == [200] * 7
        assert times[3] - times[0] >= 0.9
        assert times[6] - times[3] >= 0.9


def test_the_page_has_an_example_of_each_package():
    found = {block.recipe for block in blocks_of(PAGE) if block.recipe}
    kinds = ("pydantic-ai", "langchain", "openai-agents", "mcp", "fastmcp", "celery", "scrapy")
    assert found == {f"framework-{kind}" for kind in kinds}
