"""What calls to language models cost: estimates, and the usage in their responses."""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate.outbound._quota.request_tokens import estimate
from tidegate.outbound._quota.token_usage import UsageReader, usage

OPENAI = {"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}}
RESPONSES = {"usage": {"input_tokens": 12, "output_tokens": 30, "total_tokens": 42}}
ANTHROPIC = {"usage": {"input_tokens": 10, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 999,
                       "output_tokens": 30}}  # fmt: skip
UNITS = {"tokens": 42, "input-tokens": 12, "output-tokens": 30}


def events(*payloads, names=()):
    lines = []
    for number, payload in enumerate(payloads):
        if number < len(names):
            lines.append(f"event: {names[number]}")
        lines.append(f"data: {payload if isinstance(payload, str) else json.dumps(payload)}")
        lines.append("")
    return "\n".join([*lines, ""]).encode()


OPENAI_STREAM = events({"choices": [], "usage": None}, {"choices": [{"delta": {"content": "hi"}}], "usage": None},
                       {"choices": [], **OPENAI}, "[DONE]")  # fmt: skip
RESPONSES_STREAM = events({"type": "response.created", "response": {"usage": None}},
                          {"type": "response.completed", "response": RESPONSES})  # fmt: skip
ANTHROPIC_STREAM = events(
    {"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_creation_input_tokens": 2,
                                                    "output_tokens": 1}}},
    {"type": "content_block_delta", "delta": {"text": "the usage of words"}},
    {"type": "message_delta", "usage": {"output_tokens": 30}},
    {"type": "message_stop"},
    names=("message_start", "content_block_delta", "message_delta", "message_stop"),
)  # fmt: skip


@pytest.mark.parametrize("body", [OPENAI, RESPONSES, ANTHROPIC], ids=["openai", "responses", "anthropic"])
def test_the_usage_of_a_whole_response(body):
    assert usage(json.dumps(body).encode()) == UNITS


@pytest.mark.parametrize(
    "stream", [OPENAI_STREAM, RESPONSES_STREAM, ANTHROPIC_STREAM, json.dumps(OPENAI, indent=1).encode()]
)
@given(cuts=st.lists(st.integers(0, 700), max_size=8))
def test_the_usage_of_a_response_split_anywhere(stream, cuts):
    reader = UsageReader()
    places = [0, *sorted(cuts), len(stream)]
    for start, end in pairwise(min(place, len(stream)) for place in places):
        reader.feed(stream[start:end])
    assert reader.result() == UNITS


def test_the_usage_of_a_compressed_response():
    reader = UsageReader("gzip")
    packed = gzip.compress(ANTHROPIC_STREAM)
    for i in range(0, len(packed), 7):
        reader.feed(packed[i : i + 7])
    assert reader.result() == UNITS


@cases("body", [b"", b"no json", b"[]", b"{}", b'{"usage": 5}', b'{"usage": {}}', b'{"usage": {"total_tokens": -1}}',
     b'{"usage": {"total_tokens": "many"}}', b'{"usage": {"total_tokens": true}}', b"[" * 100_000, b"\xff\xfe",
     b'data: {"usage": 7}\n\n', b'{"usage": {"total_tokens": 1e400}}'])  # fmt: skip
def test_a_body_without_usage_returns_none(body):
    assert usage(body) is None
    reader = UsageReader()
    reader.feed(body)
    assert reader.result() is None


def test_an_unknown_format_has_no_usage():
    for coding in ("br", "gzip"):
        reader = UsageReader(coding)
        reader.feed(json.dumps(OPENAI).encode())
        assert reader.result() is None


@pytest.mark.parametrize(
    ("said", "most"),
    [({"max_tokens": 50}, 50), ({"max_completion_tokens": 60, "max_tokens": 1}, 60), ({"max_output_tokens": 70}, 70),
     ({}, 1000), ({"max_tokens": "x"}, 1000), ({"max_tokens": None}, 1000)],
)  # fmt: skip
def test_an_estimate_is_the_request_plus_the_maximum_response(said, most):
    body = json.dumps(said).encode()
    asked = -(-len(body) // 4)
    assert estimate(body) == {"tokens": asked + most, "input-tokens": asked, "output-tokens": most}


def test_the_estimate_of_an_empty_request():
    assert estimate(None) == {"tokens": 1000, "input-tokens": 0, "output-tokens": 1000}
