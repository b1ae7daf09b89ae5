"""`GET /v1/key`: the data of one key in every policy, and the decision that its next call would get.

A policy has data about a key if the key has used a part of a limit, is blocked, or was denied within the history.
While the store is unavailable, no usage is known.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from tidegate._policy.limit_text import describe_limit
from tidegate.errors import RateLimitError
from tidegate.service._api.decoding import convert_value
from tidegate.service._api.fields import BadFieldError
from tidegate.service._api.requests import RequestKey
from tidegate.service._dashboard.history import MAX_POLICIES, MINUTE
from tidegate.service._decisions.audit import describe_entry
from tidegate.service._decisions.blocks import Block
from tidegate.service._decisions.policy_limiters import Subject, check_key
from tidegate.service._decisions.stats import BLOCKED

if TYPE_CHECKING:
    from tidegate._limiter.limiter import Usage
    from tidegate._policy import Key, Policy
    from tidegate.core._decision import Decision
    from tidegate.service._http.app import App

MAX_DENIALS: Final = 20
MAX_AUDIT_ENTRIES: Final = 10


async def key_json(app: App, query: bytes) -> bytes:
    """Return the body of the response for a query string: `key`, repeated for each part of a composite key."""
    fields = parse_qs(query.decode("latin-1"), keep_blank_values=True)
    parts = fields.get("key", [])  # percent-encoded UTF-8
    if not parts:
        raise BadFieldError("/key", "missing: expected the key, once for each of its parts")
    value = convert_value(parts if len(parts) > 1 else parts[0], RequestKey, "/key")
    key = check_key(value if isinstance(value, str) else tuple(value))
    return json.dumps(await describe_key(app, key), separators=(",", ":")).encode()


async def describe_key(app: App, key: Key) -> dict[str, Any]:
    """Describe a key: its policies, its denials and what was done to it."""
    decider, history = app.decider, app.overview.history
    names = list(decider.policies.entries)[:MAX_POLICIES]
    blocks = {block.policy: block for block in await decider.find_blocks() if block.key == key}
    minutes = denials_by_minute(app, key)
    denied = {policy for policy, _, _ in minutes}
    status = app.overview.source.status()
    recent = [denial for denial in status.denials if as_key(denial["key"]) == key]
    denied |= {denial["policy"] for denial in recent}
    described = await asyncio.gather(*(_describe_policy(app, name, key, blocks.get(name)) for name in names))
    known = [each for each in described if each["known"] or each["policy"] in denied]
    entries = [entry for entry in await decider.audit.read() if entry.key == key]
    return {
        "key": key,
        "seen": bool(known or recent or minutes),
        "store_lost": decider.store.unavailable,
        "policies": known,
        "other_policies": len(described) - len(known),
        "denials": recent[:MAX_DENIALS],
        "minutes": [{"policy": policy, "at": at, "denied": count} for policy, at, count in minutes],
        "minutes_since": history.end_of(history.minutes) - history.minutes.steps * MINUTE * 1000,
        "audit": [describe_entry(entry) for entry in entries[:MAX_AUDIT_ENTRIES]],
    }


def denials_by_minute(app: App, key: Key) -> list[tuple[str, int, int]]:
    """Return how often a key was denied: policy, start of the minute in milliseconds, denials.

    The history keeps the most denied keys of each minute only.
    """
    history = app.overview.history
    end, tick = history.end_of(history.minutes), history.minutes.tick
    found = [
        (row["policy"], end - (tick - minute) * MINUTE * 1000, row["denied"])
        for minute, rows in history.tops
        for row in rows
        if as_key(row["key"]) == key
    ]
    now = [row for row in history.source.top_denied() if as_key(row["key"]) == key and row["this_minute"]]
    return found + [(row["policy"], end, row["this_minute"]) for row in now]


def as_key(value: object) -> object:
    """Return a key as the engine has it: the parts of a composite key may come from JSON."""
    return tuple(value) if isinstance(value, list) else value


async def _describe_policy(app: App, name: str, key: Key, block: Block | None) -> dict[str, Any]:
    """Describe the data of one policy about a key."""
    decider, subject = app.decider, Subject(name, key)
    found = decider.find(subject)
    if found is None:  # pragma: no cover - a policy of the file limits every key
        return {"policy": name, "known": False}
    policy = found[0].policy
    try:
        usage, decision = await decider.usage(subject), await decider.peek(subject)
        error = "the store is unavailable" if decider.store.unavailable else ""  # the usage is that of `on_store_error`
    except RateLimitError as failure:
        error = str(failure)
    if error:
        return {"policy": name, "known": block is not None, "error": error, **_describe_block(None, block)}
    if block is None and decision is not None and decision.violated == BLOCKED:
        block = Block(name, key, decision.retry_after or 0.0)  # of the store: not in the list after a restart
    entry = None if block is None else await decider.audit.find_last(name, key, "block")
    return {
        "policy": name,
        "known": block is not None or any(each.used for each in usage.values()),
        "mode": policy.mode,
        "limits": _describe_limits(policy, usage),
        "next": _describe_next(policy, decision),
        **_describe_block(None if entry is None else entry._asdict(), block),
    }


def _describe_limits(policy: Policy, usage: dict[str, Usage]) -> list[dict[str, Any]]:
    limits = zip(policy.limits, usage.items(), strict=True)
    return [{"name": name, "text": describe_limit(limit), **each._asdict()} for limit, (name, each) in limits]


def _describe_next(policy: Policy, decision: Decision | None) -> dict[str, Any]:
    """Describe what the next call with a cost of 1 would get."""
    if decision is None:  # pragma: no cover - as above
        return {"allowed": True, "retry_after": 0.0, "over": []}
    texts = {limit.name: describe_limit(limit) for limit in policy.limits}
    over = [texts.get(name, name) for name in decision.violated]
    return {"allowed": decision.allowed, "retry_after": decision.retry_after, "over": over}


def _describe_block(entry: dict[str, Any] | None, block: Block | None) -> dict[str, Any]:
    if block is None:
        return {"block": None}
    why = {name: "" if entry is None else entry[name] for name in ("reason", "actor")}
    return {"block": {"seconds": block.seconds, "at": None if entry is None else entry["at"], **why}}
