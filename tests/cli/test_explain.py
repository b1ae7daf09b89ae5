"""`tidegate explain`: the limits that a request meets, the strictest first, and why; as the middleware decides."""

import json
import logging

import httpx
import pytest

from tidegate._cli import main
from tidegate._cli.explain import format_pace
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.testing import ManualClock

CONFIG = """
rate_limiting:
  defaults: false
  categories:
    login:
      limits: [20/1h, 5/1m]
      endpoints: [{path: /login, methods: [POST]}, "/password/*"]
    uploads:
      limits: [100/1m]
      cost: 30
      endpoints: ["/files/{name}"]
      plans: {gold: 1000/1m}
    trial: {limits: [1/1m], endpoints: [/trial], mode: shadow}
    closed: {limit: 0, window: 1h, endpoints: [/closed]}
    read: {limits: [60/1m]}
  unmatched: read
  exempt: [/health]
  exempt_methods: [OPTIONS]
  exempt_clients: [192.0.2.0/24]
  blocked_clients: [198.51.100.7]
"""
PROVIDERS = {
    "models.yaml": "name: models\ndomain: example.com\nlimits: [10/1m, 90/1d]\n"
    "endpoints: [{path: /batch/*, cost: 5}]\n",
    "eu.yaml": "name: eu\ndomain: eu.example.com\nlimits: 5/1s\nper: [credential]\n",
}
SERVICE = """
policies:
  api:
    limits: [100/1m, 1000/1h]
    overrides:
      - {key: "partner:*", limits: [1000/1m]}
      - {key: "partner:acme", limits: 5/1m}
  search: {limits: 20/1s, rollout: 10%}
provider_dirs: providers
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "providers").mkdir()
    for name, text in PROVIDERS.items():
        (tmp_path / "providers" / name).write_text(text)
    (tmp_path / "egress.yaml").write_text(
        "provider_dirs: providers\ncallers: {night: {token: 0123456789abcdef, limits: [2/1m]}}\n"
    )


@pytest.fixture
def explain(capsys):
    def read(file, *arguments):
        assert main(["explain", file, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return read


def verdicts(found):
    return {rule["pattern"]: rule["reason"] or "matches" for rule in found["rules"]}


def test_the_strictest_limit_is_first(explain):
    found = explain("config.yaml", "--request", "POST /login", "--from", "203.0.113.9")
    assert [(limit["name"], limit["at_once"], limit["seconds_each"]) for limit in found["limits"]] == [
        ("login-1m", 5, 12.0),
        ("login-1h", 20, 180.0),
    ]
    assert [limit["one_every"] for limit in found["limits"]] == [None, None]  # logs: permits return one by one
    assert found["verdict"] == "Limited by the category login."
    assert (found["key"], found["key_reason"]) == ("203.0.113.9", "the address of the client")
    assert found["denial"]["when"] == "after 5 such requests at once, login-1m denies the next one:"
    assert (found["denial"]["status"], found["denial"]["headers"]["Retry-After"]) == (429, "60")
    assert found["denial"]["body"] == "Rate limit exceeded. Try again later."


def test_rules_say_why_they_do_not_match(explain):
    found = verdicts(explain("config.yaml", "--request", "GET /login", "--from", "203.0.113.9"))
    assert found["POST /login"] == "its methods are POST, not GET"
    assert found["/password/*"] == "the path differs"
    assert "matches" not in found.values()


def test_costs_plans_and_spellings(explain):
    found = explain("config.yaml", "--request", "PUT /FILES//a%2Fb", "--from", "203.0.113.9")
    assert {limit["owner"] for limit in found["limits"]} == {"read", "uploads"}  # routers read the path differently
    found = explain("config.yaml", "--request", "/files/a", "--from", "203.0.113.9")
    assert (found["limits"][0]["cost"], found["limits"][0]["at_once"]) == (30, 3)
    found = explain("config.yaml", "--request", "/files/a", "--from", "203.0.113.9", "--plan", "gold")
    assert found["limits"][0]["at_once"] == 33


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        (["--request", "/health"], "Not limited: the path is exempt."),
        (["--request", "OPTIONS /login"], "Not limited: the method OPTIONS is one of exempt_methods."),
        (["--request", "/x", "--from", "192.0.2.9"], "Not limited: 192.0.2.9 is one of exempt_clients."),
        (
            ["--request", "/x"],
            "No endpoint matches, so the category for other requests applies: unmatched: read.",
        ),
    ],
)
def test_requests_that_no_endpoint_limits(explain, arguments, verdict):
    assert explain("config.yaml", *arguments)["verdict"] == verdict


def test_blocked_clients_shadow_mode_and_closed_limits(explain):
    blocked = explain("config.yaml", "--request", "/x", "--from", "198.51.100.7")
    assert blocked["verdict"] == "Always denied: 198.51.100.7 is one of blocked_clients."
    assert (blocked["denial"]["when"], blocked["denial"]["status"]) == ("every request is denied:", 429)
    shadow = explain("config.yaml", "--request", "/trial", "--from", "203.0.113.9")
    assert shadow["denial"] is None
    assert shadow["notes"] == ["Nothing is denied: all limits are in shadow mode, which only counts and logs."]
    closed = explain("config.yaml", "--request", "/closed", "--from", "203.0.113.9")
    assert closed["denial"]["body"] == "Rate limit exceeded. The limit is 0: no request is allowed."


def test_the_key_behind_a_proxy(explain):
    request = ("--request", "/x", "--from", "10.0.0.1", "--header", "X-Forwarded-For: 203.0.113.9")
    assert explain("config.yaml", *request)["key"] == "10.0.0.1"
    trusted = explain("config.yaml", *request, "--trusted-proxy", "10.0.0.0/8")
    assert (trusted["key"], trusted["key_reason"]) == (
        "203.0.113.9",
        "the client that the trusted proxy 10.0.0.1 names",
    )
    network = explain("config.yaml", "--request", "/x", "--from", "2001:db8::9")
    assert (network["key"], network["key_reason"]) == ("2001:db8::/64", "the network of 2001:db8::9")


@pytest.mark.parametrize("request_line", ["POST /login", "GET /login", "PUT /files/a", "GET /closed", "GET /other/x"])
async def test_the_middleware_does_what_the_explanation_says(explain, request_line):
    """The explanation and a real application deny the same request, with the same response."""
    found = explain("config.yaml", "--request", request_line, "--from", "127.0.0.1")
    method, path = request_line.split()
    clock = ManualClock(start=0)
    app = RateLimitMiddleware(answer, config="config.yaml", clock=clock, plan=lambda _request: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        responses = [await client.request(method, path) for _ in range(found["limits"][0]["at_once"] + 1)]
    assert {response.status_code for response in responses[:-1]} <= {200}
    assert (responses[-1].status_code, responses[-1].text) == (found["denial"]["status"], found["denial"]["body"])
    assert responses[-1].headers.get("retry-after") == found["denial"]["headers"].get("Retry-After")


async def answer(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_nothing_is_logged(caplog, capsys):
    with caplog.at_level(logging.DEBUG):
        assert main(["explain", "config.yaml", "--request", "POST /login", "--from", "203.0.113.9"]) == 0
    assert not caplog.records
    assert capsys.readouterr().err == ""


def test_the_text(capsys, monkeypatch):
    assert main(["explain", "config.yaml", "--request", "POST /login", "--from", "203.0.113.9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "POST /login from 203.0.113.9",
        "Limited by the category login.",
        "key: 203.0.113.9 (the address of the client)",
    ]
    assert lines[4].split() == ["rule", "what", "it", "matches", "this", "request"]
    place = lines.index("limits, the strictest first:")
    assert lines[place + 2].split() == ["1", "login-1m", "login", "5/1m", "sliding_log", "5", "enforce"]
    assert lines[-1] == "  Rate limit exceeded. Try again later."


def test_the_pace_of_a_limit_is_not_rounded_to_a_second():
    assert [format_pace(each) for each in (0.6, 1.8, 12, 17.28, 180)] == ["600ms", "1.8s", "12s", "17.3s", "3m"]


# ---- requests that are sent ------------------------------------------------------------------------------------------


def test_the_provider_of_a_url(explain):
    found = explain("providers/models.yaml", "--request", "POST https://api.example.com/batch/7")
    assert found["verdict"] == "Limited by the provider models."
    assert (found["key"], found["key_reason"]) == ("example.com", "one quota for all requests to the provider")
    assert [(limit["name"], limit["at_once"]) for limit in found["limits"]] == [("1m", 2), ("1d", 18)]
    assert verdicts(found) == {"example.com": "matches", "/batch/* (cost 5)": "matches"}
    assert found["denial"]["message"].startswith("provider models: 'example.com' got no permit within 0.0 s: 1m would")
    other = explain("providers/models.yaml", "--request", "https://other.example/")
    assert other["verdict"] == "Not limited: no provider has the domain other.example or a parent of it."
    assert not other["limited"]


def test_a_request_with_a_body_is_a_post_and_uses_tokens(explain, tmp_path):
    (tmp_path / "llm.yaml").write_text("domain: llm.example.com\nlimits: [500/1m, 10_000/1m unit=tokens name=tpm]\n")
    (tmp_path / "body.json").write_text('{"model": "m", "max_tokens": 4990}')
    arguments = str(tmp_path / "llm.yaml"), "--request", "https://llm.example.com/v1/chat/completions"
    found = explain(*arguments, "--body", str(tmp_path / "body.json"))
    assert (found["request"].split()[0], found["limits"][0]["name"]) == ("POST", "tpm")
    assert [limit["name"] for limit in explain(*arguments)["limits"]] == ["1m"]


def test_the_longest_domain_of_several_providers(explain):
    found = explain("service.yaml", "--request", "https://eu.example.com/x", "--header", "Authorization: Bearer k")
    assert found["verdict"] == "Limited by the provider eu."
    assert verdicts(found) == {"example.com": "another provider has a longer domain", "eu.example.com": "matches"}
    assert found["key_reason"] == "a quota for each credential"
    assert "Bearer" not in json.dumps(found)


def test_the_limits_of_a_caller(explain):
    url = ("--request", "https://example.com/x")
    assert explain("egress.yaml", *url)["notes"] == ["Callers have limits of their own; name one to add them: night."]
    found = explain("egress.yaml", *url, "--caller", "night")
    assert [limit["owner"] for limit in found["limits"]] == ["caller night", "models", "models"]


def test_the_policy_of_a_call(explain):
    exact = explain("service.yaml", "--policy", "api", "--key", "partner:acme")
    assert [(rule["matches"], rule["reason"]) for rule in exact["rules"]] == [
        (False, "an exact or earlier override matches"),
        (True, ""),
        (False, "an override matches"),
    ]
    assert exact["limits"][0]["at_once"] == 5
    assert exact["denial"]["violated"] == ["1m"]
    plain = explain("service.yaml", "--policy", "api", "--key", "user:42")
    assert [rule["matches"] for rule in plain["rules"]] == [False, False, True]
    rolled = explain("service.yaml", "--policy", "search", "--key", "user:42")
    assert rolled["notes"][0].startswith("The rollout is 10 %. This key is at ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config.yaml"], "expected a request or call, such as: tidegate explain config.yaml --request 'POST /login'"),
        (["config.yaml", "--request", "login"], "--request: expected a method and a path or a URL, such as"),
        (["config.yaml", "--request", "https://x.example/"], "--request: expected a path such as 'POST /login', not"),
        (["config.yaml", "--request", "/x", "--from", "me"], "address: expected an address such as 203.0.113.9"),
        (["config.yaml", "--request", "/x", "--header", "x"], "--header: expected a header such as"),
        (["config.yaml", "--request", "/x", "--trusted-proxy", "x"], "trusted_proxies: "),
        (
            ["providers/eu.yaml", "--request", "/x"],
            "--request: expected a URL such as 'GET https://api.example.com/v1'",
        ),
        (["providers/eu.yaml", "--request", "https://a..b/"], "url: expected a URL with a valid host"),
        (
            ["service.yaml"],
            "expected a request or call, such as: tidegate explain service.yaml --policy NAME --key KEY",
        ),
        (["service.yaml", "--policy", "api"], "--key: expected the key of the call, such as --key user:42"),
        (["service.yaml", "--policy", "apy", "--key", "x"], "there is no policy 'apy': did you mean 'api'?"),
        (
            ["egress.yaml", "--request", "https://example.com", "--caller", "nigt"],
            "caller: there is no caller 'nigt': ",
        ),
        (["config.yaml", "--request", "/x", "--plan", "gild"], "plan: there is no plan 'gild': did you mean 'gold'?"),
        (["missing.yaml", "--request", "/x"], "missing.yaml: cannot be read: No such file or directory"),
    ],
)
def test_mistakes_are_bad_input(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"tidegate: {message}")


def test_files_without_requests_say_so(tmp_path, capsys):
    (tmp_path / "budget.yaml").write_text("tiers: {day: 5}\n")
    assert main(["explain", "budget.yaml", "--request", "/x"]) == 2
    assert "a task budget file limits no requests" in capsys.readouterr().err
