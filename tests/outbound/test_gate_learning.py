"""What a gate learns from responses in virtual time: capacities, refusals, pauses, corrections by headers."""

from itertools import pairwise

import httpx
import pytest

from tests.cases import cases
from tests.outbound.virtual_provider import START, URL, Server, answers, call, providers, saturate, usage
from tidegate import Denied
from tidegate.bus import open_bus
from tidegate.outbound import Gate
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


@pytest.mark.parametrize("aligned", [False, True])
def test_a_provider_that_allows_a_third_is_detected_within_three_windows(aligned):
    """Then 90 to 100 % of what it really allows is used, and fewer than 2 % of requests are refused."""
    clock = ManualClock(START)
    server = Server(clock, 30, aligned=aligned, latency=0.1)
    gate = saturate(server, providers(90), 15 * 60)
    settled = server.windows(15)[3:]
    assert all(27 <= let_through <= 30 for let_through, _ in settled)
    refused = sum(refused for _, refused in settled)
    assert refused / sum(map(sum, settled)) < 0.02
    assert gate.metrics()["refused"] > 0


def test_the_headers_of_a_stricter_provider_prevent_refusals_altogether():
    def headers(server, now, _ok):
        left = server.left(now)
        reset = int(server.recent[0] + 60 - now) + 1 if server.recent else 60
        return {"X-RateLimit-Limit": "30", "X-RateLimit-Remaining": str(left), "X-RateLimit-Reset": str(reset)}

    clock = ManualClock(START)
    server = Server(clock, 30, headers=headers, latency=0.1)
    gate = saturate(server, providers(90), 10 * 60)
    assert server.windows(10) == [(30, 0)] * 10
    assert gate.metrics()["refused"] == 0
    assert gate.metrics()["corrected"] > 0


def test_capacity_recovers_gradually_after_refusals():
    clock = ManualClock(START)
    server = Server(clock, 10, latency=0.1)
    transport = RateLimitTransport(providers(40), transport=httpx.MockTransport(server), clock=clock)
    with httpx.Client(transport=transport) as client:
        while clock.now() - START < 600:
            client.get(URL)
        server.limit = 40  # whatever was wrong there is over
        seen = [transport.gate.capacities()["x.example"]]
        for _ in range(32):
            clock.advance(300)
            client.get(URL)
            seen.append(transport.gate.capacities()["x.example"])
    assert seen[0] in (10, 11)
    assert max(after - before for before, after in pairwise(seen)) <= 2
    assert seen == sorted(seen)
    assert seen[-1] == 40


def test_capacity_recovers_without_waiting_callers():
    clock = ManualClock(START)
    gate, send = answers(clock, (429, {}), *[(200, {})] * 11)
    send()
    clock.advance(10 * 3600)
    for _ in range(10):
        assert send() == 200
    with pytest.raises(Denied):
        send()
    gate.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "30"},
        {"Retry-After": "Fri, 04 Oct 2024 00:00:30 GMT"},
        {"retry-after": "30", "X-RateLimit-Reset": "9999"},
    ],
)
def test_nothing_is_sent_before_retry_after(headers):
    clock = ManualClock(START)
    gate, send = answers(clock, (429, headers), (200, {}))
    assert send() == 429
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 30.0
    clock.advance(29.999999)
    with pytest.raises(Denied):
        send()
    clock.advance(0.000001)
    assert send() == 200
    gate.close()


def test_without_retry_after_the_pause_doubles():
    clock = ManualClock(START)
    gate, send = answers(clock, *[(429, {})] * 5, (200, {}), (429, {}), known=providers(100))
    pauses = []
    for _ in range(5):
        send()
        with pytest.raises(Denied) as denied:
            send()
        pauses.append(denied.value.decision.retry_after)
        clock.advance(pauses[-1])
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    send()
    send()
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 1.0  # it had worked in between
    gate.close()


def test_a_503_halves_the_capacity():
    clock = ManualClock(START)
    gate, send = answers(clock, (503, {"Retry-After": "5"}), (200, {}))
    send()
    assert gate.capacities() == {"x.example": 5}
    gate.close()


