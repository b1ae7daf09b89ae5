"""Messages between agents: the document's JSON, messages that are refused, and signatures."""

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ConfigError
from tidegate.adaptive._signing import MalformedError, read_signed
from tidegate.adaptive._update import CapacityUpdate, retain_key

PLAIN = {
    "resource": "api",
    "agent_id": "agent-1",
    "new_capacity": 50,
    "reason": "received 429 response",
    "timestamp": "2024-10-04T00:00:00.5Z",
}
UPDATE = CapacityUpdate("api", "agent-1", 50, "received 429 response", datetime(2024, 10, 4, 0, 0, 0, 500_000, UTC))


def test_the_json_of_the_specification():
    assert CapacityUpdate.from_json(json.dumps(PLAIN)) == UPDATE
    assert json.loads(UPDATE.to_json()) == {**PLAIN, "timestamp": "2024-10-04T00:00:00.500000Z"}


@pytest.mark.parametrize(
    "timestamp",
    ["2024-10-04T00:00:00.500000123Z", "2024-10-04T02:00:00.5+02:00", "2024-10-04T00:00:00.5", "20241004T000000.5Z"],
)
def test_other_formats_of_a_timestamp(timestamp):
    """Go writes nanoseconds."""
    assert CapacityUpdate.from_json(json.dumps({**PLAIN, "timestamp": timestamp})) == UPDATE


def test_the_timestamp_replaces_a_missing_epoch():
    assert UPDATE.order == UPDATE.at == 1_728_000_000_500_000
    early = CapacityUpdate("api", "a", 1, "", datetime(1, 1, 1, tzinfo=UTC))
    assert early.order == 1
    berlin = CapacityUpdate("api", "a", 1, "", datetime(2024, 10, 4, 2, tzinfo=timezone(timedelta(hours=2))))
    assert json.loads(berlin.to_json())["timestamp"] == "2024-10-04T00:00:00.000000Z"


@cases(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "more than 40000"),
        ("[" * 39_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        (b"\xff\xfe\x00", "not JSON"),
        ({"resource": None}, "resource must be a string"),
        ({"resource": ""}, "resource must be a string"),
        ({"resource": "x" * 2000}, "resource must be a string"),
        ({"agent_id": 5}, "agent_id must be a string"),
        ({"agent_id": "\ud800"}, "agent_id must be a string"),
        ({"resource": "\udfff"}, "resource must be a string"),
        ({"reason": "\ud800"}, "reason must be a string"),
        ({"reason": "x" * 1025}, "reason must be a string"),
        ({"reason": ["x"]}, "reason must be a string"),
        ({"new_capacity": None}, "new_capacity must be an integer"),
        ({"new_capacity": 0}, "new_capacity must be an integer"),
        ({"new_capacity": -5}, "new_capacity must be an integer"),
        ({"new_capacity": 1.5}, "new_capacity must be an integer"),
        ({"new_capacity": True}, "new_capacity must be an integer"),
        ({"new_capacity": "50"}, "new_capacity must be an integer"),
        ({"new_capacity": 10**400}, "new_capacity must be an integer"),
        ({"timestamp": None}, "timestamp must be"),
        ({"timestamp": "yesterday"}, "timestamp must be"),
        ({"timestamp": 1_728_000_000}, "timestamp must be"),
        ({"timestamp": "0001-01-01T00:00:00+23:59"}, "timestamp must be"),
        ({"epoch": 0}, "epoch must be"),
        ({"epoch": 2**52 + 1}, "epoch must be"),
        ({"epoch": "7"}, "epoch must be"),
        ({"retry_after": -1}, "retry_after must be"),
        ({"retry_after": float("nan")}, "retry_after must be"),
        ({"retry_after": float("inf")}, "retry_after must be"),
        ({"retry_after": "12"}, "retry_after must be"),
        ({"original": 0}, "original must be an integer"),
        ({"window": 0}, "window must be a positive number"),
        ({"window": "1m"}, "window must be a positive number"),
        ({"factor": 0}, "factor must be a number above 0"),
        ({"factor": 1.5}, "factor must be a number above 0"),
        ({"factor": float("nan")}, "factor must be a number above 0"),
    ],
)
def test_malformed_updates_are_refused(text, message):
    if isinstance(text, dict):
        text = json.dumps({**PLAIN, **text})
    with pytest.raises(MalformedError, match=message):
        CapacityUpdate.from_json(text)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_input_is_an_update_or_malformed(text):
    try:
        CapacityUpdate.from_json(text)
    except MalformedError:
        return
    raise AssertionError("random bytes are no update")


