"""Accounts of a gate whose requests have many different credentials."""

import sys
import threading

import httpx
import pytest

from tests.outbound.flows import START, answer, reply
from tidegate.outbound import Gate, OutboundRequest, Providers
from tidegate.outbound._providers.provider import KeyLocation
from tidegate.outbound._quota.accounts import ALWAYS_KEPT
from tidegate.outbound._quota.exchange import credential_of
from tidegate.outbound.httpx import LIBRARY
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


def call(number):
    headers = {"authorization": f"Bearer {number}"}
    return OutboundRequest("GET", "https://x.example/", headers.get, lambda: None, True, lambda _error: False)


@pytest.fixture
def gate():
    known = Providers.of({"domain": "x.example", "limit": 10, "period": "1s", "per": ["credential"]})
    gate = Gate(known, MemoryStore(clock=ManualClock(START)))
    yield gate
    gate.close()


def test_idle_accounts_are_dropped(gate):
    for number in range(4 * ALWAYS_KEPT):
        answer(gate, call=call(number))
        gate.clock.advance(10)
    assert gate.metrics()["accounts"] <= ALWAYS_KEPT
    assert gate.metrics()["sent"] == 4 * ALWAYS_KEPT


def test_accounts_with_state_are_kept(gate):
    """One was refused for long, at one a request is under way; those used lately are not looked at."""
    answer(gate, 429, [("Retry-After", "86400")], call("refused"))
    refused, under_way = gate.account_of(call("refused")), []

    def send(_provider):
        under_way.append(gate.account_of(call("slow")))
        for number in range(2 * ALWAYS_KEPT):
            gate.clock.advance(10)
            answer(gate, call=call(number))
        return reply()

    gate.run(gate.send_flow(call("slow"), send))
    assert gate.metrics()["accounts"] < ALWAYS_KEPT
    assert gate.account_of(call("refused")) is refused
    assert gate.account_of(call("slow")) is under_way[0]
    assert gate.capacities()[refused.resource] < 10


def test_a_dropped_account_is_reopened_with_its_usage(gate):
    first = gate.account_of(call("first"))
    answer(gate, call=call("first"))
    for number in range(ALWAYS_KEPT):
        gate.clock.advance(10)
        answer(gate, call=call(number))
    again = gate.account_of(call("first"))
    assert again is not first
    answer(gate, 429, call=call("first"))
    assert gate.capacities()[again.resource] < 10


def test_metrics_can_be_read_while_accounts_are_opened(gate):
    errors, done = [], threading.Event()

    def read_metrics():
        while not done.is_set():
            try:
                gate.metrics()
                gate.capacities()
            except RuntimeError as error:
                errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=read_metrics)
    thread.start()
    try:
        for number in range(300):
            answer(gate, call=call(number))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []


def test_credentials_that_are_not_utf_8_have_separate_accounts():
    place = KeyLocation("query", "key")
    urls = [f"https://x.example/?key={value}" for value in ("%ff", "%fe", "%C3%BF", "%EF%BF%BD")]
    calls = [OutboundRequest("GET", url, {}.get, lambda: None, True, lambda _error: False) for url in urls]
    assert len({credential_of(place, one) for one in calls}) == len(urls)


def test_headers_that_httpx_decodes_alike_are_separate_credentials():
    values = [b"\xff", b"\xfe", b"\xc3\xbf", b"plain"]
    requests = [httpx.Request("GET", "https://x.example/", headers=[(b"X-API-Key", value)]) for value in values]
    assert len({credential_of(None, LIBRARY.to_outbound_request(request)) for request in requests}) == len(values)
