"""The conformance tests of stores, with logs in their state's row, as rows, and moving between the two."""

from itertools import count

import pytest

from tests.conformance.changes import changing_history
from tidegate._policy import Policy
from tidegate.core._bounds import MAX_INTEGER
from tidegate.core._limit import Limit
from tidegate.stores._sqlite import SQLiteStore, rows
from tidegate.testing import ReferenceStore, verify_store
from tidegate.testing._reference import answer_of


@pytest.mark.parametrize(("inline", "rounds"), [(0, 12), (2, 8), (rows.MAX_INLINE_ENTRIES, 20)])
def test_decides_as_the_reference_store(tmp_path, monkeypatch, inline, rounds):
    monkeypatch.setattr(rows, "MAX_INLINE_ENTRIES", inline)
    numbers = count()
    verify_store(lambda: SQLiteStore(tmp_path / f"{next(numbers)}.db"), seed=inline, rounds=rounds)


@pytest.mark.parametrize("seed", range(12))
def test_decides_as_the_reference_store_when_a_limit_changes(tmp_path, seed):
    store = SQLiteStore(tmp_path / "limits.db")
    for place, (verb, asks, now, at, answers) in enumerate(changing_history(seed)):
        assert tuple(map(answer_of, store.apply(verb, asks, now, at))) == answers, f"step {place}"
    store.close()


def test_sums_that_approach_64_bits_are_rebased(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_INLINE_ENTRIES", 0)
    policy = Policy("p", (Limit(MAX_INTEGER, "10us", "sliding_log"),))
    model, store = ReferenceStore(), SQLiteStore(tmp_path / "limits.db")
    for step in range(800):  # 266 * MAX in all; sums are rebased at 128 * MAX
        asks = ((policy, "k", (MAX_INTEGER // 3,)),)
        now = 1_700_000_000_000_000 + step * 4
        expected = model.apply("acquire", asks, now)
        assert tuple(map(answer_of, store.apply("acquire", asks, now))) == expected
        if step % 7 == 0:
            asks = ((policy, "k", (-(MAX_INTEGER // 5) if step % 2 else MAX_INTEGER // 5,)),)
            expected = model.apply("adjust", asks, now)
            assert tuple(map(answer_of, store.apply("adjust", asks, now))) == expected
    store.close()


def test_a_key_that_occurs_twice_in_a_call_pays_both_costs(tmp_path):
    policy = Policy("p", (Limit(5, "1h"), Limit(5, "1h", "sliding_log", name="log")))
    store = SQLiteStore(tmp_path / "limits.db")
    asks = ((policy, "k", (3, 3)), (policy, "k", (2, 1)))
    assert all(store.apply("acquire", asks, 0))
    assert store.apply_one("peek", policy, "k", (0, 0), 0).views == [(0, 0, 3_600_000_000), (1, 0, 3_600_000_000)]
    assert not any(store.apply("acquire", asks, 0))
    store.close()


def test_keys_with_lone_surrogates_are_distinct(tmp_path):
    policy = Policy("p\ud800", (Limit(1, "1h", name="n\udfff"),))
    store = SQLiteStore(tmp_path / "limits.db")
    for key in ("\ud800", ("\ud800", "a"), "\ud801", "é", "\\ud800"):
        assert store.apply_one("acquire", policy, key, (1,), 0)
        assert not store.apply_one("acquire", policy, key, (1,), 0)
    store.close()
