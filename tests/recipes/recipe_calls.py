"""The recipes of docs/howto/llm.md for SDKs on httpx2."""

import re

import anthropic
import httpx
import openai
import pytest
from google.genai import errors as genai_errors
from mistralai.client import errors as mistral_errors

from tests.recipes.bodies import REPLY
from tests.recipes.checks import check_answer, check_denial, check_length, used
from tests.recipes.page import run_recipe, write_providers
from tidegate import Denied
from tidegate.outbound import request_options

OPENAI = ("api.openai.com", {"1m": 2, "tpm": 84})
ANTHROPIC = ("api.anthropic.com", {"1m": 2, "itpm": 24, "otpm": 60})
# The name of each recipe, of its SDK in the table of denials, its host, and what two calls use.
RECIPES = [
    ("openai", "openai 3", *OPENAI),
    ("openai-async", "openai 3", *OPENAI),
    ("anthropic", "anthropic", *ANTHROPIC),
    ("google-genai", "google-genai", "generativelanguage.googleapis.com", {"1m": 2, "tpm": 24}),
    ("mistralai", "mistralai", "api.mistral.ai", {"1m": 2, "tpm": 84}),
    ("langchain", "LangChain", *OPENAI),
    ("pydantic-ai", "pydantic-ai", *OPENAI),
]
NAMES = [row[0] for row in RECIPES]


@pytest.mark.parametrize(("name", "sdk", "host", "expected"), RECIPES, ids=NAMES)
async def test_a_call_is_answered_and_counted(name, sdk, host, expected, model_server):
    await check_answer(name, model_server, host, expected)


@pytest.mark.parametrize(("name", "sdk", "host", "expected"), RECIPES, ids=NAMES)
async def test_a_denial_reaches_the_caller_and_nothing_is_sent(name, sdk, host, expected, model_server):
    await check_denial(name, model_server, sdk)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_adds_three_lines(name):
    check_length(name)


@pytest.mark.parametrize(("name", "host", "expected"), [("openai", *OPENAI), ("anthropic", *ANTHROPIC)])
async def test_a_stream_is_settled(name, host, expected, model_server):
    write_providers()
    names = await run_recipe(name)  # a call, then a stream
    assert names["streamed"] == REPLY
    assert used(host) == expected


@pytest.mark.parametrize("name", ["openai", "anthropic"])
async def test_a_denial_says_when_to_try_again(name, model_server):
    write_providers(openai="[2/1h]", anthropic="[2/1h]")
    names = await run_recipe(name)
    assert re.fullmatch(r"try again in 3[56]\d\d s", names["ask_at_once"]("And now?"))
    assert len(model_server.requests) == 2


async def test_the_streams_of_openai_responses_are_settled(model_server):
    write_providers()
    names = await run_recipe("openai", 1)
    with names["client"].responses.stream(model="gpt-4o-mini", input="Count to five.") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == REPLY
    assert used("api.openai.com") == {"1m": 2, "tpm": 84}


async def test_the_streams_of_mistral_are_settled(model_server):
    write_providers()
    names = await run_recipe("mistralai", 1)
    messages = [{"role": "user", "content": "Count to five."}]
    with names["client"].chat.stream(model="mistral-small-latest", messages=messages, max_tokens=500) as stream:
        assert "".join(event.data.choices[0].delta.content for event in stream) == REPLY
    assert used("api.mistral.ai") == {"1m": 2, "tpm": 84}


async def test_the_streams_of_gemini_pass(model_server):
    write_providers()
    names = await run_recipe("google-genai", 1)
    stream = names["client"].models.generate_content_stream(model="gemini-2.5-flash", contents="Count to five.")
    assert "".join(part.text for part in stream) == REPLY
    assert model_server.requests[-1].path.endswith(":streamGenerateContent?alt=sse")
    assert used("generativelanguage.googleapis.com") == {"1m": 2, "tpm": 24}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("openai", openai.RateLimitError),
        ("anthropic", anthropic.RateLimitError),
        ("google-genai", genai_errors.ClientError),
        ("mistralai", mistral_errors.SDKError),
    ],
)
async def test_a_refusal_of_the_provider_is_the_error_of_the_sdk(name, error, model_server):
    model_server.limit = 0
    write_providers()
    with pytest.raises(error, match=r"Rate limit|rate limit|current quota"):
        await run_recipe(name)
    assert model_server.statuses == {429: 1}  # no retries


async def test_remaining_quota_that_the_provider_reports_delays_the_next_call(model_server):
    """Somebody else uses the same quota: the headers say so, and the next call waits instead of being refused."""
    model_server.limit = 1
    write_providers()
    names = await run_recipe("openai", 1)
    with pytest.raises(Denied), request_options(timeout=0):
        names["ask"]("And the second longest?")
    assert model_server.statuses == {200: 1}


def test_anthropic_refuses_a_client_of_httpx():
    with pytest.raises(TypeError, match="this SDK uses `httpx2`"):
        anthropic.Anthropic(api_key="test-key", http_client=httpx.Client())
