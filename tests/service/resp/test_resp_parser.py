"""The parser: valid commands cut anywhere, hostile lengths, and the fast path that reads usual pipelines."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.resp.harness import encode
from tidegate.service._resp.parser import MAX_ARGUMENTS, MAX_COMMAND, HttpInputError, parse, read_usual, split_commands

WORDS = st.lists(st.binary(max_size=20), min_size=1, max_size=5)
ACQUIRE = encode("TG.ACQUIRE", "api", "k")


@given(st.lists(WORDS, max_size=6), st.integers(0, 10**6))
def test_commands_cut_anywhere_are_read_when_they_are_complete(commands, cut):
    data = b"".join(encode(*words) for words in commands)
    cut %= len(data) + 1
    first = parse(data[:cut], 1000)
    assert first.error is None
    rest = parse(data[first.consumed :], 1000)
    assert (rest.error, rest.consumed) == (None, len(data) - first.consumed)
    assert first.commands + rest.commands == commands


@given(st.binary(max_size=200))
@example(b"*1\r\n$0\r\n\r\n*")
def test_random_bytes_give_commands_or_an_error_and_never_another_exception(data):
    try:
        commands, consumed, error = parse(data, 1000)
    except HttpInputError:
        return
    assert 0 <= consumed <= len(data)
    assert error is None or error.isascii() or error
    assert all(isinstance(word, bytes) for command in commands for word in command)


USUAL_WORDS = st.sampled_from([b"TG.ACQUIRE", b"api", b"", b"$3", b"\r\n", b"a\r", "ä".encode()])


@given(st.lists(st.lists(USUAL_WORDS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_fast_path_reads_the_same_as_the_parser(commands):
    data = b"".join(encode(*words) for words in commands)
    usual = read_usual(data)
    split = split_commands(data, 1000)
    assert split is None or split == commands
    assert parse(data + b"*", 1000).commands == commands  # not split
    if usual is not None:
        parsed = [[b"TG.ACQUIRE", policy.encode(), key.encode()] for policy, key in zip(*usual, strict=True)]
        assert parsed == parse(data, 1000).commands == commands


@given(WORDS, st.binary(max_size=12))
def test_splitting_reads_what_the_parser_reads(words, more):
    data = encode(*words) + more
    split = split_commands(data, 1000)
    if split is not None:
        strict = parse(data + b"*", 1000)  # an incomplete command at the end is not split
        assert (strict.commands, strict.consumed, strict.error) == (split, len(data), None)


@pytest.mark.parametrize("count", [1, 2, 16])
def test_usual_pipelines_take_the_fast_path(count):
    assert read_usual(ACQUIRE * count) == (["api"] * count, ["k"] * count)


@cases(
    "data",
    [
        b"",
        ACQUIRE[:-1],
        ACQUIRE + ACQUIRE[:-2],
        ACQUIRE + b"\r\n",
        encode("TG.PEEK", "api", "k"),
        encode("TG.ACQUIRE", "api", "ä"),
        encode("TG.ACQUIRE", "api", "k" * 2000),
        ACQUIRE + encode("TG.ACQUIRE", "api", "k" * 2000),
        encode("TG.ACQUIRE", "api", "k", "COST", "1"),
        ACQUIRE.replace(b"$1\r\nk", b"$2\r\nk"),
        (ACQUIRE * 2).replace(b"$1\r\nk", b"$2\r\nk", 1),
        (ACQUIRE * 2).replace(b"$3", b"$4", 1),
        (ACQUIRE * 2).replace(b"$10", b"$11", 1),
        encode("TG.ACQUIRE", "api", "a\r\nb"),
        ACQUIRE * 5000,
    ],
)
def test_everything_else_is_left_to_the_parser(data):
    assert read_usual(data) is None


@cases(
    ("data", "message"),
    [
        (b"*-1\r\n", "invalid multibulk length"),
        (b"*536870911\r\n", "invalid multibulk length: at most 128"),
        (b"*%d\r\n" % (MAX_ARGUMENTS + 1), "invalid multibulk length"),
        (b"*99999999999", "invalid length"),
        (b"*\r\n", "invalid multibulk length"),
        (b"*+1\r\n", "invalid multibulk length"),
        (b"*1\r\n$-1\r\n", "invalid bulk length"),
        (b"*1\r\n$999999999\r\n", "invalid bulk length: at most 65536"),
        (b"*2\r\n$40000\r\n" + b"x" * 40000 + b"\r\n$40000\r\n", f"must not exceed {MAX_COMMAND} bytes"),
        (b"*1\r\n*1\r\n", "expected '$', got '*'"),
        (b"*1\r\n:5\r\n", "expected '$', got ':'"),
        (b"*1\r\n$1\r\nabc", "expected the end of a line"),
        (b"*1\r\n$1\r\nax", "expected the end of a line"),
        (b"*1\r\n$x", "invalid length"),
        (b"PING\r\n", "inline commands are not supported"),
        (b"\r\n", "expected '*'"),
        (b"%1\r\n", "expected '*', got '%'"),
        (b"\x16\x03\x01", "expected '*'"),  # TLS on a port without it
    ],
)
def test_invalid_input_is_refused_before_anything_is_allocated(data, message):
    commands, consumed, error = parse(encode("PING") + data, 1000)
    assert (commands, consumed) == ([[b"PING"]], len(encode("PING")))
    assert message in error


@pytest.mark.parametrize("line", ["GET / HTTP/1.1", "POST / HTTP/1.1", "OPTIONS * HTTP/1.1", "Host: localhost"])
def test_an_http_request_is_recognised(line):
    with pytest.raises(HttpInputError):
        parse(f"{line}\r\n\r\n".encode() + ACQUIRE, 1000)


def test_an_empty_array_is_ignored():
    assert parse(b"*0\r\n" + ACQUIRE, 1000).commands == [[b"TG.ACQUIRE", b"api", b"k"]]


def test_a_batch_is_bounded():
    commands, consumed, _ = parse(ACQUIRE * 5, 3)
    assert (len(commands), consumed) == (3, 3 * len(ACQUIRE))
