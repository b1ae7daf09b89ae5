"""Usage whose input cannot be read: the estimate of the input stays charged."""

import httpx
import pytest

from tests.outbound.pool_client import PRICES, URL
from tidegate.outbound import Providers
from tidegate.outbound._quota.token_usage import usage
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores import MemoryStore

LIMITS = ["100_000/1h unit=tokens name=all", "100_000/1h unit=input-tokens name=in", "100_000/1h unit=output-tokens"]
ESTIMATE = 100  # of the input, by the tokenizer


def used_after(reported, **fields):
    """What is charged after a call whose response reports this usage, as JSON."""
    settings = {"domain": "api.test", "profile": "openai", "limits": LIMITS, **fields}
    answer = httpx.MockTransport(lambda _request: httpx.Response(200, content=f'{{"usage": {reported}}}'.encode()))
    transport = RateLimitTransport(
        Providers.of(settings), MemoryStore(), answer, tokenizer=lambda _text: ESTIMATE, timeout=0
    )
    with httpx.Client(transport=transport) as client:
        client.post(URL, json={"model": "m", "max_tokens": 200})
        (account,) = transport.gate.accounts
        found = {name: each.used for name, each in account.limiter.usage(account.key).items()}
        return found, account.spent


@pytest.mark.parametrize(
    "prompt", ["", '"prompt_tokens": 12.5,', '"prompt_tokens": NaN,', '"prompt_tokens": 1e30,', '"prompt_tokens": -1,']
)
def test_the_estimate_of_an_unreadable_input_stays(prompt):
    found, _ = used_after(f'{{{prompt} "completion_tokens": 30}}')
    assert (found["all"], found["in"]) == (ESTIMATE + 30, ESTIMATE)
    _, money = used_after(f'{{{prompt} "completion_tokens": 30}}', price=PRICES)
    assert money == ESTIMATE + 5 * 30


def test_an_input_that_only_the_total_includes_is_counted():
    found, _ = used_after('{"completion_tokens": 30, "total_tokens": 37}')
    assert (found["all"], found["in"]) == (37, 7)


def test_with_a_total_only_the_estimate_of_the_input_stays():
    found, _ = used_after('{"total_tokens": 37}')
    assert (found["all"], found["in"]) == (37, ESTIMATE)


def test_a_cached_count_above_the_prompt_is_not_believed():
    details = '"prompt_tokens_details": {"cached_tokens": 99999}'
    _, money = used_after(f'{{"prompt_tokens": 1000, "completion_tokens": 0, {details}}}', price=PRICES)
    assert money == 1000
    believed = details.replace("99999", "1000")
    _, money = used_after(f'{{"prompt_tokens": 1000, "completion_tokens": 0, {believed}}}', price=PRICES)
    assert money == 100


def test_usage_that_reports_everything_is_unchanged():
    assert usage(b'{"usage": {"prompt_tokens": 12, "completion_tokens": 30}}')["tokens"] == 42
