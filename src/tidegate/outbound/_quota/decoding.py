"""Decode the Content-Encoding of a body in chunks: a few kilobytes can decode to gigabytes, so never all at once."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

DECODE_BYTES: Final = 65_536  # decoded at a time
GZIP_MAGIC: Final = b"\x1f\x8b"
SUPPORTED_CODINGS: Final = ("gzip", "x-gzip", "deflate")
IDENTITY_CODINGS: Final = ("", "identity")
ACCEPT_ENCODING: Final = "gzip, deflate"  # for Accept-Encoding
DEFLATE_METHOD: Final = 8
MAGIC_BYTES: Final = 2  # enough to distinguish the codings
MAX_DECODED_BODY: Final = 8 * 2**20  # bytes of a whole body


class DecodingError(Exception):
    """A body that is not encoded as its response declares, or in an unsupported way."""


class BodyDecoder:
    """Decodes one body. `feed` yields decoded parts of at most `DECODE_BYTES` bytes; call `finish` at the end."""

    def __init__(self, coding: str = "") -> None:
        """Decode gzip or deflate; raises DecodingError for any other coding except identity."""
        self._coding = coding.strip().lower()
        if self._coding not in (*SUPPORTED_CODINGS, *IDENTITY_CODINGS):
            raise DecodingError(f"the content-encoding {self._coding[:20]!r} is not supported")
        self._engine: Any = None  # a zlib decompressor, once its kind is known
        self._waiting = b""  # first bytes, too few to choose an engine
        self._started = False
        self._over = False  # further bytes are not part of the body

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Decode the next chunk of the body."""
        if self._coding in IDENTITY_CODINGS:
            yield piece
            return
        try:
            yield from self._decode(piece)
        except zlib.error:
            raise DecodingError(f"the body is not valid {self._coding} data") from None

    def finish(self) -> None:
        """Raise DecodingError if the body is incomplete."""
        if self._engine is not None or (self._waiting and not self._started):
            raise DecodingError(f"the body is incomplete {self._coding} data")

    def _decode(self, piece: bytes) -> Iterator[bytes]:
        piece, self._waiting = self._waiting + piece, b""
        pending = False  # whether the engine has more output
        while (piece or pending) and not self._over:
            if self._engine is None and not self._begin(piece):
                return
            part = self._engine.decompress(piece, DECODE_BYTES)
            if part:
                yield part
            piece, pending = self._engine.unconsumed_tail, len(part) == DECODE_BYTES
            if self._engine.eof:  # another member may follow
                piece, pending, self._engine = self._engine.unused_data, False, None
                self._over = self._coding == "deflate"

    def _begin(self, piece: bytes) -> bool:
        """Choose an engine by the first bytes; return whether there were enough."""
        if len(piece) < MAGIC_BYTES:
            self._waiting = piece
            return False
        if self._coding == "deflate":  # with or without the zlib header
            wrapped = piece[0] & 15 == DEFLATE_METHOD and (piece[0] << 8 | piece[1]) % 31 == 0
            self._engine = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        elif self._started and not piece.startswith(GZIP_MAGIC):
            self._over = True  # padding after the last member
        else:
            self._engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._started = True
        return self._engine is not None


def decoded(body: bytes, coding: str) -> bytes:
    """Return a whole body without its Content-Encoding; unchanged if that is impossible."""
    found = bytearray()
    try:
        for part in BodyDecoder(coding).feed(body):
            found += part
            if len(found) > MAX_DECODED_BODY:
                return body
    except DecodingError:
        return body
    return bytes(found)
