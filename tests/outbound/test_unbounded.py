"""Strict calls that use what is not in them: stored conversations, files, tools of the provider, hidden models."""

import gzip
import pickle

import pytest

from tests.cases import cases
from tests.outbound.clients import fetch
from tests.outbound.server import QuotaServer, as_json
from tests.outbound.test_unusual_calls import CHAT, USAGE, Caller
from tidegate import Denied
from tidegate.outbound import Providers, UnboundedCost, find_denied, request_options
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.cost import read_call
from tidegate.outbound._quota.exchange import OutboundRequest
from tidegate.outbound._quota.request_tokens import read_request

KINDS = ["httpx", "httpx async", "requests", "aiohttp"]
PRICES = {"date": "2026-11-01", "models": {"dear": {"input": 9, "output": 90}, "cheap": {"input": 1, "output": 2}}}


def names(profile, url, body):
    return read_request(shipped_profile(profile), f"https://api.test{url}", body).unbounded


@cases(("profile", "url", "body", "expected"), [
        ("openai", "/v1/responses", b'{"conversation": {"id": "c"}}', ("conversation",)),
        ("openai", "/v1/responses", b'{"tools": [{"type": "mcp"}, {"type": "custom"}]}', ("mcp",)),
        ("openai", "/v1/responses", b'{"tools": {"type": "mcp"}}', ("tools",)),
        ("openai", "/v1/responses", b'{"tools": [], "conversation": null}', ()),
        ("openai", "/v1/responses", b'{"input": [{"content": [{"file_id": "a"}, {"file_id": 2}]}]}', ("file_id",) * 2),
        ("openai", "/v1/responses", b'{"input": [{"content": [{"type": "input_image", "file_id": "a"}]}]}', ()),
        ("openai", "/v1/responses", b'{"input": [{"type": "input_image", "content": [{"file_id": 1}]}]}', ("file_id",)),
        ("anthropic", "/v1/messages", b'{"messages": [{"type": "image", "content": [{"file_id": 1}]}]}', ("file_id",)),
        (
            "anthropic",
            "/v1/messages",
            b'{"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]}',
            (),
        ),
        ("openai", "/v1/fine_tuning/jobs", b"{}", ("fine_tuning",)),
        ("azure", "/openai/v1/batches", b"{}", ("batches",)),
        ("anthropic", "/v1/messages/batches", b"{}", ("batches",)),
        ("anthropic", "/v1/messages", b'{"tools": [{"type": "web_fetch_1", "name": "f"}]}', ("web_fetch_1",)),
        ("anthropic", "/v1/messages", b'{"tools": [{"name": "mine", "input_schema": {}}]}', ()),
        ("anthropic", "/v1/messages", b'{"messages": [{"type": "tool_use", "input": {"file_id": 1}}]}', ()),
        (
            "anthropic",
            "/v1/messages",
            b'{"messages": [{"content": [{"type": "document", "source": {"type": "url", "url": "x"}}]}]}',
            ("url",),
        ),
        ("google", "/v1beta/models/g:generateContent", b'{"cachedContent": "c"}', ("cachedContent",)),
        ("google", "/v1beta/models/g:generateContent", b'{"tools": [{"googleSearch": {}}]}', ("googleSearch",)),
        ("google", "/v1beta/models/g:generateContent", b'{"tools": [{"functionDeclarations": []}]}', ()),
        ("google", "/v1beta/models/g:batchGenerateContent", b"{}", ("batches",)),
        (
            "google",
            "/v1beta/models/g:generateContent",
            b'{"contents": [{"parts": [{"fileData": {"fileUri": "f"}}]}]}',
            ("fileData",),
        ),
        (
            "google",
            "/v1beta/models/g:generateContent",
            b'{"contents": [{"parts": [{"functionResponse": {"parts": [{"fileData": {"fileUri": "f"}}]}}]}]}',
            ("fileData",),
        ),
        (
            "google",
            "/v1beta/models/g:generateContent",
            b'{"contents": [{"parts": [{"functionResponse": {"response": {"file_id": "f"}}}]}]}',
            (),
        ),
        ("bedrock", "/model-invocation-job", b"{}", ("batches",)),
        ("mistral", "/v1/agents/completions", b'{"agent_id": "a"}', ("agent_id",)),
        ("openrouter", "/api/v1/chat/completions", b'{"models": ["a", "b"]}', ("models",)),
    ])  # fmt: skip
