"""The tokenizer of the user, as a function of a string. Nothing is downloaded, and none is used by default."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

EXPECTED = "a function of a string, an object with 'encode', or the name of one such as 'package.module:function'"


def load_tokenizer(tokenizer: object) -> Callable[[str], int] | None:
    """Return a function that counts the tokens of a string; None: there is no tokenizer."""
    if tokenizer is None:
        return None
    found = _import(tokenizer) if isinstance(tokenizer, str) else tokenizer
    encode = getattr(found, "encode", None)
    if callable(encode):
        return partial(_count, encode)
    if callable(found):
        return partial(_count, found)
    raise ConfigError(f"expected {EXPECTED}, not {tokenizer!r}", field="tokenizer")


def _import(name: str) -> Any:  # noqa: ANN401 - any object
    module, colon, attribute = name.partition(":")
    if not module or not colon or not attribute:
        raise ConfigError(f"expected {EXPECTED}, not {name!r}", field="tokenizer")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {name}: {error}", field="tokenizer") from None


def _count(tokenize: Callable[[str], Any], text: str) -> int:
    """Count tokens, whether the tokenizer returns their number or the tokens."""
    found = tokenize(text)
    return found if isinstance(found, int) else len(found)
