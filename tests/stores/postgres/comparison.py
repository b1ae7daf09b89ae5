"""Runs vectors in a store, and compares answers and stored states with the Python core."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from tidegate._policy import join_key
from tidegate.core.codec import dump, limit_of
from tidegate.stores._postgres.call import encode_name
from tidegate.testing import ReferenceStore
from tidegate.testing._reference import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tidegate._policy import Key
    from tidegate.stores._postgres import PostgresStore
    from tidegate.testing import Vector

    States = dict[tuple[str, str], tuple[str, list[int]]]


class Core(ReferenceStore):
    """The Python core, with readable states."""

    def states(self, policy: str, key: Key, now: int) -> States:
        return {
            (name, algorithm): (str(limit_of(state)), dump(state))
            for (owner, whose, name, algorithm), state in self._states.items()
            if (owner, whose) == (policy, key) and limit_of(state).rules.expires(state) > now
        }


def use_core(store: PostgresStore, core: str) -> PostgresStore:
    """Let a store that has no connection yet call other functions, as another version of tidegate would."""
    store.schema = store.schema._replace(core=core, version=zlib.crc32(core.encode()))
    return store


def stored(store: PostgresStore, sql: Callable[..., Any], policy: str, key: Key, now: int) -> States:
    """Read the live states of a key from the database."""
    query = f'select name, algorithm, rule, numbers from "{store.schema.functions}".dump(%s, %s, %s)'  # noqa: S608 - a known name
    rows = sql(query, encode_name(policy), encode_name(join_key(key), escaped=True), now)
    return {(name, algorithm): (rule, numbers) for name, algorithm, rule, numbers in rows}


def first_difference(store: PostgresStore, sql: Callable[..., Any], vectors: Iterable[Vector]) -> str | None:
    """Return the first step at which the store answers or stores something else than the core."""
    core = Core()
    for number, (verb, asks, now, at, _) in enumerate(vectors):
        expected = core.apply(verb, asks, now, at)
        answers = tuple(answer_of(decision) for decision in store.apply(verb, asks, now, at))
        step = f"step {number}: {verb} {asks} now={now} at={at}"
        if answers != expected:
            return f"{step}\n expected {expected}\n got      {answers}"
        for policy, key, _ in asks:
            kept = stored(store, sql, policy.name, key, now)
            if kept != core.states(policy.name, key, now):
                return f"{step}\n expected state {core.states(policy.name, key, now)}\n got            {kept}"
    return None
