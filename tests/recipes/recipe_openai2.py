"""The recipes of docs/howto/llm.md for SDKs on openai 2, and so on httpx; they have an environment of their own."""

import pytest

from tests.recipes.checks import check_answer, check_denial, check_length

RECIPES = [("litellm", "litellm"), ("llama-index", "LlamaIndex")]
NAMES = [row[0] for row in RECIPES]


@pytest.mark.parametrize("name", NAMES)
async def test_a_call_is_answered_and_counted(name, model_server):
    await check_answer(name, model_server, "api.openai.com", {"1m": 2, "tpm": 84})


@pytest.mark.parametrize(("name", "sdk"), RECIPES, ids=NAMES)
async def test_a_denial_reaches_the_caller_and_nothing_is_sent(name, sdk, model_server):
    await check_denial(name, model_server, sdk)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_adds_three_lines(name):
    check_length(name)
