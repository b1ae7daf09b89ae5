"""What every recipe must do, checked against the server that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.recipes.bodies import REPLY
from tests.recipes.page import call, denial_table, recipe_blocks, run_recipe, write_providers
from tidegate import Limiter
from tidegate.outbound import Providers, find_denied, request_options

if TYPE_CHECKING:
    from tests.recipes.model_server import ModelServer

ONE = "[1/1h]"
TIDEGATE_WORDS = ("tidegate", "RateLimitTransport", "AsyncLimiter", "limiter")


def used(host: str) -> dict[str, int]:
    """Return what the quota of a host has counted, by limit."""
    provider = Providers.load(directories=["providers"]).match(f"https://{host}")
    assert provider is not None
    with Limiter(provider.policy, store="sqlite:///quota.db") as limiter:
        return {name: usage.used for name, usage in limiter.usage(host).items()}


async def check_answer(name: str, server: ModelServer, host: str, expected: dict[str, int]) -> dict[str, Any]:
    """Run a recipe once: its answer arrives, and the quota counts what the provider says."""
    write_providers()
    names = await run_recipe(name, 1)
    assert await call(names["ask"], "And the second longest?") == REPLY
    assert [request.headers["host"] for request in server.requests] == [host, host]
    assert used(host) == expected
    return names


async def check_denial(name: str, server: ModelServer, sdk: str) -> None:
    """Use up the quota: the next call raises what the page says, sends nothing, and asks for one permit only."""
    write_providers(openai=ONE, anthropic=ONE, gemini=ONE, mistral=ONE)
    names = await run_recipe(name, 1)
    with pytest.raises(Exception) as caught, request_options(timeout=0):  # noqa: PT011 - the page says which
        await call(names["ask"], "And the second longest?")
    denied = find_denied(caught.value)
    assert denied is not None
    assert (denied.decision.retry_after or 0) > 3000
    assert type(caught.value).__name__ == denial_table()[sdk]
    assert len(server.requests) == 1
    assert names["transport"].gate.metrics()["denied"] == 1


def check_length(name: str) -> None:
    """A recipe adds at most three lines to the SDK's own."""
    block = recipe_blocks(name)[0]
    added = [line for line in block.code.split("\n") if any(word in line for word in TIDEGATE_WORDS)]
    assert 1 <= len(added) <= 3
