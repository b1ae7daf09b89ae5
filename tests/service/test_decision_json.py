"""The JSON of decisions from templates is that of the encoded response, byte for byte."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate import Limit, Limiter, Policy
from tidegate.service.api.decision_json import DecisionWriter
from tidegate.service.api.responses import AnswerResponse, BatchResponse, ProblemResponse, decision_response
from tidegate.testing import ManualClock

LIMITS = [
    Limit(3, "1m"),
    Limit(10**9, "250ms"),
    Limit(5, "1d", algorithm="sliding_log", name='100 % "x" \\ ä,"remaining":-1', unit="t%dkens"),
    Limit(2, "1h", algorithm="fixed_window", name="w"),
    Limit(2, "1h", algorithm="concurrency"),
]
encode = msgspec.json.Encoder().encode


@pytest.mark.parametrize("limits", [*([limit] for limit in LIMITS), LIMITS[:1] + LIMITS[3:4]], ids=str)
@pytest.mark.parametrize("mode", ["enforce", "shadow"])
@given(pauses=st.lists(st.integers(0, 10**8), min_size=1, max_size=6))
def test_a_decision(limits, mode, pauses):
    clock, writer, decisions = ManualClock(start=1_728_000_000), DecisionWriter(), []
    limiter = Limiter(Policy("p", limits, mode=mode), clock=clock)
    cost = {limit.unit: 1 for limit in limits}
    for pause in pauses:
        clock.advance(pause / 1e6)
        decisions += [limiter.try_acquire("k", cost), limiter.peek("k", cost)]
    assert [writer.write(each) for each in decisions] == [encode(decision_response(each)) for each in decisions]


def test_a_batch_of_decisions_and_errors():
    limiter, error = Limiter("1/1h"), AnswerResponse(error=ProblemResponse("t", "title", 422, "detail"))
    results = [limiter.try_acquire("k"), error, limiter.try_acquire("k"), None]
    expected = [each if each is error else decision_response(each) for each in results]
    assert DecisionWriter().write_batch(results) == encode(BatchResponse(expected))
