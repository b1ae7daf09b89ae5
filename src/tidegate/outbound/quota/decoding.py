"""Undo the Content-Encoding of a body piece by piece: a few kilobytes can decode to gigabytes, so never all at once."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

DECODE_BYTES: Final = 65_536  # bytes that are decoded at once
GZIP: Final = b"\x1f\x8b"
SUPPORTED_CODINGS: Final = ("gzip", "x-gzip", "deflate")
IDENTITY_CODINGS: Final = ("", "identity")
ACCEPTED: Final = "gzip, deflate"  # for Accept-Encoding
DEFLATE: Final = 8
MAGIC_BYTES: Final = 2  # bytes by which the codings are told apart


class DecodingError(Exception):
    """A body that is not encoded as its answer says, or in a way that is not supported."""


class BodyDecoder:
    """Decodes one body. `feed` gives what a piece stands for in parts of at most `PART` bytes; then call `finish`."""

    def __init__(self, coding: str = "") -> None:
        """Decode gzip or deflate; anything else but a plain body is a DecodingError."""
        self._coding = coding.strip().lower()
        if self._coding not in (*SUPPORTED_CODINGS, *IDENTITY_CODINGS):
            raise DecodingError(f"the content-encoding {self._coding[:20]!r} is not supported")
        self._engine: Any = None  # an object of zlib, once it is known which kind
        self._waiting = b""  # the beginning of what the next engine is to decode
        self._started = False
        self._over = False  # what comes is no longer part of the body

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Decode the next piece of the body."""
        if self._coding in IDENTITY_CODINGS:
            yield piece
            return
        try:
            yield from self._decode(piece)
        except zlib.error:
            raise DecodingError(f"the body is not {self._coding}") from None

    def finish(self) -> None:
        """Refuse a body that ends in the middle."""
        if self._engine is not None or (self._waiting and not self._started):
            raise DecodingError(f"the body ends in the middle of its {self._coding}")

    def _decode(self, piece: bytes) -> Iterator[bytes]:
        piece, self._waiting = self._waiting + piece, b""
        pending = False  # whether the engine holds more than it gave
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
        """Choose an engine by the first bytes; tell whether they are there."""
        if len(piece) < MAGIC_BYTES:
            self._waiting = piece
            return False
        if self._coding == "deflate":  # with the wrapping of zlib, or without
            wrapped = piece[0] & 15 == DEFLATE and (piece[0] << 8 | piece[1]) % 31 == 0
            self._engine = zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
        elif self._started and not piece.startswith(GZIP):
            self._over = True  # padding behind the last member
        else:
            self._engine = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._started = True
        return self._engine is not None