@given(
    st.text(min_size=1, max_size=50),
    st.text(min_size=1, max_size=50),
    st.integers(1, 2**53 - 1),
    st.text(max_size=50),
    st.datetimes(timezones=st.just(UTC)),
    st.none() | st.integers(1, 2**52),
    st.none() | st.floats(0, 10**6),
    st.none() | st.text(min_size=1),
    st.none() | st.floats(0.001, 1),
)
def test_updates_round_trip_through_json(
    resource, agent, capacity, reason, timestamp, epoch, retry_after, secret, factor
):
    update = CapacityUpdate(
        resource, agent, capacity, reason, timestamp, epoch, retry_after, original=capacity, window=0.5, factor=factor
    )
    assert CapacityUpdate.from_json(update.to_json(secret), secret) == update


def test_with_a_secret_only_signed_messages_count():
    signed = UPDATE.to_json("secret")
    assert CapacityUpdate.from_json(signed, "secret") == CapacityUpdate.from_json(signed, b"secret") == UPDATE
    assert CapacityUpdate.from_json(signed) == UPDATE, "who has no secret takes everything"
    fields = json.loads(signed)
    for forged in (
        UPDATE.to_json(),
        UPDATE.to_json("guess"),
        json.dumps({**fields, "new_capacity": 1}),
        json.dumps({**fields, "signature": "é"}),
        json.dumps({**fields, "signature": None}),
        json.dumps({**fields, "extra": 1}),
    ):
        with pytest.raises(MalformedError, match="not signed with the shared secret"):
            CapacityUpdate.from_json(forged, "secret")


def test_the_signature_is_as_documented():
    """Another language can make it: HMAC-SHA256 of the sorted JSON without spaces."""
    fields = json.loads(UPDATE.to_json("secret"))
    signature = fields.pop("signature")
    text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    assert signature == hmac.new(b"secret", text, hashlib.sha256).hexdigest()
    assert len(bytes.fromhex(fields["nonce"])) == 16
    assert fields["nonce"] != json.loads(UPDATE.to_json("secret"))["nonce"]
    plain = {**PLAIN, "timestamp": "2024-10-04T00:00:00.500000Z", "subject": "ratelimit.capacity"}
    signature = "c0824eeb248b05fc2526674219c1c6bb005c6b15fb443b8f2df6d42c1d6ed9f1"
    assert CapacityUpdate.from_json(json.dumps({**plain, "signature": signature}), "secret") == UPDATE


@pytest.mark.parametrize("secret", [None, "secret"])
def test_deep_json_is_malformed_at_every_depth(secret):
    """Reading and writing JSON may give up at different depths."""
    for depth in range(1, 3000, 7):
        text = '{"a":' * depth + "1" + "}" * depth
        with pytest.raises(MalformedError):
            CapacityUpdate.from_json(text, secret)
        with pytest.raises(MalformedError):
            read_signed("[" * depth + "]" * depth, secret, 40_000, "ratelimit.capacity")


def test_names_of_retained_updates_do_not_collide_and_are_short():
    assert retain_key("a\nb", "c") != retain_key("a", "b\nc")
    assert retain_key("a/b", "c") != retain_key("a", "b/c")
    assert retain_key("a", "b", "tag") != retain_key("a", "b")
    assert len(retain_key("€" * 1024, "€" * 1024)) < 100
    assert retain_key("€" * 1024, "x") != retain_key("€" * 1024, "y")


@pytest.mark.parametrize("secret", ["", b"", 5])
def test_an_empty_secret_is_refused(secret):
    with pytest.raises(ConfigError, match="secret: must be a non-empty string or bytes"):
        UPDATE.to_json(secret)


def test_messages_of_a_newer_version_are_refused():
    fields = json.loads(UPDATE.to_json())
    assert CapacityUpdate.from_json(json.dumps({**fields, "version": 1})) == UPDATE
    with pytest.raises(MalformedError, match="version 2, from a newer tidegate; this tidegate reads version 1"):
        CapacityUpdate.from_json(json.dumps({**fields, "version": 2}))
