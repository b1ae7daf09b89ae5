"""Which responses are refusals, and how long nothing is sent after one: in virtual time."""

import httpx
import pytest

from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.testing import ManualClock

START = 1_700_000_000
URL = "https://api.github.com/search"
NONE_LEFT = {"x-ratelimit-limit": "30", "x-ratelimit-remaining": "0", "x-ratelimit-reset": str(START + 45)}


def wait_after(status, headers):
    """Return how long the second request waits after a first response, and the metrics."""
    clock = ManualClock(START)
    answers = iter([httpx.Response(status, headers=headers), httpx.Response(200)])
    transport = RateLimitTransport(
        Providers.of({"domain": "api.github.com", "limit": 100, "period": "1h"}),
        transport=httpx.MockTransport(lambda _request: next(answers)),
        clock=clock,
    )
    with httpx.Client(transport=transport) as client:
        client.get(URL)
        outcome = client.get(URL).extensions["tidegate"]
        return outcome.waited, transport.gate.metrics()


@pytest.mark.parametrize("status", [403, 429])
def test_a_secondary_limit_of_github_pauses_until_retry_after(status):
    waited, metrics = wait_after(status, {"retry-after": "60", "x-ratelimit-remaining": "22"})
    assert waited == pytest.approx(60, abs=1)
    assert metrics["refused"] == 1


@pytest.mark.parametrize("status", [403, 429])
def test_a_refusal_with_nothing_left_pauses_until_the_reset(status):
    waited, metrics = wait_after(status, NONE_LEFT)
    assert waited == pytest.approx(45, abs=1)
    assert metrics["refused"] == 1


@pytest.mark.parametrize("headers", [{}, {"x-ratelimit-limit": "30", "x-ratelimit-remaining": "22"}])
def test_a_403_that_says_nothing_about_limits_is_no_refusal(headers):
    waited, metrics = wait_after(403, headers)
    assert (waited, metrics["refused"]) == (0.0, 0)
