"""The encoded responses to Envoy are read back by protobuf, with Envoy's definition of the messages."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tidegate import Limit
from tidegate.core._decision import Decision, ShadowDecision
from tidegate.headers import write
from tidegate.service._envoy.encoding import MAX_UINT32, encode_response
from tidegate.service._envoy.messages import CODE_OK, CODE_OVER_LIMIT, message_classes

PERIODS = {"1s": 1, "1m": 2, "1h": 3, "1d": 4, "1w": 7, "90s": 0}
AT = 1_728_000_000_000_000


def read(data):
    return message_classes()["RateLimitResponse"].FromString(data)


@st.composite
def decisions(draw):
    names = draw(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=3, unique=True))
    limits = tuple(
        Limit(draw(st.integers(1, 2**40)), draw(st.sampled_from(list(PERIODS))), "fixed_window", name=f"a{name}")
        for name in names
    )
    views = [
        (
            draw(st.integers(0, 2**40)),
            draw(st.sampled_from([0, -1]) | st.integers(0, 10**12)),
            draw(st.integers(0, 10**15)),
        )
        for _ in limits
    ]
    return Decision.of_views(AT, limits, views, within_limits=all(retry == 0 for _, retry, _ in views))


@given(st.lists(st.none() | decisions(), min_size=1, max_size=4), st.sampled_from(["x", "ietf", "both", "none"]))
def test_every_field_is_read_back(found, style):
    response = read(encode_response(found, style))
    over = [decision is not None and not decision.allowed for decision in found]
    assert response.overall_code == (CODE_OVER_LIMIT if any(over) else CODE_OK)
    assert [status.code == CODE_OVER_LIMIT for status in response.statuses] == over
    for decision, status in zip(found, response.statuses, strict=True):
        if decision is None:
            assert not status.HasField("current_limit")
            continue
        limit, view = min(
            zip(decision.policy_limits, decision.views, strict=True), key=lambda pair: (pair[1][1] == 0, pair[1][0])
        )
        assert status.current_limit.requests_per_unit == min(MAX_UINT32, limit.quota)
        assert status.current_limit.unit == PERIODS[str(limit.period)]
        assert status.current_limit.name == limit.name
        assert status.limit_remaining == min(MAX_UINT32, view[0])
        assert status.duration_until_reset.ToMicroseconds() == view[2]


@given(decisions(), st.sampled_from(["x", "ietf", "both", "none"]))
def test_the_headers_and_the_body_describe_the_decision(decision, style):
    response = read(encode_response([decision], style))
    headers = [(header.key, header.value) for header in response.response_headers_to_add]
    expected = [(name.lower(), value) for name, value in write(decision, style)]
    if decision.allowed:
        assert (headers, response.raw_body) == (expected, b"")
    else:
        assert headers == [*expected, ("content-type", "application/problem+json")]
        assert json.loads(response.raw_body)["status"] == 429


def test_a_policy_in_shadow_mode_answers_ok():
    limit = Limit(1, "1m")

    denied = ShadowDecision.of_views(AT, (limit,), [(0, 1000, 1000)], within_limits=False)
    response = read(encode_response([denied], "x"))
    assert response.overall_code == CODE_OK
    assert response.raw_body == b""
