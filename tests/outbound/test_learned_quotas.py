"""Quotas that no file knows: learned from the headers and bodies of responses, and shared between processes."""

import json

import pytest

from tests.cases import cases
from tests.outbound.virtual_provider import START, answers, call, providers
from tidegate import Denied
from tidegate.core import Limit
from tidegate.headers import Advice, LimitAdvice
from tidegate.outbound import Gate, Providers
from tidegate.outbound._capacity.learned_quotas import LearnedQuotas
from tidegate.outbound._quota.exchange import ProviderResponse
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

LIMITS = (Limit(90, "1m"), Limit(9000, "1m", unit="tokens", name="tpm"))
MINUTE = 60 * 10**6


def quota(number, unit="requests", **more):
    return Advice((LimitAdvice("x", number, unit=unit, **more),))


@cases(
    ("advice", "learned"),
    [
        (quota(30, window=60.0), (30, 0)),
        (quota(30, reset_after=59.0), (30, 0)),
        (quota(30, reset_after=3600.0), (30, 0)),  # a longer period: 30 in a minute are never too few
        (quota(3000, "tokens", window=60.0), (0, 3000)),
        (quota(30, reset_after=1.0), (0, 0)),  # perhaps 30 in a second
        (quota(30), (0, 0)),
        (quota(30, window=1.0), (0, 0)),  # a limit that we do not have
        (quota(90, window=60.0), (0, 0)),
        (quota(10**9, window=60.0), (0, 0)),  # never more than configured
        (quota(0, window=60.0), (0, 0)),
        (quota(30, "images", window=60.0), (0, 0)),
    ],
)
def test_a_lower_quota_of_the_same_period_is_learned(advice, learned):
    quotas = LearnedQuotas(LIMITS)
    assert quotas.report(advice, 0) == any(learned)
    assert quotas.quotas == learned


def test_a_quota_that_changes_is_used_when_it_was_reported_for_a_period():
    quotas = LearnedQuotas(LIMITS)
    quotas.report(quota(30, window=60.0), 0)
    assert quotas.report(quota(40, window=60.0), 1)
    assert quotas.quotas == (0, 0)  # paths may have limits of their own
    assert not quotas.report(quota(40, window=60.0), MINUTE)
    assert quotas.report(quota(40, window=60.0), MINUTE + 1)
    assert quotas.quotas == (40, 0)


def test_paths_that_report_different_quotas_are_not_mixed_up():
    quotas = LearnedQuotas(LIMITS)
    for second in range(600):
        quotas.report(quota((10, 80)[second % 2], window=60.0), second * 10**6)
        assert second == 0 or quotas.quotas == (0, 0)


def test_a_learned_quota_limits_the_next_calls():
    clock = ManualClock(START)
    headers = {"X-RateLimit-Limit": "3", "X-RateLimit-Remaining": "2", "X-RateLimit-Reset": "60"}
    gate, send = answers(clock, *[(200, headers)] * 9)
    for _ in range(3):
        send()
    with pytest.raises(Denied) as denied:
        send()
    assert denied.value.decision.limits[0].quota == 3
    clock.advance(60)
    for _ in range(3):
        send()
    with pytest.raises(Denied):
        send()
    gate.close()


def test_learning_may_be_off():
    headers = {"RateLimit-Policy": '"m";q=3;w=60', "RateLimit": '"m";r=2;t=60'}
    gate, send = answers(ManualClock(START), *[(200, headers)] * 10, known=providers(learn="off"))
    for _ in range(10):
        send()
    gate.close()


def test_an_endpoint_still_fits_into_a_learned_quota():
    headers = {"RateLimit-Policy": '"m";q=3;w=60', "RateLimit": '"m";r=3;t=60'}
    known = providers(endpoints=[{"path": "/batch", "cost": 5}])
    gate, send = answers(ManualClock(START), (200, headers), (200, headers), known=known)
    send()
    assert gate.account_of(call()).provider.limits[0].quota == 5
    gate.close()


def test_a_changed_file_starts_again(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("domain: x.example\nlimit: 10\nperiod: 1m\n")
    known, clock = Providers.load(files=[file]), ManualClock(START)
    headers = {"RateLimit-Policy": '"m";q=3;w=60', "RateLimit": '"m";r=3;t=60'}
    gate, send = answers(clock, (200, headers), (200, {}), known=known, reload=0)
    send()
    assert gate.account_of(call()).provider.limits[0].quota == 3
    file.write_text("domain: x.example\nlimits: [2/1m]\n")
    send()
    assert gate.account_of(call()).provider.limits[0].quota == 2
    gate.close()


def test_a_process_that_starts_later_knows_what_was_learned():
    clock = ManualClock(START)
    store = MemoryStore(clock=clock)
    headers = {"RateLimit-Policy": '"m";q=3;w=60', "RateLimit": '"m";r=2;t=60'}
    first, send = answers(clock, (200, headers), store=store)
    send()
    first.close()
    second, send = answers(clock, (200, {}), (200, {}), store=store)
    send()
    send()
    with pytest.raises(Denied):
        send()
    second.close()


def test_what_was_charged_for_a_lower_remainder_is_returned_when_the_quota_is_known():
    clock = ManualClock(START)
    unknown = {"X-RateLimit-Limit": "3", "X-RateLimit-Remaining": "2"}
    known = {**unknown, "X-RateLimit-Remaining": "1", "X-RateLimit-Reset": "60"}
    gate, send = answers(clock, (200, unknown), (200, known), (200, {}))
    for _ in range(3):
        send()
    with pytest.raises(Denied):
        send()
    gate.close()


def test_the_body_of_a_refusal_tells_the_quota():
    """OpenAI: `Rate limit reached for m … on tokens per min (TPM): Limit 3000, Used 2900, …`."""
    settings = {"domain": "x.example", "profile": "openai", "limits": ["90/1m", "9000/1m unit=tokens name=tpm"]}
    gate = Gate(Providers.of(settings), clock=ManualClock(START), timeout=0)
    message = "Rate limit reached for m on tokens per min (TPM): Limit 3,000, Used 2900, Requested 900."
    body = json.dumps({"error": {"message": message}}).encode()

    def send(_provider, _body=None):
        return ProviderResponse(429, [], lambda: None, None, lambda: body)

    request = call("POST", json.dumps({"model": "m", "max_tokens": 100}).encode())
    gate.run(gate.send_flow(request, send))
    assert [limit.quota for limit in gate.account_of(request).provider.limits] == [90, 3000]
    gate.close()
