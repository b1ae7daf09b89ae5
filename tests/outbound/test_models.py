"""Limits of models: patterns, aliases, and one quota per model."""

import json

import httpx
import pytest

from tidegate import Denied
from tidegate.outbound import Gate, Providers, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"


def client(clock, **fields):
    known = Providers.of({"domain": "api.test", **fields})
    mock = httpx.MockTransport(lambda _request: httpx.Response(200))
    transport = RateLimitTransport(known, transport=mock, clock=clock, timeout=0)
    opened = httpx.Client(transport=transport)
    opened.gate = transport.gate
    return opened


def sent(client, model, url=URL):
    """How many requests for a model are let through."""
    for number in range(100):
        try:
            client.post(url, json={"model": model})
        except Denied:
            return number
    return 100


@pytest.fixture
def clock():
    return ManualClock(1_728_000_000)


def test_each_pattern_of_models_has_its_own_limits(clock):
    fields = {"limit": 1, "period": "1m", "models": {"gpt-4o-mini*": "7/1m", "gpt-*": ["3/1m"]}}
    with client(clock, **fields) as opened:
        assert sent(opened, "gpt-4o-mini-2024") == 7
        assert sent(opened, "gpt-4o") == 3
        assert sent(opened, "gpt-5") == 0  # the models of a pattern share its quota
        assert sent(opened, "o3") == 1
        with pytest.raises(Denied):
            opened.get("https://api.test/v1/other")  # names no model


def test_only_a_star_is_special_in_a_pattern_of_models(clock):
    with client(clock, models={"m[12]": "2/1m", "a?*": "3/1m", "*": "1/1m"}) as opened:
        assert [sent(opened, model) for model in ("m[12]", "a?c", "m1", "abc")] == [2, 3, 1, 0]


def test_a_request_without_a_model_shares_the_quota_of_all_other_models(clock):
    opened = client(clock, models={"gpt-*": "5/1m", "*": "3/1m"})
    opened.post(URL, json={"model": "claude"})
    assert sent(opened, None) == 2
    assert sent(opened, "llama") == 0
    assert sent(opened, "gpt-4o") == 5


def test_per_model_each_model_has_its_own_quota(clock):
    with client(clock, per="model", models={"gpt-*": "3/1m", "*": "2/1m"}) as opened:
        assert [sent(opened, model) for model in ("gpt-4o", "gpt-5", "o3", "o4")] == [3, 3, 2, 2]
        assert opened.gate.capacities().keys() == {
            "api.test/model=gpt-4o", "api.test/model=gpt-5", "api.test/model=o3", "api.test/model=o4"
        }  # fmt: skip


def test_an_alias_is_charged_to_its_model(clock):
    with client(clock, per="model", limit=2, period="1m", aliases={"gpt-4o-latest": "gpt-4o"}) as opened:
        assert sent(opened, "gpt-4o-latest") == 2
        assert sent(opened, "gpt-4o") == 0


def test_the_model_may_be_named_by_the_path_or_by_the_program(clock):
    with client(clock, per="model", limit=1, period="1m", profile="google") as opened:
        path = "https://api.test/v1beta/models/{}:generateContent"
        assert [sent(opened, "ignored", path.format(model)) for model in ("gemini-a", "gemini-b")] == [1, 1]
        with request_options(model="gemini-c"):
            assert sent(opened, "ignored", path.format("gemini-a")) == 1


def test_permits_by_name_are_charged_to_a_model(clock):
    known = Providers.of({"domain": "api.test", "name": "llm", "limit": 1, "period": "1m", "models": {"gpt-*": "2/1m"}})
    gate = Gate(known, clock=clock)
    with request_options(model="gpt-4o"):
        assert [gate.try_acquire("llm").allowed for _ in range(3)] == [True, True, False]
    assert [gate.try_acquire("llm").allowed for _ in range(2)] == [True, False]
    gate.close()


def test_a_refusal_for_one_model_does_not_slow_down_another(clock):
    def reply(request):
        busy = json.loads(request.content)["model"] == "busy"
        return httpx.Response(429, headers={"Retry-After": "30"}) if busy else httpx.Response(200)

    known = Providers.of({"domain": "api.test", "limit": 50, "period": "1m", "per": "model"})
    transport = RateLimitTransport(known, transport=httpx.MockTransport(reply), clock=clock, timeout=0)
    with httpx.Client(transport=transport) as opened:
        opened.post(URL, json={"model": "busy"})
        with pytest.raises(Denied):
            opened.post(URL, json={"model": "busy"})
        assert sent(opened, "quiet") == 50


@pytest.mark.parametrize(
    ("body", "pause"),
    [({"error": {"message": "Rate limit reached. Please try again in 7.5s."}}, 7.5), ({"error": {"message": "no"}}, 1)],
)
def test_the_body_of_a_refusal_says_how_long_nothing_is_sent(clock, body, pause):
    raw = json.dumps(body).encode()
    replies = iter([httpx.Response(429, content=iter([raw[:9], raw[9:]])), httpx.Response(200), httpx.Response(200)])
    known = Providers.of({"domain": "api.test", "limit": 50, "period": "1m", "profile": "openai"})
    transport = RateLimitTransport(known, transport=httpx.MockTransport(lambda _: next(replies)), clock=clock)
    with httpx.Client(transport=transport) as opened:
        with opened.stream("POST", URL, json={"model": "a"}) as refused:
            assert json.loads(b"".join(refused.iter_raw())) == body  # the caller still reads it
        assert opened.post(URL, json={"model": "a"}).extensions["tidegate"].waited == pause


def test_a_daily_quota_that_a_refusal_names_is_used_up(clock):
    quota = {"violations": [{"quotaId": "GenerateRequestsPerDayPerProjectPerModel-FreeTier"}]}
    body = {"error": {"details": [quota, {"retryDelay": "3s"}]}}
    known = Providers.of({"domain": "api.test", "limits": ["50/1m", "500/1d"], "profile": "google"})
    reply = httpx.Response(429, json=body)
    transport = RateLimitTransport(known, transport=httpx.MockTransport(lambda _: reply), clock=clock, timeout=0)
    with httpx.Client(transport=transport) as opened:
        opened.post(URL, json={})
        clock.advance(3600)
        with pytest.raises(Denied):
            opened.post(URL, json={})
        clock.advance(86_400)
        assert opened.post(URL, json={}).status_code == 429
