"""Reads a number from a multipart form that is in memory, such as how many images a request asks for.

A form may contain anything. Every header of a part that names the field counts, wherever it is, and the largest value
applies: so no boundary, preamble or duplicate field makes the number too low. The work is bounded: the form is scanned
once, and only a limited number of parts and bytes of each part are examined.
"""

from __future__ import annotations

import re
from functools import lru_cache
from math import inf
from typing import Final

DISPOSITION: Final = b"content-disposition"  # the header that names the field of a part
BLANK_LINE = re.compile(rb"\r?\n\r?\n")  # ends the headers of a part
DELIMITER: Final = b"\n--"  # starts the line after a value
MAX_PARTS: Final = 200
MAX_HEADER_LENGTH: Final = 16_384
MAX_NUMBER_LENGTH: Final = 40  # bytes of a number, and of the delimiter after it


def is_form(body: bytes) -> bool:
    """Return whether a body has a part that could be a field of a form."""
    return DISPOSITION in body.lower()


def read_number(form: bytes, name: str) -> float:
    """Return the largest number that a field of a form contains; 0: none.

    Infinity: the form has more parts, longer headers or a longer number than any client sends.
    """
    text, pattern = form.lower(), _name_pattern(name)
    largest, at = 0.0, 0
    for _ in range(MAX_PARTS):
        at = text.find(DISPOSITION, at)
        if at < 0:
            return largest
        at += len(DISPOSITION)
        blank = BLANK_LINE.search(text, at, at + MAX_HEADER_LENGTH)
        header = text[at : at + MAX_HEADER_LENGTH if blank is None else blank.start()]
        if not pattern.search(header.replace(b"\\", b"")):  # a backslash may precede any character of a quoted name
            continue
        if blank is None:
            return inf
        largest = max(largest, _number(text[blank.end() : blank.end() + MAX_NUMBER_LENGTH]))
    return inf


def _number(start: bytes) -> float:
    """Read the number that a value starts with."""
    value, delimiter, _ = start.partition(DELIMITER)
    if not delimiter and len(start) == MAX_NUMBER_LENGTH:
        return inf
    try:
        number = float(value.decode("utf-8", "replace"))
    except ValueError:  # a provider refuses it
        return 0.0
    return number if number >= 0 else 0.0


@lru_cache(maxsize=64)
def _name_pattern(name: str) -> re.Pattern[bytes]:
    """Return a pattern for `; name="n"`, also without quotes, or as an extended parameter (`name*=utf-8''n`)."""
    quoted = re.escape(name.lower().encode())
    return re.compile(rb"""[;\s]name[*\d]*\s*=\s*"?(?:[\w-]*'[\w-]*')?""" + quoted + rb"""["']?\s*(?:[;\r\n]|$)""")