def test_profiles_name_what_is_not_in_a_request(profile, url, body, expected):
    assert names(profile, url, body) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_client_refuses_a_strict_call_that_uses_what_is_not_in_it(kind):
    with QuotaServer(respond=lambda _request: as_json(USAGE)) as server:
        providers = Providers.of(
            {"domain": "127.0.0.1", "profile": "openai", "limits": ["9/1m", "90_000/1m unit=tokens"], "strict": True}
        )
        body = b'{"model": "m", "max_output_tokens": 5, "previous_response_id": "r"}'
        with pytest.raises(Exception, match="previous_response_id") as refused:
            fetch(kind, providers, [f"{server.url}/v1/responses"], method="POST", body=body)
        found = find_denied(refused.value)
        assert isinstance(found, UnboundedCost)
        assert (found.field, found.decision.retry_after) == ("previous_response_id", None)
        assert not server.requests


def test_a_program_may_give_the_cost_itself():
    caller = Caller(USAGE)
    body = {"model": "m", "max_tokens": 5, "conversation": "c"}
    with pytest.raises(UnboundedCost):
        caller.send(body=body, strict=True)
    with request_options(cost={"tokens": 70_000}):
        assert caller.reserved(body=body, strict=True) == 70_000
    assert caller.reserved(body=body) < 100  # a lenient call is charged its usage afterwards


def test_the_cost_in_the_provider_file_counts_for_each_reference():
    caller = Caller(USAGE, unbounded={"file_id": {"tokens": 20_000}})
    content = [{"type": "input_file", "file_id": "a"}, {"type": "input_file", "file_id": "b"}]
    body = {"model": "m", "max_tokens": 5, "input": [{"content": content}]}
    assert 40_000 <= caller.reserved(body=body, strict=True) < 50_000


def test_a_compressed_request_without_a_bound_is_not_sent():
    caller = Caller(USAGE)
    headers = {"content-encoding": "gzip"}
    with pytest.raises(UnboundedCost, match="set max_completion_tokens"):
        caller.send(content=gzip.compress(b'{"model": "m"}'), headers=headers, strict=True)
    assert not caller.arrived


def test_the_error_can_be_pickled():
    caller = Caller(USAGE)
    with pytest.raises(UnboundedCost) as refused:
        caller.send(body={"conversation": "c"}, strict=True)
    copy = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - our own bytes
    assert isinstance(copy, Denied)
    assert (str(copy), copy.field) == (str(refused.value), "conversation")


def test_an_escaped_image_costs_as_much_as_a_plain_one():
    plain = b'{"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://a/b"}}]}]}'
    escaped = plain.replace(b"image_url", rb"image\u005furl")
    profile = shipped_profile("openai")
    assert read_request(profile, CHAT, escaped).fixed == read_request(profile, CHAT, plain).fixed == 1105


# ---- the model in the path -------------------------------------------------------------------------------------------

SPELLINGS = [
    "/openai/deployments/dear/chat/completions",
    "//openai/deployments/dear/chat/completions",
    "/openai//deployments///dear/chat/completions",
    "/OpenAI/Deployments/dear/Chat/Completions",
    "/%6fpenai/deployments/dear/chat/completions",
    "/openai/deployments/%64ear/chat/completions",
    "/openai%2Fdeployments%2Fdear/chat/completions",
    "/%256fpenai/deployments/dear/chat/completions",
    "/openai/deployments/DEAR/chat/completions",
]


@cases("path", SPELLINGS)
def test_the_dearest_reading_of_a_path_is_paid(path):
    fields = {"domain": "a.test", "profile": "azure", "limits": ["9/1m"], "spend": ["1/day unit=usd"]}
    (provider,) = Providers.of({**fields, "price": {**PRICES, "default": {"input": 0, "output": 0}}})
    call = OutboundRequest(
        "POST", f"https://a.test{path}", lambda _name: None, lambda: b'{"model": "cheap"}', True, lambda _error: False
    )  # fmt: skip
    request = read_call(provider, call)
    assert request.price.output == 90_000_000


@pytest.mark.parametrize("path", ["/openai//deployments/cheap/chat/completions", "/OPENAI/deployments/cheap/chat/x"])
def test_the_body_counts_too_if_the_path_is_unusual(path):
    request = read_request(shipped_profile("azure"), f"https://a.test{path}", b'{"model": "dear"}')
    assert {request.model, *request.other_models} == {"cheap", "dear"}
