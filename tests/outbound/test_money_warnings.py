"""Warnings of money limits: after each decision that uses more of a limit, with the amounts that are really used."""

import json
import logging
from contextlib import closing
from functools import partial

import httpx
import pytest

from tests.budget.polling import wait_until
from tests.budget.receiver import run_receiver
from tests.outbound.streamed_model import usage
from tidegate import Denied
from tidegate.core._decision import LocalDecision
from tidegate.core._limit import Limit
from tidegate.outbound import Gate, Providers, request_options
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport
from tidegate.spending import Spending
from tidegate.stores import MemoryStore
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
PRICES = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 5}}}
START = 1_767_225_600  # 2026-01-01 00:00 UTC
ACCOUNT = {"limits": ["1000/1m", "0.01/day unit=usd name=money"]}
CEILINGS = {
    "limits": ["1000/1m"],
    "spend": ["1/day unit=usd", {"limit": 0.01, "period": "day", "unit": "usd", "per": "team"}],
}
LIMITS = pytest.mark.parametrize("limits", [ACCOUNT, CEILINGS], ids=["account", "ceilings"])


@pytest.fixture
def clock():
    return ManualClock(START)


@pytest.fixture(params=["memory", "sqlite"])
def store(request, clock, tmp_path):
    store = MemoryStore(clock=clock) if request.param == "memory" else SQLiteStore(tmp_path / "s.db", clock=clock)
    yield store
    store.close()


def providers(**fields):
    return Providers.of({"domain": "api.test", "profile": "openai", "price": PRICES, **fields})


def answer(tokens, _request=None):
    """A response with an output of this many tokens; with its input, it costs 100 + 5 * tokens."""
    return httpx.Response(200, json={"usage": usage(100, tokens)})


def make_transport(limits, store, handle, kind=RateLimitTransport, **options):
    options.setdefault("spending", Spending(clock=store.clock))
    mock = httpx.MockTransport(handle)
    return kind(providers(**limits), store, mock, timeout=0, tokenizer=count_tokens, **options)


def count_tokens(text):
    return max(100, len(text))


def body(**fields):
    return {"model": "m", "max_tokens": 100, "messages": [], **fields}


# Its input alone costs more than 0.01 usd.
TOO_LARGE = body(messages=[{"role": "user", "content": "x" * 10_001}])


def warned(gate):
    return {name: count for name, count in gate.metrics().items() if name.startswith("warned")}


ALL_WARNED = {"warned_50": 1, "warned_80": 1, "warned_100": 1}


@LIMITS
def test_a_settlement_above_the_reservation_warns(limits, store):
    transport = make_transport(limits, store, partial(answer, 2480))
    with httpx.Client(transport=transport) as client, request_options(team="search"):
        client.post(URL, json=body())  # 600 are reserved; it costs 12,500 of 10,000
        assert warned(transport.gate) == ALL_WARNED


@LIMITS
async def test_a_settlement_of_a_task_warns(limits, store):
    transport = make_transport(limits, store, partial(answer, 2480), AsyncRateLimitTransport)
    async with httpx.AsyncClient(transport=transport) as client:
        with request_options(team="search"):
            await client.post(URL, json=body())
        assert warned(transport.gate) == ALL_WARNED


def test_the_permit_of_a_program_that_sends_its_own_requests_warns_when_it_is_settled(store):
    with closing(Gate(providers(**ACCOUNT), store, timeout=0, spending=Spending(clock=store.clock))) as gate:
        charge = gate.acquire("api.test", {"usd_micros": 100})
        assert warned(gate) == {}
        charge.commit({"usd_micros": 9000})
        assert warned(gate) == {"warned_50": 1, "warned_80": 1}


