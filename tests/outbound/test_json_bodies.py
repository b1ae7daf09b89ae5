"""JSON bodies: parsed alike with msgspec and with the standard library."""

import json

import pytest

from tests.cases import cases
from tidegate.outbound._quota import json_body
from tidegate.outbound._quota.json_body import MALFORMED, parse_json, read_json

BODIES = [
    b'{"a": [1, -0, 1.5, 1e3, true, null, "\\u00e9\xc3\xa9"]} ',
    b'{"a": 1, "a": 2}',
    b'{"a": 123456789012345678901234567890, "b": 18446744073709551616}',
    b'{"a": 1e400, "b": -1e400}',
    b'{"a": Infinity}',
    b'{"a": "\\ud800"}',
    b'\xef\xbb\xbf{"a": 1}',
    '{"a": "é"}'.encode("utf-16"),
    bytearray(b'{"a": 1}'),
    b"[1, 2]",
    b'"text"',
]
BROKEN = [b"", b"{", b'{"a": 01}', b'{"a": "\xff"}', b'{"a": "\x01"}', b"[" * 100_000, b'{"a": 1} x']


@cases("body", BODIES)
def test_a_body_is_parsed_as_the_standard_library_does(body):
    assert repr(parse_json(body)) == repr(json.loads(body))


@pytest.mark.parametrize("body", BROKEN)
def test_a_malformed_body_raises_the_same_errors_and_is_an_empty_object(body):
    with pytest.raises(MALFORMED):
        parse_json(body)
    assert read_json(body) == {}


def test_without_msgspec_the_standard_library_parses(monkeypatch):
    monkeypatch.setattr(json_body, "FAST_DECODE", None)
    assert read_json(b'{"a": 1}') == {"a": 1}
    assert read_json(b"[1]") == {}
