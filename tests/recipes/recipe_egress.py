"""The SDKs of OpenAI and Anthropic, unchanged, through the egress gateway: only their base URL and key differ."""

import json
import subprocess
import sys

import anthropic
import openai
import pytest

from tests.recipes.bodies import REPLY
from tests.recipes.model_server import ModelServer

TOKEN = "token-of-research-1234"  # noqa: S105 - of a test
MESSAGES = [{"role": "user", "content": "What is the longest river in Europe?"}]
PROVIDERS = {
    "openai": "domain: api.openai.com\nprofile: openai\nlimits: [{limit}/1h, 200_000/1h unit=tokens name=tpm]\n"
    "api_key: sk-of-the-gateway\nkey: {{header: Authorization, prefix: Bearer}}\n",
    "anthropic": "domain: api.anthropic.com\nprofile: anthropic\nlimits: [{limit}/1h]\n"
    "api_key: sk-of-the-gateway\nkey: {{header: X-Api-Key}}\n",
}


@pytest.fixture
def model_server():
    """Run a server of both APIs without TLS, to which the gateway sends what is for the providers."""
    with ModelServer(limit=1000, period=60.0) as server:
        yield server


@pytest.fixture
def gateway(model_server, tmp_path, request):
    """Run the gateway in a process of its own."""
    limit = getattr(request, "param", 100)
    for name, text in PROVIDERS.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(limit=limit))
        (tmp_path / f"{name}.yaml").chmod(0o600)
    settings = {
        "listen": "127.0.0.1:0",
        "providers": [f"{name}.yaml" for name in PROVIDERS],
        "callers": {"research": {"token": TOKEN}},
        "upstreams": dict.fromkeys(PROVIDERS, model_server.url),
        "allow_private": ["127.0.0.1"],
        "timeout": "1s",
    }
    (tmp_path / "egress.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tidegate", "egress", "egress.yaml", "--json"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE)
    yield json.loads(process.stdout.readline())["egress"]
    process.kill()
    process.communicate()


def test_openai_calls_and_streams(gateway, model_server):
    client = openai.OpenAI(base_url=f"{gateway}/openai/v1", api_key=TOKEN, max_retries=0)
    answer = client.chat.completions.create(model="gpt-4o-mini", messages=MESSAGES, max_completion_tokens=500)
    assert answer.choices[0].message.content == REPLY
    with client.chat.completions.create(
        model="gpt-4o-mini", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == REPLY
    assert client.responses.create(model="gpt-4o-mini", input="Hello").output_text == REPLY
    assert {request.headers["authorization"] for request in model_server.requests} == {"Bearer sk-of-the-gateway"}
    assert TOKEN not in str(model_server.requests)


def test_anthropic_calls_and_streams(gateway, model_server):
    client = anthropic.Anthropic(base_url=f"{gateway}/anthropic", api_key=TOKEN, max_retries=0)
    answer = client.messages.create(model="claude-sonnet-5", messages=MESSAGES, max_tokens=500)
    assert answer.content[0].text == REPLY
    with client.messages.stream(model="claude-sonnet-5", messages=MESSAGES, max_tokens=500) as stream:
        assert "".join(stream.text_stream) == REPLY
    assert {request.headers["x-api-key"] for request in model_server.requests} == {"sk-of-the-gateway"}


@pytest.mark.parametrize("gateway", [1], indirect=True)
def test_a_denial_is_the_rate_limit_error_of_the_sdk(gateway, model_server):
    client = openai.OpenAI(base_url=f"{gateway}/openai/v1", api_key=TOKEN, max_retries=0)
    ask = {"model": "gpt-4o-mini", "messages": MESSAGES, "max_completion_tokens": 5}
    client.chat.completions.create(**ask)
    with pytest.raises(openai.RateLimitError, match=r"try again in 3[56]") as caught:
        client.chat.completions.create(**ask)
    assert caught.value.code == "rate_limit_exceeded"
    assert int(caught.value.response.headers["retry-after"]) > 3000
    other = anthropic.Anthropic(base_url=f"{gateway}/anthropic", api_key=TOKEN, max_retries=0)
    other.messages.create(model="claude-sonnet-5", messages=MESSAGES, max_tokens=5)
    with pytest.raises(anthropic.RateLimitError, match=r"try again in 3[56]"):
        other.messages.create(model="claude-sonnet-5", messages=MESSAGES, max_tokens=5)
    assert len(model_server.requests) == 2


def test_a_wrong_token_is_the_authentication_error_of_the_sdk(gateway, model_server):
    with pytest.raises(openai.AuthenticationError, match="token of a caller"):
        openai.OpenAI(base_url=f"{gateway}/openai/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(anthropic.AuthenticationError, match="token of a caller"):
        anthropic.Anthropic(base_url=f"{gateway}/anthropic", api_key="wrong", max_retries=0).models.list()
    assert not model_server.requests