def test_warnings_after_a_settlement_ask_the_store_nothing_more(tmp_path, clock):
    def transactions(name, **options):
        with closing(SQLiteStore(tmp_path / name, clock=clock)) as store:
            transport = make_transport(CEILINGS, store, partial(answer, 2480), **options)
            with httpx.Client(transport=transport) as client:
                client.post(URL, json=body())
            return store.metrics()["transactions"]

    assert transactions("with.db") == transactions("without.db", spending=None)


def test_large_reservations_that_cost_little_do_not_warn_again_and_again(store):
    transport = make_transport({**ACCOUNT, "strict": True}, store, partial(answer, 10))
    with httpx.Client(transport=transport) as client:
        for _ in range(5):
            client.post(URL, json=body(max_tokens=1400))  # 7,100 of 10,000 are reserved; it costs 150
        assert warned(transport.gate) == {"warned_50": 1}


# ---- denials ---------------------------------------------------------------------------------------------------------


def test_a_call_that_is_larger_than_the_limit_is_reported_as_denied_with_what_is_used(store, caplog):
    with run_receiver() as receiver:
        spending = Spending(webhook=receiver.url, clock=store.clock)
        transport = make_transport({**ACCOUNT, "strict": True}, store, partial(answer, 10), spending=spending)
        with httpx.Client(transport=transport) as client:
            for _ in range(3):
                with pytest.raises(Denied):
                    client.post(URL, json=TOO_LARGE)
                store.clock.advance(5)
            wait_until(lambda: receiver.requests, "the warning")
        spending.close()
    assert [record.getMessage() for record in caplog.records] == [
        "100 % of api.test money counts as reached, because it denied a call: 0.00 usd of 0.01 usd is used or reserved"
    ]
    (posted,) = [json.loads(content) for _, content in receiver.requests]
    assert (posted["milestone"], posted["denied"], posted["used"], posted["debt"]) == (100, True, 0, 0)


def test_a_denial_hides_no_later_milestone_and_is_reported_once_in_a_window(store):
    transport = make_transport({**ACCOUNT, "strict": True}, store, partial(answer, 100))

    def deny():
        with pytest.raises(Denied):
            client.post(URL, json=TOO_LARGE)

    with httpx.Client(transport=transport) as client:
        client.post(URL, json=body())  # 600
        for _ in range(15):
            deny()
            client.post(URL, json=body())
        assert warned(transport.gate) == ALL_WARNED
        store.clock.advance(86_400)
        client.post(URL, json=body())
        deny()
        assert warned(transport.gate) == {"warned_50": 1, "warned_80": 1, "warned_100": 2}


def test_calls_that_a_used_up_limit_denies_are_not_reported_again(store):
    transport = make_transport(ACCOUNT, store, partial(answer, 2480))
    with httpx.Client(transport=transport) as client:
        client.post(URL, json=body())
        for _ in range(3):
            with pytest.raises(Denied):
                client.post(URL, json=body())
        assert warned(transport.gate) == ALL_WARNED


def test_calls_that_are_denied_because_the_account_is_paused_say_nothing_about_its_money(store):
    refusal = httpx.Response(429, headers={"Retry-After": "60"})
    transport = make_transport(ACCOUNT, store, lambda _request: refusal)
    with httpx.Client(transport=transport) as client:
        assert client.post(URL, json=body()).status_code == 429
        with pytest.raises(Denied):
            client.post(URL, json=body())
        assert (transport.gate.metrics()["denied"], warned(transport.gate)) == (1, {})


def test_decisions_without_the_store_say_nothing_about_money():
    spending = Spending()
    limit = Limit(100, "1d", unit="usd_micros")
    spending.observe("models", LocalDecision.of_views(START * 10**6, (limit,), [(0, 5, 5)], within_limits=False))
    assert spending.counts == {"spent_micros": 0}


def test_all_warnings_are_shown_by_the_default_configuration_of_logging(store, caplog):
    transport = make_transport(ACCOUNT, store, partial(answer, 2480))
    with httpx.Client(transport=transport) as client:
        client.post(URL, json=body())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