@cases(("headers", "left"), [
        ({"X-RateLimit-Limit": "10", "X-RateLimit-Remaining": "3", "X-RateLimit-Reset": "30"}, 3),
        ({"RateLimit-Policy": '"m";q=10;w=60', "RateLimit": '"m";r=2;t=30'}, 2),
        ({"RateLimit": "limit=10, remaining=4, reset=5"}, 4),
        ({"RateLimit-Limit": "10", "RateLimit-Remaining": "5", "RateLimit-Reset": "5"}, 5),
        ({"anthropic-ratelimit-requests-limit": "10", "anthropic-ratelimit-requests-remaining": "6",
          "anthropic-ratelimit-requests-reset": "2024-10-04T00:00:30Z"}, 6),
        ({"x-ratelimit-limit-requests": "10", "x-ratelimit-remaining-requests": "7",
          "x-ratelimit-reset-requests": "6m0s"}, 7),
        ({"X-RateLimit-Remaining": "999999999999"}, 9),  # never beyond what is configured
        ({"X-RateLimit-Remaining": "-5"}, 9),
        ({"X-RateLimit-Remaining": "9" * 5000}, 9),
        ({"X-RateLimit-Remaining": "two"}, 9),
        ({"RateLimit-Policy": '"day";q=10;w=86400', "RateLimit": '"day";r=0;t=30'}, 9),  # a limit that we do not have
    ])  # fmt: skip
def test_usage_is_corrected_by_provider_headers(headers, left):
    clock = ManualClock(START)
    gate, send = answers(clock, (200, headers), *[(200, {})] * 20)
    send()
    for _ in range(left):
        send()
    with pytest.raises(Denied):
        send()
    gate.close()


def test_provider_headers_can_only_undo_earlier_corrections():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    known = providers()
    queue = iter([{"X-RateLimit-Remaining": "2"}, {"X-RateLimit-Remaining": "6"}, {"X-RateLimit-Remaining": "10"}])
    gate = Gate(known, store, timeout=0)

    def send(_provider):
        return ProviderResponse(200, list(next(queue).items()), lambda: None, None)

    left = []
    for _ in range(3):
        gate.run(gate.send_flow(call(), send))
        left.append(10 - usage(known, store))
    assert left == [2, 6, 7]  # three were sent by us
    gate.close()


def test_an_exhausted_quota_pauses_until_the_reset():
    clock = ManualClock(START)
    said = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "20"}
    gate, send = answers(clock, (200, said), (200, {"X-RateLimit-Remaining": "10"}), (200, {}))
    send()
    with pytest.raises(Denied):
        send()
    # The permits the provider took away are back when it says so; until it does, our own record stands.
    clock.advance(60)
    send()
    gate.close()


def test_absurd_header_values_have_little_effect():
    """A pause of a century is a day at most, and what is taken away is back after a period."""
    clock = ManualClock(START)
    gate, send = answers(clock, (429, {"Retry-After": "9" * 30}), (200, {"X-RateLimit-Remaining": "0",
                         "X-RateLimit-Reset": "99999999"}), (200, {}))  # fmt: skip
    send()
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.retry_after == 86_400.0
    clock.advance(86_400)
    send()
    clock.advance(60)
    send()
    gate.close()


def test_learning_can_be_turned_off():
    clock = ManualClock(START)
    known = providers(learn="off")
    gate, send = answers(clock, *[(200, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "50"})] * 10, known=known)
    for _ in range(10):
        send()
    gate.close()


def test_a_refusal_reaches_other_processes_over_the_bus():
    clock = ManualClock(START)
    with open_bus("local://refusals", clock=clock) as mine, open_bus("local://refusals", clock=clock) as other:
        gate, send = answers(clock, (429, {"Retry-After": "30"}), bus=mine)
        elsewhere, send_there = answers(clock, (200, {}), (200, {}), bus=other)
        send_there()
        send()
        with pytest.raises(Denied) as denied:
            send_there()
        assert denied.value.decision.retry_after == 30.0
        assert elsewhere.capacities() == {"x.example": 5}
        gate.close()
        elsewhere.close()
