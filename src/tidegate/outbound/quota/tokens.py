"""What a call to a language model costs: an estimate from its request, the real usage from its response.

The formats of OpenAI and Anthropic are supported, as one JSON document and as server-sent events:

    {"usage": {"prompt_tokens": 12, "completion_tokens": 30, "total_tokens": 42}}          OpenAI, chat
    {"usage": {"input_tokens": 12, "output_tokens": 30, "total_tokens": 42}}               OpenAI, responses
    {"usage": {"input_tokens": 12, "cache_creation_input_tokens": 5, "output_tokens": 30}} Anthropic
    event: message_start … {"message": {"usage": …}}, event: message_delta … {"usage": …}  Anthropic, streamed

Responses are untrusted: what is not understood counts as no usage, nothing raises, no more than `MAX_READ_BYTES` are
stored, and nothing is read beyond `MAX_DECODED`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tidegate.core.bounds import MAX_INTEGER
from tidegate.outbound.quota.decoding import BodyDecoder, DecodingError

TOKEN_UNITS: Final = ("tokens", "input-tokens", "output-tokens")
INPUT_FIELDS: Final = ("input_tokens", "prompt_tokens")
CACHE_WRITE_FIELDS: Final = ("cache_creation_input_tokens",)  # cache reads do not count towards the providers' limits
OUTPUT_FIELDS: Final = ("output_tokens", "completion_tokens")
MAX_ANSWER_FIELDS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")
DEFAULT_ANSWER_TOKENS: Final = 1000  # if the request sets no maximum
BYTES_PER_TOKEN: Final = 4  # approximate; the response corrects the estimate
MAX_READ_BYTES: Final = 8 * 2**20  # of a response, or of one event, that are read
MAX_DECODED: Final = 64 * 2**20  # bytes of an event stream that are read
MAX_USAGE_LINES: Final = 20_000  # lines of it that mention usage and are parsed


def estimate(body: bytes | None) -> dict[str, int]:
    """Estimate the cost of a request, by unit."""
    document = _json(body or b"")
    max_output = next(
        (document[name] for name in MAX_ANSWER_FIELDS if _is_count(document.get(name))), DEFAULT_ANSWER_TOKENS
    )
    input_tokens = -(-len(body or b"") // BYTES_PER_TOKEN)
    return {"tokens": input_tokens + max_output, "input-tokens": input_tokens, "output-tokens": max_output}


def usage(body: bytes | bytearray) -> dict[str, int] | None:
    """Read the usage from a whole response; None if it reports none."""
    found = _usage(_json(body))
    return _units(found) if found else None


class UsageReader:
    """Reads the usage from a response that arrives in chunks, streamed as events or not.

    `coding` is its Content-Encoding; only identity, gzip and deflate are read.
    """

    def __init__(self, coding: str = "") -> None:
        """Start without data."""
        self._decoder = _decoder(coding)
        self._line = bytearray()  # incomplete so far
        self._whole = bytearray()
        self._events = False
        self._usage_lines = 0
        self._size = 0
        self._found: dict[str, int] = {}

    def feed(self, piece: bytes) -> None:
        """Read the next chunk of the body."""
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
        if not self._events and self._size <= MAX_READ_BYTES:
            self._whole += piece
        end = piece.rfind(b"\n") + 1
        if end:
            self._search(bytes(self._line) + piece[:end])
            self._line = bytearray(piece[end:])
        elif len(self._line) <= MAX_READ_BYTES:
            self._line += piece

    def _search(self, lines: bytes) -> None:
        """Search complete lines for usage; there may be millions, so only those that mention it are parsed."""
        if not lines.startswith(b"data:") and b"\ndata:" not in lines:
            return
        self._events = True
        self._whole.clear()
        position = lines.find(b"usage")
        while position >= 0 and self._usage_lines < MAX_USAGE_LINES:
            self._usage_lines += 1
            start, end = lines.rfind(b"\n", 0, position) + 1, lines.find(b"\n", position)
            end = len(lines) if end < 0 else end
            if lines.startswith(b"data:", start):
                # Later events repeat or complete the numbers of earlier ones.
                self._found.update(_usage(_json(lines[start + 5 : end])))
            position = lines.find(b"usage", end)

    def result(self) -> dict[str, int] | None:
        """Return the usage, after the last chunk; None if the response reported none."""
        self._search(bytes(self._line))
        if not self._events:
            return usage(self._whole) if self._size <= MAX_READ_BYTES else None
        return _units(self._found) if self._found else None


def _decoder(coding: str) -> BodyDecoder | None:
    """Return the decoder of a Content-Encoding; None: it is not supported."""
    try:
        return BodyDecoder(coding)
    except DecodingError:
        return None


def _json(text: bytes | bytearray) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _usage(document: dict[str, Any]) -> dict[str, int]:
    """Find the usage: at the top level, or in `message` (Anthropic) or `response` (OpenAI)."""
    for position in (document, document.get("message"), document.get("response")):
        found = position.get("usage") if isinstance(position, Mapping) else None
        if isinstance(found, Mapping):
            return {name: amount for name, amount in found.items() if isinstance(name, str) and _is_count(amount)}
    return {}


def _units(found: Mapping[str, int]) -> dict[str, int] | None:
    input_tokens = next((found[name] for name in INPUT_FIELDS if name in found), None)
    output_tokens = next((found[name] for name in OUTPUT_FIELDS if name in found), None)
    if input_tokens is None and output_tokens is None and "total_tokens" not in found:
        return None
    input_tokens = (input_tokens or 0) + sum(found.get(name, 0) for name in CACHE_WRITE_FIELDS)
    total = found.get("total_tokens", input_tokens + (output_tokens or 0))
    return {
        "tokens": min(MAX_INTEGER, total),
        "input-tokens": min(MAX_INTEGER, input_tokens),
        "output-tokens": min(MAX_INTEGER, output_tokens or 0),
    }


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER
