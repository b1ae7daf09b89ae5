"""Where bodies are stored: files in a folder, rows of an SQLite database, or a POST to a webhook.

A body is downloaded into a file first. Bodies delivered before stay unchanged until the new one is complete.
Files and folders created here are accessible to their owner only.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from contextlib import closing, contextmanager
from mimetypes import MimeTypes
from typing import IO, TYPE_CHECKING, Final, NamedTuple

from tidegate._runtime.files import make_private_file, make_private_folder, open_private
from tidegate.outbound._quota.exchange import request_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tidegate.outbound.sources._source import Source

# Before the table of the standard library, which lacks some and is ambiguous about others.
SUFFIXES: Final = {"application/json": ".json", "text/csv": ".csv", "text/html": ".html", "text/plain": ".txt",
                   "application/xml": ".xml", "text/xml": ".xml", "application/x-ndjson": ".ndjson",
                   "application/yaml": ".yaml", "application/gzip": ".gz", "image/jpeg": ".jpg",
                   "application/vnd.apache.parquet": ".parquet"}  # fmt: skip
STRUCTURED_SUFFIXES: Final = {"json": ".json", "xml": ".xml", "yaml": ".yaml", "zip": ".zip"}  # as in "ld+json"
OTHER_SUFFIX: Final = ".bin"
PART_SUFFIX: Final = ".part"
COPY_BYTES: Final = 2**20  # copied at a time
WEBHOOK_TIMEOUT: Final = 60.0  # seconds to wait for a permit, if the webhook has a provider
FIRST_REDIRECT: Final = 300  # the first status that is not a success
CREATE_BODIES: Final = """
CREATE TABLE IF NOT EXISTS bodies (
    source TEXT NOT NULL, fetched_at INTEGER NOT NULL, status INTEGER NOT NULL, content_type TEXT, body BLOB NOT NULL
)
"""


class FetchedBody(NamedTuple):
    """A body that was downloaded into a file, with the status and type of its response."""

    file: IO[bytes]
    size: int
    status: int
    content_type: str

    @property
    def kind(self) -> str:
        """The media type without its parameters."""
        return self.content_type.partition(";")[0].strip().lower()


@contextmanager
def download_file(source: Source, folder: Path, now: int) -> Iterator[IO[bytes]]:
    """Open a file to download into; it is deleted at the end, unless `deliver` has renamed it."""
    if source.destination.kind != "files":
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            yield file
        return
    place = folder / source.destination.place / source.name
    make_private_folder(place)
    for left in place.glob(f"*{PART_SUFFIX}"):  # left by a killed process
        left.unlink(missing_ok=True)
    part = place / f"{now}{PART_SUFFIX}"
    try:
        with os.fdopen(open_private(part, os.O_RDWR | os.O_EXCL), "w+b") as file:
            yield file
    finally:
        part.unlink(missing_ok=True)


async def deliver(client: httpx.AsyncClient, source: Source, folder: Path, now: int, body: FetchedBody) -> None:
    """Deliver a body to its destination; relative paths start in the data folder. Raises on failure."""
    destination = source.destination
    if destination.kind == "files":
        await asyncio.to_thread(_name_file, folder / destination.place / source.name, now, body)
    elif destination.kind == "sqlite":
        await asyncio.to_thread(_write_row, folder / destination.place, source.name, now, body)
    else:
        await _post(client, source, body)


def _name_file(place: Path, now: int, body: FetchedBody) -> None:
    """Rename a complete file: readers see the whole file or none."""
    body.file.flush()
    part = place / f"{now}{PART_SUFFIX}"
    part.replace(part.with_suffix(suffix_of(body.kind)))


def suffix_of(kind: str) -> str:
    """Return the suffix of files with this media type."""
    structured = STRUCTURED_SUFFIXES.get(kind.rpartition("+")[2]) if "+" in kind else None
    # Only the table in Python's standard library: the files of the system differ between machines.
    known = structured or SUFFIXES.get(kind) or MimeTypes(filenames=()).guess_extension(kind)
    return known or OTHER_SUFFIX


def _write_row(path: Path, name: str, now: int, body: FetchedBody) -> None:
    """Append a row to the table `bodies`, copying the body in chunks."""
    make_private_folder(path.parent)
    make_private_file(path)
    body.file.seek(0)
    with closing(sqlite3.connect(path, timeout=10)) as db, db:
        db.execute(CREATE_BODIES)
        row = name, now, body.status, body.kind, body.size
        number = db.execute("INSERT INTO bodies VALUES (?, ?, ?, ?, zeroblob(?))", row).lastrowid
        with db.blobopen("bodies", "body", number or 0) as blob:
            while piece := body.file.read(COPY_BYTES):
                blob.write(piece)


async def _post(client: httpx.AsyncClient, source: Source, body: FetchedBody) -> None:
    """Post the body without following redirects or reading the response, within the quota of its provider, if any."""
    body.file.seek(0)
    content = await asyncio.to_thread(body.file.read)
    headers = {"content-type": body.content_type or "application/octet-stream", "x-tidegate-source": source.name}
    request = client.build_request("POST", source.destination.place, content=content, headers=headers, timeout=None)
    async with asyncio.timeout(WEBHOOK_TIMEOUT + source.timeout):
        with request_options(timeout=WEBHOOK_TIMEOUT):
            response = await client.send(request, stream=True, follow_redirects=False)
    await response.aclose()
    if response.status_code >= FIRST_REDIRECT:
        raise OSError(f"the webhook responded with status {response.status_code}")
