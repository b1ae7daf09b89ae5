"""The tokenizer of the user, as a function of a string. Nothing is downloaded, and none is used by default."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED = "a function of a string, an object with 'encode', or the name of one such as 'package.module:function'"


log: logging.Logger = logging.getLogger("tidegate.outbound")


def load_tokenizer(tokenizer: object) -> Callable[[str], int | None] | None:
    """Return a function that counts the tokens of a string (None: it fails), or None if there is no tokenizer."""
    if tokenizer is None:
        return None
    found = _import(tokenizer) if isinstance(tokenizer, str) else tokenizer
    encode = getattr(found, "encode", None)
    if callable(encode):
        return UserTokenizer(encode)
    if callable(found):
        return UserTokenizer(found)
    raise ConfigError(f"expected {EXPECTED}, not {tokenizer!r}", field="tokenizer")


def _import(name: str) -> Any:  # noqa: ANN401 - any object
    module, colon, attribute = name.partition(":")
    if not module or not colon or not attribute:
        raise ConfigError(f"expected {EXPECTED}, not {name!r}", field="tokenizer")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {name}: {error}", field="tokenizer") from None


class UserTokenizer:
    """Counts tokens, whether the tokenizer of the user returns their number or the tokens."""

    def __init__(self, tokenize: Callable[[str], Any]) -> None:
        """Call this function with the text of each request."""
        self._tokenize = tokenize
        self._failed = False

    def __call__(self, text: str) -> int | None:
        """Count the tokens of a string; None: the tokenizer failed, as some do for strings with special tokens."""
        try:
            found = self._tokenize(text)
            return found if isinstance(found, int) else len(found)
        except Exception:
            if not self._failed:
                self._failed = True
                log.exception("the tokenizer failed: tidegate estimates such requests by their length")
            return None
