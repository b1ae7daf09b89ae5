"""The recipes of docs/howto/llm.md for MCP: a client within a quota, and a server with limited tools."""

import asyncio
import os

import pytest
import uvicorn
from mcp.client.client import Client

from tests.recipes.checks import ONE, check_length, used
from tests.recipes.network import PORT_VARIABLE
from tests.recipes.page import denial_table, run_recipe, write_providers
from tidegate.outbound import find_denied, request_options


@pytest.fixture
async def tool_server(model_server, certificate):
    """Serve the tools of the recipe for servers at tools.example.com."""
    names = await run_recipe("mcp-server")
    app = names["server"].streamable_http_app(host="tools.example.com")
    files = {"ssl_certfile": str(certificate[0]), "ssl_keyfile": str(certificate[1])}
    config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1, **files)
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    os.environ[PORT_VARIABLE] = str(server.servers[0].sockets[0].getsockname()[1])  # monkeypatch restores it
    yield names
    server.should_exit = True
    await running
    await names["limiter"].close()


async def test_a_client_calls_a_tool_within_its_quota(tool_server):
    write_providers()
    names = await run_recipe("mcp-client")
    assert await names["ask"]("Ulm") == "Sunny in Ulm."
    assert used("tools.example.com")["1m"] == names["transport"].gate.metrics()["sent"] >= 2
    await names["http"].aclose()


async def test_a_denial_ends_the_session_of_a_client(tool_server):
    write_providers(tools=ONE)
    with pytest.raises(ExceptionGroup) as caught, request_options(timeout=0):
        await run_recipe("mcp-client")
    assert find_denied(caught.value) is not None
    assert denial_table()["MCP client"] == "ExceptionGroup"


async def test_a_tool_without_a_permit_is_a_tool_error(model_server):
    names = await run_recipe("mcp-server")
    async with names["limiter"] as limiter, Client(names["server"]) as client:
        result = await client.call_tool("forecast", {"city": "Ulm"})
        assert (result.content[0].text, result.is_error) == ("Sunny in Ulm.", False)
        await limiter.acquire("forecast", 29)
        result = await client.call_tool("forecast", {"city": "Ulm"})
        assert (result.content[0].text, result.is_error) == ("Error executing tool forecast", True)


@pytest.mark.parametrize("name", ["mcp-client", "mcp-server"])
def test_a_recipe_adds_three_lines(name):
    check_length(name)
