"""Reads the blocks of log files: plain, compressed with gzip, or standard input."""

from __future__ import annotations

import gzip
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STANDARD_INPUT: Final = "-"
GZIP_START: Final = b"\x1f\x8b"
BLOCK_BYTES: Final = 4 * 2**20
MAX_LINE_BYTES: Final = 2**20  # the rest of a longer line counts as malformed
SAMPLE_BYTES: Final = 2**16


class LogFile:
    """A log file, read in blocks of whole lines."""

    def __init__(self, path: str | Path, read: Callable[[int], None] = lambda _: None) -> None:
        """Read this file, or standard input; `read` is called with the number of bytes that were read."""
        self.path: str = str(path)
        self.name: str = "standard input" if self.path == STANDARD_INPUT else self.path
        self._count = read
        self._first = b""
        self._blocks = self._read_blocks()
        self.size: int = 0 if self.path == STANDARD_INPUT else size_of(self.path)

    def sample(self) -> bytes:
        """Return the first lines; empty if there are none. `blocks` yields them again."""
        self._first = next(self._blocks, b"")
        return self._first[:SAMPLE_BYTES].rpartition(b"\n")[0] or self._first[:SAMPLE_BYTES]

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, once; the last line may lack its end."""
        if self._first:
            yield self._first
        yield from self._blocks

    def _read_blocks(self) -> Iterator[bytes]:
        rest = b""
        try:
            with self._open() as (stream, raw):
                at = 0
                while block := stream.read(BLOCK_BYTES):
                    at = self._note(raw, at, len(block))
                    whole, end, after = block.rpartition(b"\n")
                    if not end and len(rest) + len(after) <= MAX_LINE_BYTES:
                        rest += after
                        continue
                    yield rest + whole + end if end else rest + after + b"\n"
                    rest = after if end else b""
        except (OSError, EOFError) as error:
            raise ConfigError(f"cannot be read: {error}", file=self.name) from None
        if rest:
            yield rest

    def _note(self, raw: IO[bytes] | None, before: int, length: int) -> int:
        """Report how much was read, of a compressed file in compressed bytes; return the position in the file."""
        at = before + length if raw is None else raw.tell()
        self._count(at - before)
        return at

    @contextmanager
    def _open(self) -> Iterator[tuple[IO[bytes], IO[bytes] | None]]:
        """Open the file; the second stream has the position in the file."""
        if self.path == STANDARD_INPUT:
            stream = sys.stdin.buffer
            start = stream.peek(2)[:2] if hasattr(stream, "peek") else b""
            yield (gzip.GzipFile(fileobj=stream) if start == GZIP_START else stream), None  # type: ignore[misc]  # both read bytes
            return
        with Path(self.path).open("rb") as raw:
            compressed = raw.read(2) == GZIP_START
            raw.seek(0)
            yield (gzip.GzipFile(fileobj=raw) if compressed else raw), raw  # type: ignore[misc]  # both read bytes


def size_of(path: str) -> int:
    """Return the size of a file; raises ConfigError if there is none."""
    try:
        if Path(path).is_dir():
            raise ConfigError("is a folder: name the log files in it", file=path)
        return Path(path).stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", file=path) from None
