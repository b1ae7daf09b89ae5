"""What a call to a language model has used, read from its response as the provider's profile describes it.

Usage is found in one JSON document, in a JSON list, in server-sent events and in the binary events of AWS:

    {"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}}          OpenAI, chat
    {"usage": {"input_tokens": 12, "cache_creation_input_tokens": 5, "output_tokens": 30}} Anthropic
    event: message_start … {"message": {"usage": …}}, event: message_delta … {"usage": …}  Anthropic, streamed
    {"usageMetadata": {"promptTokenCount": 12, "candidatesTokenCount": 30}}                Gemini

Responses are untrusted: what is not understood counts as no usage, nothing raises, no more than `MAX_READ_BYTES` are
stored, and nothing is read beyond `MAX_DECODED`.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from typing import TYPE_CHECKING, Any, Final

from tidegate.core._bounds import MAX_INTEGER
from tidegate.outbound._providers.profile import UsagePart, values_at
from tidegate.outbound._providers.profile_file import shipped_profile
from tidegate.outbound._quota.decoding import BodyDecoder, DecodingError
from tidegate.outbound._quota.json_body import MALFORMED, parse_json, read_json
from tidegate.outbound._quota.request_tokens import is_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tidegate.outbound._providers.profile import Profile

MAX_READ_BYTES: Final = 8 * 2**20  # of a response, or of one event, that are read
MAX_DECODED: Final = 64 * 2**20  # bytes of an event stream that are read
MAX_USAGE_LINES: Final = 20_000  # lines of it that mention usage and are parsed
MAX_DOCUMENTS: Final = 20_000  # entries of a JSON list that are searched
MAX_LAST_LINES: Final = 4  # lines of each chunk that are still parsed after MAX_USAGE_LINES
FRAME_HEAD: Final = struct.Struct(">IIxxxx")  # of an event of AWS: its length, the length of its headers
FRAME_OVERHEAD: Final = FRAME_HEAD.size + 4  # with the checksum at the end
STREAM_BYTES_PER_TOKEN: Final = 3  # of streamed text: fewer than usual, so that the count is not too low

Parts = dict[UsagePart, int]


def usage(body: bytes | bytearray, profile: Profile | None = None, model: str | None = None) -> dict[str, int] | None:
    """Read the usage from a whole response; None if it reports none."""
    profile = profile or shipped_profile()
    return counted_units(profile, usage_parts(profile, _found_in(profile, body)), model)


def counted_units(profile: Profile, parts: Parts, model: str | None = None) -> dict[str, int] | None:
    """Return what counts towards each unit; None if no usage was reported."""
    if not parts:
        return None
    if profile.output_rates and "output" in parts:
        parts = {**parts, "output": parts["output"] * profile.output_rate(model)}
    if "input" not in parts and "output" not in parts:  # of the other units, what is reserved stays charged
        return {"tokens": min(MAX_INTEGER, parts["total"])} if "total" in parts else None
    found = {}
    for unit, names in profile.signed_counts:
        amount = 0
        for name, sign in names:
            if name in parts:
                amount += parts[name] * sign
        found[unit] = max(0, min(MAX_INTEGER, amount))
    return found


def usage_parts(profile: Profile, found: Mapping[str, int]) -> Parts:
    """Return the parts of a reported usage, whatever the provider calls them."""
    parts: Parts = {}
    for part, names in profile.usage.items():
        for name in names:
            if name in found:
                parts[part] = found[name]
                break
    if not profile.cache_apart and parts.get("cache_read", 0) > parts.get("input", 0):
        del parts["cache_read"]  # more than the whole input: not to be believed
    if "total" in parts and "input" in parts:
        _add_unlisted(profile, parts)
    return parts


def with_input(profile: Profile, parts: Parts, estimate: int | None) -> Parts:
    """Return the parts with an input, if only an output is reported: the rest of the total, or else the estimate."""
    if "input" in parts or "output" not in parts:
        return parts
    rest = parts.get("total", 0) - parts["output"]
    if profile.reasoning_apart:
        rest -= parts.get("reasoning", 0)
    if profile.cache_apart:
        rest -= parts.get("cache_read", 0) + parts.get("cache_write", 0)
    found = rest if rest > 0 else estimate
    return parts if found is None else {**parts, "input": found}


def _add_unlisted(profile: Profile, parts: Parts) -> None:
    """Count what only the total includes as output: some models report no output, or leave out their reasoning."""
    listed = parts["input"] + parts.get("output", 0)
    if profile.reasoning_apart:
        listed += parts.get("reasoning", 0)
    if profile.cache_apart:
        listed += parts.get("cache_read", 0) + parts.get("cache_write", 0)
    if parts["total"] > listed:
        parts["output"] = parts.get("output", 0) + parts["total"] - listed


class UsageReader:
    """Reads the usage from a response that arrives in chunks, streamed as events or not.

    `coding` is its Content-Encoding; only identity, gzip and deflate are read. With `watch`, `produced` counts the
    output while it arrives.
    """

    __slots__ = (
        "_complete",
        "_decoder",
        "_events",
        "_found",
        "_input_estimate",
        "_line",
        "_model",
        "_parts",
        "_plain",
        "_profile",
        "_size",
        "_text_bytes",
        "_texts",
        "_usage_lines",
        "_watch",
        "_whole",
        "expects_output",
        "reports_input",
    )

    def __init__(
        self,
        coding: str = "",
        profile: Profile | None = None,
        model: str | None = None,
        *,
        watch: bool = False,
        input_estimate: int | None = None,
    ) -> None:
        """Start without data; the estimate of the input counts if the response reports only an output."""
        self._input_estimate = input_estimate
        self.expects_output: bool = False  # whether the call has an output, so that its usage should have one
        self.reports_input: bool = True  # whether the input of the result is the one that was reported
        self._profile = profile or shipped_profile()
        self._model = model
        self._plain = not coding
        self._decoder = None if self._plain else _decoder(coding)
        self._line: bytes | bytearray = b""  # incomplete so far
        self._whole = bytearray()  # complete lines, unless they are events
        self._events = False
        self._usage_lines = 0
        self._size = 0
        self._found: dict[str, int] = {}
        self._parts: Parts | None = None  # once all is read
        self._complete = False
        self._watch = watch
        self._texts = 0  # events with a part of the output
        self._text_bytes = 0

    def feed(self, piece: bytes) -> None:
        """Read the next chunk of the body."""
        if self._plain:
            if not self._size and b"\n" not in piece:  # usually all of it: what `_append` does
                self._size, self._line = len(piece), piece
            elif self._size <= MAX_DECODED:
                self._append(piece)
            return
        try:
            for part in () if self._decoder is None else self._decoder.feed(piece):
                self._append(part)
                if self._size > MAX_DECODED:
                    self._decoder = None
                    return
        except DecodingError:  # the client reports it
            self._decoder = None

    def _append(self, piece: bytes) -> None:
        """Read a part of the decoded body."""
        self._size += len(piece)
        end = piece.rfind(b"\n") + 1
        if end:
            lines = bytes(self._line) + piece[:end]
            self._search(lines)
            if not self._events and self._size <= MAX_READ_BYTES:
                self._whole += lines
            self._line = piece[end:]
        elif not self._line:
            self._line = piece
        elif len(self._line) <= MAX_READ_BYTES:
            if isinstance(self._line, bytes):
                self._line = bytearray(self._line)
            self._line += piece

    def _search(self, lines: bytes) -> None:
        """Search complete lines for usage; there may be millions, so only those that mention it are parsed."""
        if not lines.startswith(b"data:") and b"\ndata:" not in lines:
            return
        self._events = True
        self._whole.clear()
        for last_line in self._profile.stream_ends:
            if lines.startswith(last_line) or b"\n" + last_line in lines:
                self._complete = True
        if self._watch:
            self._count_text(lines)
            return
        for marker in self._profile.usage_markers:
            position = 0
            while (position := lines.find(marker, position)) >= 0:
                if self._usage_lines >= MAX_USAGE_LINES:
                    self._read_last(lines, marker, position)
                    break
                self._usage_lines += 1
                position = self._read_line(lines, position)[1]

    def _read_line(self, lines: bytes, position: int) -> tuple[int, int]:
        """Read the usage of the line at a position; returns where it starts and ends."""
        start, end = lines.rfind(b"\n", 0, position) + 1, lines.find(b"\n", position)
        end = len(lines) if end < 0 else end
        if lines.startswith(b"data:", start):
            # Later events repeat or complete the numbers of earlier ones.
            self._found.update(_reported(self._profile, read_json(lines[start + 5 : end])))
        return start, end

    def _read_last(self, lines: bytes, marker: bytes, start: int) -> None:
        """Read the last lines that mention usage, from `start` on: the final usage is among those of the last chunk."""
        found: list[int] = []
        end = len(lines)
        while len(found) < MAX_LAST_LINES and (position := lines.rfind(marker, start, end)) >= 0:
            found.append(position)
            end = max(start, lines.rfind(b"\n", start, position))
        for position in reversed(found):
            self._read_line(lines, position)

    def _count_text(self, lines: bytes) -> None:
        """Count the parts of the output in complete lines, and read their usage."""
        for line in lines.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            document = read_json(line[5:])
            length = 0 if self._repeats(document) else _text_length(document, self._profile.stream_fields)
            if length:
                self._texts += 1
                self._text_bytes += length
            self._found.update(_reported(self._profile, document))

    def _repeats(self, document: dict[str, Any]) -> bool:
        """Return whether the text of an event has arrived before, in parts."""
        pattern, kind = self._profile.stream_repeats, document.get("type")
        return pattern is not None and isinstance(kind, str) and pattern.fullmatch(kind) is not None

    def end(self) -> None:
        """Record that the whole body has arrived."""
        self._complete = True

    @property
    def readable(self) -> bool:
        """Whether the body can be read: its coding is supported, it is valid so far, and not too large."""
        return (self._plain or self._decoder is not None) and self._size <= MAX_DECODED

    @property
    def complete(self) -> bool:
        """Whether the usage is that of the whole output; events that an abandoned stream began with are not."""
        return self._complete or not self._events

    @property
    def produced(self) -> int:
        """The tokens of the output that have arrived, estimated: each event has at least one."""
        counted = max(self._texts, -(-self._text_bytes // STREAM_BYTES_PER_TOKEN))
        return max(counted, self.parts.get("output", 0) + self.parts.get("reasoning", 0) * self.reasoning_apart)

    @property
    def reasoning_apart(self) -> int:
        """1 if the provider reports reasoning separately from other output, else 0."""
        return int(self._profile.reasoning_apart)

    @property
    def parts(self) -> Parts:
        """The usage that was reported so far."""
        return usage_parts(self._profile, self._found) if self._parts is None else self._parts

    def finish(self) -> Parts:
        """Return the reported parts, after the last chunk."""
        if self._parts is not None:
            return self._parts
        line, self._line = self._line, b""
        if b"data:" in line:
            self._search(bytes(line))
        if not self._events and self._size <= MAX_READ_BYTES:
            whole = self._whole + line if self._whole else line
            self._events = is_frame(whole)
            self._found.update(_found_in(self._profile, whole))
            self._whole.clear()
        reported = usage_parts(self._profile, self._found)
        self.reports_input = "input" in reported or "output" not in reported
        self._parts = parts = with_input(self._profile, reported, self._input_estimate)
        return parts

    @property
    def lacks_input(self) -> bool:
        """Whether an output is reported without an input, and nothing is known about the input."""
        return not self.reports_input and "input" not in self.parts

    @property
    def lacks_output(self) -> bool:
        """Whether an input is reported without an output, and nothing is known about the output."""
        parts = self.parts
        if not self.expects_output or "output" not in self._profile.usage:
            return False
        return "input" in parts and "output" not in parts and "total" not in parts

    def parts_with_output(self, reserved: int) -> Parts:
        """Return the reported parts, with an output if none is reported: what is reserved, or has arrived if more."""
        return {**self.parts, "output": max(reserved, self.produced)} if self.lacks_output else self.parts

    def result_with_output(self, reserved: int) -> dict[str, int] | None:
        """Return what counts towards each unit, as `result`, of the `parts_with_output`."""
        return counted_units(self._profile, self.parts_with_output(reserved), self._model)

    def result(self) -> dict[str, int] | None:
        """Return what counts towards each unit, after the last chunk; None if the response reported no usage."""
        return counted_units(self._profile, self.finish(), self._model)


def _decoder(coding: str) -> BodyDecoder | None:
    """Return the decoder of a Content-Encoding; None: it is not supported."""
    try:
        return BodyDecoder(coding)
    except DecodingError:
        return None


def _found_in(profile: Profile, body: bytes | bytearray) -> dict[str, int]:
    """Find the usage in a whole body."""
    try:
        document = parse_json(body)
    except MALFORMED:
        document = list(_frames(body))
    found: dict[str, int] = {}
    for each in document[-MAX_DOCUMENTS:] if isinstance(document, list) else [document]:
        found.update(_reported(profile, each))
    return found


def is_frame(body: bytes | bytearray) -> bool:
    """Return whether a body starts with a binary event of AWS, which begins with its own length."""
    return len(body) > FRAME_OVERHEAD and not body[0] and FRAME_HEAD.unpack_from(body)[0] >= FRAME_OVERHEAD


def _frames(body: bytes | bytearray) -> Iterator[dict[str, Any]]:
    """Yield the documents in the binary events of AWS, as Bedrock streams them; some contain another one in `bytes`."""
    start = 0
    while start + FRAME_OVERHEAD <= len(body):
        length, headers = FRAME_HEAD.unpack_from(body, start)
        if length < FRAME_OVERHEAD + headers or start + length > len(body):  # not an event, or incomplete
            return
        document = read_json(bytes(body[start + FRAME_HEAD.size + headers : start + length - 4]))
        inner = document.get("bytes")
        try:
            yield read_json(b64decode(inner)) if isinstance(inner, str) else document
        except ValueError:  # not base64
            yield document
        start += length


def _reported(profile: Profile, document: Any) -> dict[str, int]:  # noqa: ANN401 - any JSON value
    """Return the numbers of the usage in a document, by their paths."""
    for path in profile.usage_at:
        for found in values_at(document, path):
            if isinstance(found, dict):
                return _flat(found)
    return {}


def _flat(usage: dict[str, Any]) -> dict[str, int]:
    found = {}
    nested = []
    for name, amount in usage.items():
        if amount.__class__ is int:
            if 0 <= amount <= MAX_INTEGER:
                found[name] = amount
        elif isinstance(amount, dict):
            nested.append((name, amount))
    for outer, details in nested:
        found |= {f"{outer}.{name}": amount for name, amount in details.items() if is_count(amount)}
    return found


def _text_length(document: dict[str, Any], fields: frozenset[str]) -> int:
    """Return the bytes of an output that an event carries: the strings of these fields, at any depth."""
    length, waiting = 0, [document]
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, dict):
            for name, each in value.items():
                if isinstance(each, str):
                    length += len(each.encode("utf-8", "surrogatepass")) if name in fields else 0
                else:
                    waiting.append(each)
        elif isinstance(value, list):
            waiting += value
    return length
