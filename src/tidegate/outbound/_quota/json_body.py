"""Parses JSON bodies: with msgspec if it is installed, in a quarter of the time, else with the standard library.

Both return the same values: a body that msgspec refuses (NaN, lone surrogates, UTF-16) is parsed again by the latter.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

try:
    import msgspec
except ImportError:  # pragma: no cover - part of every test environment
    FAST_DECODE: Callable[[bytes | bytearray], Any] | None = None
else:
    FAST_DECODE = msgspec.json.Decoder().decode

if TYPE_CHECKING:
    from collections.abc import Callable

MALFORMED: Final = (ValueError, RecursionError)  # what `parse_json` raises


def complexity(body: bytes, most: int) -> int:
    """Return how much work it is to parse a body, in units of about 2 µs, without parsing it.

    Above `most`, the result may be too high. Punctuation inside strings is not counted: a prompt may contain code.
    """
    text = len(body) // 500 + body.count(b"\\") // 40
    found = _repeated(body) * (text + _structure(body))
    if found <= most or b"\0" in body:  # UTF-16 has NUL bytes; its escaped quotes would be misread
        return found
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = unescaped.count(b'"')
    if quotes > 20 * most:  # the strings alone take too long
        return found
    outside = b"".join(unescaped.split(b'"')[::2])
    return _repeated(outside) * (text + quotes // 20 + _structure(outside))


def _repeated(body: bytes) -> int:
    """Return 3 if a body has what only the slower parser accepts: then both parse it."""
    return 3 if any(map(body.__contains__, (b"\0", b"NaN", b"Infinity"))) else 1


def _structure(body: bytes) -> int:
    """Weigh what is outside of strings: a container or key is 1, a number with an exponent 4, other values less."""
    exponents = body.count(b"e") + body.count(b"E") - body.count(b"true") - body.count(b"false")
    return sum(map(body.count, (b"[", b"{", b":"))) + 4 * exponents + body.count(b",") // 40 + len(body) // 100


def parse_json(body: bytes | bytearray) -> Any:  # noqa: ANN401 - any JSON value
    """Parse a body; raises what `json.loads` raises."""
    if FAST_DECODE is not None:
        try:
            return FAST_DECODE(body)
        except Exception:  # noqa: BLE001, S110 - json.loads reports what is wrong, if it is
            pass
    return json.loads(body)


def read_json(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object; anything else is an empty one."""
    try:
        document = parse_json(body)
    except MALFORMED:
        return {}
    return document if isinstance(document, dict) else {}


def repeats_keys(body: bytes, document: dict[str, Any]) -> bool:
    """Return whether an object in a body has a key twice, so that its reader decides which value counts.

    `document` is what was parsed: it has fewer keys than the body has colons outside of strings.
    """
    if b"\0" in body:  # UTF-16 or UTF-32
        body = body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    colons = sum(part.count(b":") for part in unescaped.split(b'"')[::2])
    keys = 0
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        if value.__class__ is dict:
            keys += len(value)
            value = value.values()
        waiting += [each for each in value if each.__class__ in (dict, list)]
    return keys != colons
