"""Keys: opaque names of whoever is limited, made of one part or several, that never collide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

Key = str | tuple[str, ...]


class GroupedKey(tuple[str, ...]):  # noqa: SLOT001 - it has an attribute, and a tuple has no slot for one
    """A key that tells its group: keys that one party can make up in any number, such as the values of a header.

    The group is no part of the key: it is equal to the same key of another group, or of none.
    """

    group: Hashable | None

    @classmethod
    def of(cls, key: Key, group: Hashable | None) -> GroupedKey:
        """Make a key of this group."""
        made = cls((key,) if isinstance(key, str) else key)
        made.group = group
        return made


def normal_key(key: object) -> Key:
    """Check a key: a string, or a tuple of strings; a tuple of one is that string."""
    if isinstance(key, str):
        return str.__str__(key)  # of an enumeration that is a string, too
    if isinstance(key, GroupedKey) and len(key) > 1:
        return key
    if isinstance(key, (tuple, list)) and key and all(isinstance(part, str) for part in key):
        return tuple(key) if len(key) > 1 else str(key[0])
    message = f"a key is a string or a tuple of strings, not {key!r}: write e.g. str(user_id) or ('user', str(user_id))"
    raise ConfigError(message, field="key")


def join_key(key: Key) -> str:
    """Write a key as one string: parts joined by '/', with '%' and '/' inside a part escaped."""
    parts = (key,) if isinstance(key, str) else key
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)
