"""Names that callers invent: models, tags and bytes that are not text make no new quotas, and break nothing."""

import json

import pytest

from tests.cases import cases
from tests.egress.harness import TOKEN, raw, running
from tests.outbound.server import as_json
from tidegate import ConfigError
from tidegate.egress import load_egress
from tidegate.outbound._quota import accounts

PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}, "default": {"input": 1, "output": 10}}
USAGE = {"usage": {"prompt_tokens": 100, "completion_tokens": 50}}
METRICS = {"metrics_token": "metrics-token-123456"}


@pytest.fixture
def upstream(upstream):
    upstream.respond = lambda _request: as_json(USAGE)
    return upstream


async def ask(gateway, model="m", **headers):
    headers = {"X-Tidegate-Token": TOKEN, "X-Tidegate-Timeout": "0", **headers}
    body = {"model": model, "max_tokens": 100, "messages": []}
    status, _, answer = await gateway.send("POST", "/up/v1/chat/completions", json=body, headers=headers)
    return status, json.loads(answer).get("error", {}).get("type")


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"models": {"gpt-4o": "2/1m", "*": "2/1m"}},
        {"models": {"gpt-*": "2/1m", "*": "2/1m"}},
        {"limits": ["2/1m"], "aliases": {"latest": "gpt-4o"}},
        {"limits": ["2/1m"]},
    ],
    ids=["named", "pattern", "alias", "no names"],
)
async def test_invented_models_share_one_quota(upstream, fields):
    settings = {"callers": {"a": {"token": TOKEN}}}
    fields = {"profile": "openai", "per": ["model"], "limits": None, **fields}
    fields = {name: value for name, value in fields.items() if value is not None}
    if "limits" not in fields:
        fields["limits"] = ["2/1m"]
    async with running(upstream.url, settings, **fields) as gateway:
        statuses = [(await ask(gateway, f"invented-{number}"))[0] for number in range(6)]
        assert statuses == [200, 200, 429, 429, 429, 429]
        assert len(gateway.gateway.gate.accounts) == 1


async def test_each_model_that_the_file_names_has_its_own_quota_in_any_spelling(upstream):
    fields = {"profile": "openai", "per": ["model"], "models": {"gpt-4o": "2/1m", "o3": "2/1m", "*": "1/1m"}}
    async with running(upstream.url, {"callers": {"a": {"token": TOKEN}}}, **fields) as gateway:
        names = ["gpt-4o", "GPT-4O", "Gpt-4o", "o3", "O3", "o3", "x", "y"]
        statuses = [(await ask(gateway, name))[0] for name in names]
        assert statuses == [200, 200, 429, 200, 200, 429, 200, 429]


async def test_the_number_of_accounts_is_bounded(upstream, monkeypatch):
    """Each credential has a quota of its own, and a caller can invent credentials."""
    monkeypatch.setattr(accounts, "MAX_ACCOUNTS", 5)
    fields = {"per": ["credential"], "limits": ["3/1m"]}
    async with running(upstream.url, {"callers": {"a": {"token": TOKEN}}}, **fields) as gateway:
        found = [await ask(gateway, Authorization=f"Bearer key-{number}") for number in range(12)]
        assert len(gateway.gateway.gate.accounts) == 6  # the last one is for all others
        assert [status for status, _ in found] == [200] * 8 + [429] * 4


# ---- tags ------------------------------------------------------------------------------------------------------------

PER_TAG = [{"limit": 0.0015, "period": "day", "unit": "usd", "per": "tag"}]


async def test_a_tag_that_the_callers_rights_do_not_list_makes_no_new_ceiling(upstream):
    settings = {"callers": {"a": {"token": TOKEN, "tags": ["nightly"]}}}
    async with running(upstream.url, settings, profile="openai", price=PRICES, spend=PER_TAG) as gateway:
        assert await ask(gateway, **{"X-Tidegate-Tag": "nightly"}) == (200, None)
        for tag in ("nightly2", "Nightly", "other"):
            assert await ask(gateway, **{"X-Tidegate-Tag": tag}) == (403, "tag-not-allowed")
        assert len(upstream.requests) == 1


@cases("tag", [b"\xff", b"a\xc3\xa9", b'a"b', b"x" * 65, b"a b"])
@cases("callers", [{}, {"callers": {"a": {"token": TOKEN, "tags": ["nightly"]}}, **METRICS}])
async def test_a_tag_that_is_no_name_is_refused_and_the_metrics_stay_readable(upstream, tag, callers):
    body = b'{"model": "m", "max_tokens": 10}'
    head = b"POST /up/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Tidegate-Token: %s\r\n"
    rest = b"X-Tidegate-Tag: %s\r\nContent-Length: %d\r\n\r\n%s" % (tag, len(body), body)
    async with running(upstream.url, callers, profile="openai", price=PRICES, spend=PER_TAG) as gateway:
        assert (await raw(gateway.port, head % TOKEN.encode() + rest)).startswith(b"HTTP/1.1 400 ")
        headers = {"X-Tidegate-Token": METRICS["metrics_token"]}
        assert (await gateway.get("/metrics", headers=headers))[0] == 200


@pytest.mark.parametrize("model", ["\ud800", "a\nb", 'q"\\', "\x00", "é" * 200])
async def test_a_model_that_is_not_text_breaks_neither_metrics_nor_the_ledger(upstream, model, tmp_path):
    from tidegate.spending import Spending  # noqa: PLC0415 - used here only

    ledger = Spending(str(tmp_path / "spent.db"))
    fields = {"profile": "openai", "price": PRICES, "limits": ["9/1m", "1/day unit=usd"], "spending": ledger}
    async with running(upstream.url, {"access_log": str(tmp_path / "log")}, **fields) as gateway:
        status, _ = await ask(gateway, model)
        assert status in (200, 400)
        assert (await gateway.get("/metrics"))[0] == 200
        assert (await gateway.get("/v1/overview"))[0] == 200
        assert (await ask(gateway, "m"))[0] == 200
    ledger.close()


def test_a_tag_of_a_caller_must_be_a_name():
    with pytest.raises(ConfigError, match="expected at most 64 letters"):
        load_egress({"callers": {"a": {"token": TOKEN, "tags": ["a b"]}}})
