"""The message that agents exchange: a CapacityUpdate, as JSON, signed if a secret is shared.

    {"resource": "api", "agent_id": "agent-1", "new_capacity": 50, "reason": "received 429 response",
     "timestamp": "2026-11-16T01:33:32.120000Z", "epoch": 1794792812120000, "retry_after": 12.0, "refused_at": 100,
     "recovers_after": 252.0, "original": 100, "window": 60.0, "factor": 0.5, "nonce": "…", "signature": "…"}

The first five fields are required. Without `epoch`, the timestamp is used. An agent whose capacity is not `original`
multiplies its own by `factor`; without these fields, `new_capacity` applies to every agent. With a shared secret there
are `nonce`, `subject` and `signature`; `signing` describes how they are made and checked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final, Self, TypeGuard

from tidegate._policy.key import join_key
from tidegate.adaptive._signing import EPOCH, MalformedError, read_instant, read_signed, write_instant, write_signed
from tidegate.core._bounds import MAX_INTEGER, SECOND

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

SUBJECT: Final = "ratelimit.capacity"  # a namespace precedes it
ALL_RESOURCES: Final = "*"  # the resource of a message that clears all of them
MAX_UPDATE_BYTES: Final = 40_000
MAX_NAME: Final = 1024  # characters of a resource, agent or reason
MAX_KEY_BYTES: Final = 256
MAX_DENOMINATOR: Final = 1_000_000  # of a factor: 0.3333333333333333 means 1/3
MAX_EPOCH: Final = 2**52  # of received epochs: leaves room for higher ones of our own (as a time: the year 2112)


@dataclass(frozen=True, slots=True)
class CapacityUpdate:
    """One agent's reduction of a resource to `new_capacity`, with reason and time.

    `epoch` orders updates without relying on clocks (see `capacity`). `retry_after` is the number of seconds for which
    no agent may make calls. `refused_at` is the capacity at which calls were refused. `recovers_after` is how many
    seconds after the timestamp the sender has recovered: from then on, no agent obeys the update. An update that
    `clears` ends all reductions of the resource up to its epoch; if it `clears_all`, those of every resource.

    `original` is the capacity of the sender without reductions, `window` its window in seconds, and `factor` the share
    of the original that is left; see `scaled`.
    """

    resource: str
    agent_id: str
    new_capacity: int
    reason: str
    timestamp: datetime
    epoch: int | None = None
    retry_after: float | None = None
    refused_at: int | None = None
    recovers_after: float | None = None
    clears: bool = False
    clears_all: bool = False
    original: int | None = None
    window: float | None = None
    factor: float | None = None

    def scaled(self, original: int) -> tuple[int, int]:
        """Return the reduced and the refused capacity for an agent with this original capacity; 0: it is not known.

        If the sender's original is the same, or it sent no factor, they are the sender's. Otherwise they have the same
        proportion to this original as the sender's to its own.
        """
        if self.factor is None or self.original is None or self.original == original:
            return self.new_capacity, self.refused_at or 0
        share = Fraction(self.factor).limit_denominator(MAX_DENOMINATOR)
        return max(1, int(original * share)), (self.refused_at or 0) * original // self.original

    @property
    def at(self) -> int:
        """The timestamp in microseconds since 1970."""
        return (self.timestamp - EPOCH) // timedelta(microseconds=1)

    @property
    def order(self) -> int:
        """The epoch, or the timestamp if the sender gave none."""
        return self.epoch if self.epoch is not None else max(1, min(MAX_EPOCH, self.at))

    @property
    def pause(self) -> int:
        """The requested pause in microseconds."""
        return 0 if self.retry_after is None else round(self.retry_after * SECOND)

    def to_json(self, secret: str | bytes | None = None, *, subject: str = SUBJECT) -> bytes:
        """Return the message for a subject, signed if there is a secret."""
        fields: dict[str, Any] = {
            "resource": self.resource,
            "agent_id": self.agent_id,
            "new_capacity": self.new_capacity,
            "reason": self.reason,
            "timestamp": write_instant(self.at),
        }
        if self.epoch is not None:
            fields["epoch"] = self.epoch
        if self.retry_after is not None:
            fields["retry_after"] = self.retry_after
        if self.refused_at is not None:
            fields["refused_at"] = self.refused_at
        if self.recovers_after is not None:
            fields["recovers_after"] = self.recovers_after
        for name in ("original", "window", "factor"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.clears:
            fields["clears"] = True
        if self.clears_all:
            fields["clears_all"] = True
        return write_signed(fields, secret, subject)

    @classmethod
    def from_json(cls, text: bytes | str, secret: str | bytes | None = None, subject: str = SUBJECT) -> Self:
        """Parse a message that arrived on a subject; raises MalformedError. Unknown fields are ignored."""
        return cls.from_fields(read_signed(text, secret, MAX_UPDATE_BYTES, subject).fields)

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        """Build an update from the fields of a parsed message."""
        capacity, epoch, pause = fields.get("new_capacity"), fields.get("epoch"), fields.get("retry_after")
        refused_at, recovers_after = fields.get("refused_at"), fields.get("recovers_after")
        if capacity is None or not _whole(capacity):
            raise MalformedError(f"new_capacity must be an integer of at least 1, not {capacity!r}")
        if epoch is not None and not (_whole(epoch) and epoch <= MAX_EPOCH):
            raise MalformedError(f"epoch must be an integer from 1 to 2**52, not {epoch!r}")
        for name, time in (("retry_after", pause), ("recovers_after", recovers_after)):
            if time is not None and not (_number(time) and 0 <= time <= MAX_INTEGER // SECOND):
                raise MalformedError(f"{name} must be a number of seconds, not {time!r}")
        original, window, factor = fields.get("original"), fields.get("window"), fields.get("factor")
        for name, count in (("refused_at", refused_at), ("original", original)):
            if count is not None and not _whole(count):
                raise MalformedError(f"{name} must be an integer of at least 1, not {count!r}")
        if window is not None and not (_number(window) and 0 < window <= MAX_INTEGER // SECOND):
            raise MalformedError(f"window must be a positive number of seconds, not {window!r}")
        if factor is not None and not (_number(factor) and 0 < factor <= 1):
            raise MalformedError(f"factor must be a number above 0, and at most 1, not {factor!r}")
        return cls(
            resource=_text(fields, "resource"),
            agent_id=_text(fields, "agent_id"),
            new_capacity=capacity,
            reason=_text(fields, "reason", needed=False),
            timestamp=read_instant(fields.get("timestamp")),
            epoch=epoch,
            retry_after=pause,  # type: ignore[arg-type]  # a number: checked above
            refused_at=refused_at,  # type: ignore[arg-type]  # as above
            recovers_after=recovers_after,  # type: ignore[arg-type]  # as above
            clears=fields.get("clears") is True,
            clears_all=fields.get("clears") is True and fields.get("clears_all") is True,
            original=original,  # type: ignore[arg-type]  # as above
            window=window,
            factor=factor,
        )


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INTEGER


def _number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(fields: Mapping[str, object], name: str, *, needed: bool = True) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or not (is_name(value) or (value == "" and not needed)):
        raise MalformedError(f"{name} must be a string of 1 to {MAX_NAME} characters, not {value!r}")
    return value


def is_name(value: object) -> bool:
    """Return whether a value is a string that every bus can carry: not empty, not too long, no lone surrogates."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def retain_key(resource: str, agent_id: str, tag: str = "", namespace: str = "") -> str:
    """Return the retain key of an agent's latest update of a resource; `tag` and `namespace` distinguish swarms."""
    parts = (resource, agent_id, tag, namespace) if namespace else (resource, agent_id, tag)
    key = join_key(parts if tag or namespace else (resource, agent_id))
    return key if len(key.encode()) <= MAX_KEY_BYTES else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
