"""Tokens of runs: signed strings that give another process, thread or program a part of the rights at a node.

    tgr1.<payload>.<signature>      both in base64url; the payload is JSON
    tgk1.<payload>.<signature>      the key of the creator of a node, for programs that use runs over a network

The payload has the audience (the store, by an id that it keeps), the path of the node, the rights, the end, and a
number, so that two tokens never are the same. The signature is a keyed BLAKE2b of the payload. The keys come from
`secret` (the first signs, each verifies, so that secrets can be rotated), by default from the secret that the service
keeps in the store. A token contains no secret of the store, so joining a run needs access to the store, too.
"""

from __future__ import annotations

import binascii
import hmac
import json
import secrets as randomness
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._limiter.waiting import ApplyStep
from tidegate.agents._errors import TokenError
from tidegate.core._bounds import SECOND
from tidegate.errors import ConfigError, ValueConflict
from tidegate.stores._values import Collection, Write

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tidegate._runtime.flow import Flow
    from tidegate.agents._node import Path
    from tidegate.agents._tree import Tree
    from tidegate.stores._base import Store

PREFIX: Final = "tgr1"
OWNER_PREFIX: Final = "tgk1"  # of the key of a creator, which is no token: it also gives the rights to stop and extend
RIGHTS: Final = ("charge", "child", "read")
SIGNATURE_BYTES: Final = 16
MAX_TOKEN: Final = 4096  # characters
SECRETS: Final = Collection("tidegate.secrets", listed=False)  # as the service's ids: one secret for both
SECRET_NAME: Final = "reservations"  # noqa: S105 - the name of a value
AUDIENCE_NAME: Final = "store"
SECRET_TTL: Final = 3650 * 86_400 * SECOND


class Token(NamedTuple):
    """What a token says. `ends` is microseconds since 1970 by the clock of the store."""

    audience: str
    path: Path
    rights: tuple[str, ...]
    ends: int
    number: str


class Keys(NamedTuple):
    """The id of a store, and the keys that sign for it: the first signs, each verifies."""

    audience: str
    keys: tuple[bytes, ...]

    def sign(self, token: Token, prefix: str = PREFIX) -> str:
        """Return the signed string."""
        payload = json.dumps(token, separators=(",", ":")).encode()
        return f"{prefix}.{_encode(payload)}.{_encode(signature(self.keys[0], prefix, payload))}"

    def read(self, text: str) -> Token:
        """Verify a signed string; raises TokenError."""
        prefix, payload, signed = split(text)
        if not any(hmac.compare_digest(signature(key, prefix, payload), signed) for key in self.keys):
            raise TokenError("the token is not valid for this store: it was changed, or signed with another secret")
        token = _load(payload)
        if token.audience != self.audience:
            raise TokenError("the token is not valid for this store: it is for another one")
        return token


def read_rights(rights: Iterable[str]) -> tuple[str, ...]:
    """Check rights."""
    found = (rights,) if isinstance(rights, str) else tuple(rights)
    for right in found:
        if right not in RIGHTS:
            raise ConfigError(f"must be some of {', '.join(RIGHTS)}, not {right!r}", field="rights")
    return found


def audience_of(text: str) -> str:
    """Return the audience that a token claims, without verifying it: to find its store."""
    return _load(split(text)[1]).audience


def looks_like_token(text: str) -> bool:
    """Return whether a string has the form of a token of a run; it was not verified."""
    return text.startswith(f"{PREFIX}.")


def split(text: str) -> tuple[str, bytes, bytes]:
    """Return the prefix, the payload and the signature of a token; raises TokenError."""
    parts = text.strip().split(".") if isinstance(text, str) and len(text) <= MAX_TOKEN else []
    if len(parts) != 3 or parts[0] not in (PREFIX, OWNER_PREFIX):  # noqa: PLR2004 - as above
        raise TokenError(f"not a token of a run: it begins with {PREFIX}. and has three parts")
    try:
        return parts[0], _decode(parts[1]), _decode(parts[2])
    except (binascii.Error, ValueError):
        raise TokenError("not a token of a run: its parts are not base64url") from None


def _load(payload: bytes) -> Token:
    try:
        audience, path, rights, ends, number = json.loads(payload)
        found = Token(str(audience), tuple(map(str, path)), tuple(map(str, rights)), int(ends), str(number))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise TokenError("not a token of a run: its content cannot be read") from None
    return found


def signature(key: bytes, prefix: str, payload: bytes) -> bytes:
    """Sign a payload; the prefix is signed with it, so that a token never becomes the key of a creator."""
    return blake2b(f"{prefix}.".encode() + payload, key=key, digest_size=SIGNATURE_BYTES).digest()


def derive_key(secret: bytes) -> bytes:
    """Derive the key of tokens from a secret."""
    return blake2b(secret, digest_size=32, person=b"run token").digest()


def keys_flow(tree: Tree, configured: Sequence[str]) -> Flow[Any, Keys]:
    """Return the id of the store and its keys; the first process writes both."""
    audience = yield from _stored_flow(tree.store, AUDIENCE_NAME, tree.now())
    if configured:
        return Keys(audience.hex(), tuple(derive_key(secret.encode()) for secret in configured))
    return Keys(audience.hex(), (derive_key((yield from _stored_flow(tree.store, SECRET_NAME, tree.now()))),))


def _stored_flow(store: Store, name: str, now: int | None) -> Flow[Any, bytes]:
    """Return a random value of the store, which the first process that needs it writes."""
    made = randomness.token_bytes(32)
    try:
        yield ApplyStep(store, "acquire", (), now, None, (Write(SECRETS, name, made, SECRET_TTL, None),))
    except ValueConflict as conflict:
        return made if conflict.found is None else conflict.found.data
    return made


def new_number() -> str:
    """Return the number of a token."""
    return randomness.token_hex(4)


def _encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return urlsafe_b64decode(text + "=" * (-len(text) % 4))
