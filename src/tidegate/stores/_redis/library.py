"""core.lua as the server runs it: a library of functions, or a script where functions are forbidden.

A library is loaded once and keeps what it has learned (the policies of earlier calls). Its name is a digest of its
source, so that different versions of tidegate can share a server. A script is compiled once, too, but creates all its
functions for each call.
"""

from __future__ import annotations

import re
from enum import Enum
from hashlib import sha1
from pathlib import Path
from typing import Final

from tidegate.stores._redis import driver

SOURCE: Final = Path(__file__).with_name("core.lua").read_bytes()
# While a library is loaded, the server has no `redis.call`, `string` or `table`: the core is built by the first call.
LIBRARY: Final = b"""#!lua name=%b
local one, batch
local function build()
%b
return one, batch
end
redis.register_function('%b', function(keys, args)
  if not one then one, batch = build() end
  return one(keys, args)
end)
redis.register_function('%b', function(keys, args)
  if not batch then one, batch = build() end
  return batch(keys, args)
end)
"""
MAX_LOADS: Final = 3
FUNCTION_MISSING: Final = re.compile(r"(ERR )?Function not found", re.ASCII)
FUNCTIONS_FORBIDDEN: Final = re.compile(r"run the 'fcall' command|unknown command ['`]fcall", re.IGNORECASE)


class Form(Enum):
    """How calls are sent."""

    FUNCTION = "FCALL"
    LOAD = "FUNCTION LOAD, then FCALL"
    DIGEST = "EVALSHA"
    SCRIPT = "EVAL"

    def following(self, reply: Exception, loads: int = 0) -> Form | None:
        """Return the form in which to send calls again that were not run; None if they were, or no form is left.

        `loads` is how often they were sent with FUNCTION LOAD. If they still miss it, the user may not load it, or
        others delete it.
        """
        if self in (Form.FUNCTION, Form.LOAD):
            text = str(reply)
            if FUNCTIONS_FORBIDDEN.search(text):
                return Form.DIGEST
            if FUNCTION_MISSING.fullmatch(text):
                return Form.LOAD if loads < MAX_LOADS else Form.DIGEST
        elif self is Form.DIGEST and isinstance(reply, driver.NoScriptError):
            return Form.SCRIPT
        return None

    @property
    def next_calls(self) -> Form:
        """The form for the next calls, after this one has succeeded."""
        return {Form.LOAD: Form.FUNCTION, Form.SCRIPT: Form.DIGEST}.get(self, self)


class Library:
    """The source in all forms, packed for the Redis protocol."""

    def __init__(self, source: bytes = SOURCE) -> None:
        """Use this source, which mutation tests replace."""
        self.name: str = f"tidegate_{sha1(source, usedforsecurity=False).hexdigest()[:12]}"
        functions = {single: f"{self.name}_{'one' if single else 'batch'}" for single in (True, False)}
        library = LIBRARY % (self.name.encode(), source, functions[True].encode(), functions[False].encode())
        script = source + b"\nreturn batch(KEYS, ARGV)\n"
        digest = sha1(script, usedforsecurity=False).hexdigest().encode()
        self.load: bytes = pack_command(b"FUNCTION", b"LOAD", library)
        self._calls = {single: pack_words(b"FCALL", name.encode()) for single, name in functions.items()}
        self._scripts = {
            Form.DIGEST: pack_words(b"EVALSHA", digest),
            Form.SCRIPT: pack_words(b"EVAL", script),
        }

    def first_words(self, form: Form, *, single: bool) -> bytes:
        """Return the first two words of the command; `single`: it has one ask and no values."""
        return self._scripts.get(form) or self._calls[single]


def pack_words(*words: bytes) -> bytes:
    """Return words in the Redis protocol."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def pack_command(*words: bytes) -> bytes:
    """Return a command in the Redis protocol."""
    return b"*%d\r\n%b" % (len(words), pack_words(*words))
