"""Parses commands of the Redis protocol (RESP): an array of bulk strings each. Strict, and bounded in every dimension.

hiredis is not used: it allocates a list as long as the header of an array claims, before any element has arrived, so
that 13 bytes of a client can make it allocate gigabytes. Parsing common pipelines with `read_usual` is as fast.

Inline commands (a line of words without lengths) are refused. A web page can make a browser send such lines to a port
of its machine, as the body of an HTTP request; so the first line of an HTTP request ends the connection.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_ARGUMENTS: Final = 128  # words of a command
MAX_COMMAND: Final = 64 * 1024  # bytes of a command; the longest argument is a reservation id
MAX_HEADER: Final = 12  # bytes of a line with a length
MAX_USUAL: Final = 64 * 1024  # bytes of a pipeline that is decided in one step of the event loop
HTTP_WORDS: Final = (b"GET", b"POST", b"PUT", b"HEAD", b"OPTIONS", b"PATCH", b"DELETE", b"CONNECT", b"TRACE", b"Host:")
HTTP_WORD_LENGTH: Final = 8  # bytes that show whether input is an HTTP request

USUAL_NAME: Final = "TG.ACQUIRE"
USUAL_COUNT: Final = "*3"
USUAL_SIZE: Final = f"${len(USUAL_NAME)}"
USUAL_LINES: Final = 7  # of one common command: the count, then length and value of three words
SIZES: Final = tuple(f"${length}" for length in range(1025))  # the header of a word, by its length
SIZE_LINES: Final = tuple(size.encode() for size in SIZES)
COUNTS: Final = {b"*%d" % count: count for count in range(1, MAX_ARGUMENTS + 1)}  # by the header of a command

Command = list[bytes]


class Parsed(NamedTuple):
    """The complete commands in some input, how many bytes they have, and why the rest is invalid (None: it is not)."""

    commands: list[Command]
    consumed: int
    error: str | None


class HttpInputError(Exception):
    """The input is an HTTP request."""


class _Incomplete(Exception):  # noqa: N818 - not an error: more input is needed
    """The command is not complete."""


class _InvalidInputError(Exception):
    """The input is not a command."""


def read_usual(data: bytes) -> tuple[list[str], list[str]] | None:
    """Read input that consists of `TG.ACQUIRE policy key` commands only: return the policies and the keys.

    None if the input is anything else, even if it is valid. Splitting at line ends is unambiguous here: every line has
    the length that the line before it says.
    """
    if len(data) > MAX_USUAL or not data.isascii():
        return None
    lines = data.decode("ascii").split("\r\n")
    if len(lines) == USUAL_LINES + 1:  # one command
        count, size, name, policy_size, policy, key_size, key, end = lines
        if (
            name == USUAL_NAME
            and count == USUAL_COUNT
            and size == USUAL_SIZE
            and not end
            and len(policy) < len(SIZES) > len(key)
            and policy_size == SIZES[len(policy)]
            and key_size == SIZES[len(key)]
        ):
            return [policy], [key]
        return None
    return _read_pipeline(lines)


def _read_pipeline(lines: list[str]) -> tuple[list[str], list[str]] | None:
    """Read the lines of several common commands."""
    if lines.pop() or not lines or lines[0] != USUAL_COUNT:
        return None
    commands, rest = divmod(len(lines), USUAL_LINES)
    counts, sizes, names = lines[::USUAL_LINES], lines[1::USUAL_LINES], lines[2::USUAL_LINES]
    if rest or not names.count(USUAL_NAME) == counts.count(USUAL_COUNT) == sizes.count(USUAL_SIZE) == commands:
        return None
    policies, keys = lines[4::USUAL_LINES], lines[6::USUAL_LINES]
    try:
        if [SIZES[len(word)] for word in policies] != lines[3::USUAL_LINES]:
            return None
        if [SIZES[len(word)] for word in keys] != lines[5::USUAL_LINES]:
            return None
    except IndexError:  # a long word
        return None
    return policies, keys


def parse(data: bytes, max_commands: int) -> Parsed:
    """Parse the complete commands at the start of `data`, at most `max_commands`; raise if it is an HTTP request."""
    found = split_commands(data, max_commands) if len(data) <= MAX_USUAL else None
    if found is not None:
        return Parsed(found, len(data), None)
    commands: list[Command] = []
    position = 0
    try:
        while position < len(data) and len(commands) < max_commands:
            command, position = _parse_command(data, position)
            if command:  # an empty array is ignored, as Redis does
                commands.append(command)
    except _Incomplete:
        if len(data) - position > MAX_COMMAND:
            return Parsed(commands, position, f"a command must not exceed {MAX_COMMAND} bytes")
    except _InvalidInputError as error:
        return Parsed(commands, position, str(error))
    return Parsed(commands, position, None)


def split_commands(data: bytes, max_commands: int) -> list[Command] | None:
    """Split input that consists of complete commands of short words; None if it is anything else.

    As in `read_usual`, every line has the length that the line before it says. This takes a quarter of the time of the
    loop in `parse`.
    """
    lines = data.split(b"\r\n")
    if lines.pop():
        return None
    commands = []
    position, end = 0, len(lines)
    try:
        while position < end:
            start, position = position + 1, position + 1 + 2 * COUNTS[lines[position]]
            words = lines[start + 1 : position : 2]
            if position > end or lines[start:position:2] != [SIZE_LINES[len(word)] for word in words]:
                return None
            commands.append(words)
    except (KeyError, IndexError):  # another header, or a long word
        return None
    return commands if len(commands) <= max_commands else None


def _parse_command(data: bytes, position: int) -> tuple[Command, int]:
    if not data.startswith(b"*", position):
        _refuse_inline(data, position)
    start = position
    count, position = _parse_length(data, position, "*", MAX_ARGUMENTS)
    command = []
    for _ in range(count):
        length, position = _parse_length(data, position, "$", MAX_COMMAND)
        end = position + length
        if end - start > MAX_COMMAND:
            raise _InvalidInputError(f"a command must not exceed {MAX_COMMAND} bytes")
        if len(data) < end + 2:
            if not b"\r\n".startswith(data[end : end + 2]):
                raise _InvalidInputError("expected the end of a line after an argument")
            raise _Incomplete
        if data[end : end + 2] != b"\r\n":
            raise _InvalidInputError("expected the end of a line after an argument")
        command.append(data[position:end])
        position = end + 2
    return command, position


def _parse_length(data: bytes, position: int, kind: str, maximum: int) -> tuple[int, int]:
    """Parse a line such as `$5`; return the number and where the next line begins."""
    end = data.find(b"\r\n", position, position + MAX_HEADER)
    line = data[position : position + MAX_HEADER if end < 0 else end]
    if line and line[:1] != kind.encode():
        raise _InvalidInputError(f"expected {kind!r}, got {chr(line[0])!r}")
    digits = line[1:]
    if end < 0:
        digits = digits.removesuffix(b"\r")
        if len(line) == MAX_HEADER or (digits and not digits.isdigit()):
            raise _InvalidInputError("invalid length")
        raise _Incomplete
    if not digits.isdigit() or (number := int(digits)) > maximum:
        shown = "bulk length" if kind == "$" else "multibulk length"
        raise _InvalidInputError(f"invalid {shown}: at most {maximum}")
    return number, end + 2


def _refuse_inline(data: bytes, position: int) -> None:
    """Refuse input that is not an array; raise HttpInputError for the first line of an HTTP request."""
    word = data[position : position + HTTP_WORD_LENGTH]
    if any(word.startswith(each) for each in HTTP_WORDS):
        raise HttpInputError
    raise _InvalidInputError(f"expected '*', got {chr(data[position])!r}: inline commands are not supported")
