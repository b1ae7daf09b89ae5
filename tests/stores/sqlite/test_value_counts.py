"""Adding values to a listed collection does not count all of them each time, and never exceeds the maximum."""

import pytest

from tidegate.stores import Collection, CollectionFull, SQLiteStore, Write
from tidegate.stores._sqlite import value_rows
from tidegate.testing import ManualClock


def test_a_listed_collection_is_counted_rarely_and_is_never_too_full(tmp_path, monkeypatch):
    monkeypatch.setattr(value_rows, "MAX_LISTED", 400)
    store, collection = SQLiteStore(tmp_path / "s.db", clock=ManualClock(1000)), Collection("things", listed=True)
    statements = []

    def put(name):
        store.apply("acquire", (), writes=(Write(collection, name, b"x", 10**9, None),))

    put("first")
    store._rows.cursor.connection.set_trace_callback(statements.append)  # noqa: SLF001 - what SQLite executes
    for number in range(399):
        put(str(number))
    counted = sum("count(*)" in statement for statement in statements)
    assert counted < 150  # most of them when it is nearly full
    for _ in range(3):
        with pytest.raises(CollectionFull):
            put("one too many")
    store.delete_value(collection, "0")
    put("fits again")
    with pytest.raises(CollectionFull):
        put("one too many")
    store.close()
