"""Keys: opaque names of the limited clients, as a string or a tuple of strings that never collide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Hashable

Key = str | tuple[str, ...]


class GroupedKey(tuple[str, ...]):  # noqa: SLOT001 - it has an attribute, and a tuple has no slot for one
    """A key that belongs to a group: all keys that one client can invent, such as values of a header.

    The group is not part of the key: keys compare equal regardless of their group.
    """

    group: Hashable | None

    @classmethod
    def of(cls, key: Key, group: Hashable | None) -> GroupedKey:
        """Create a key with this group."""
        made = cls((key,) if isinstance(key, str) else key)
        made.group = group
        return made


def normal_key(key: object) -> Key:
    """Check and normalise a key: a string or a tuple of strings; a tuple of one becomes a string."""
    if isinstance(key, str):
        return str.__str__(key)  # also for a string enumeration
    if isinstance(key, GroupedKey) and len(key) > 1:
        return key
    if isinstance(key, (tuple, list)) and key and all(isinstance(part, str) for part in key):
        return tuple(key) if len(key) > 1 else str(key[0])
    message = f"a key is a string or a tuple of strings, not {key!r}: use str(user_id) or ('user', str(user_id))"
    raise ConfigError(message, field="key")


def show_key(key: Key) -> str:
    """Return a key for people, as logs and statistics show it: a string as it is, the parts of a tuple joined."""
    return key if isinstance(key, str) else join_key(key)


def join_key(key: Key) -> str:
    """Return a key as one string: parts joined by '/', with '%' and '/' inside a part escaped."""
    parts = (key,) if isinstance(key, str) else key
    return "/".join(part.replace("%", "%25").replace("/", "%2F") for part in parts)
