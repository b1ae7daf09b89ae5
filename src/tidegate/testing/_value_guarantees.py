"""The guarantees of small values, for stores that keep them; one test function each."""
# ruff: noqa: D401 - a docstring here states what a store does, not what the function does

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from tidegate._policy import Policy
from tidegate.core._bounds import SECOND
from tidegate.core._limit import Limit
from tidegate.errors import CollectionFull, ConfigError, RateLimitError, ValueConflict
from tidegate.stores._values import ANYTHING, KEEP, MAX_BYTES, MAX_LISTED, MAX_WRITES, Collection, Value, Write
from tidegate.testing._store_guarantees import NOW, ask, check, expect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidegate.core._decision import Decision
    from tidegate.stores._base import Store
    from tidegate.stores._values import Anything

HOUR: Final = 3600 * SECOND
LISTED: Final = Collection("kit")
UNLISTED: Final = Collection("kit", listed=False)
POLICY: Final = Policy("kit-values", (Limit(2, "1h"), Limit(5, "1h", "sliding_log", name="log")))
BESIDE: Final = Collection("kit-beside", ("kit-values", "k"))
BOTH: Final = (LISTED, UNLISTED)


def values_are_read_as_written(store: Store) -> None:
    """A value is read as it was written, with the time of the write and its end; a missing one is None."""
    for collection in (*BOTH, BESIDE):
        check(store.get_value(collection, "a", NOW) is None, "a value that was never written was found")
        for data in (b"", b"x", b"\0\r\n\xff" * 9, bytes(range(256)) * (MAX_BYTES // 256)):
            store.put_value(collection, "a", data, 60, now=NOW)
            found = store.get_value(collection, "a", NOW + 1)
            check(found == Value(data, NOW, NOW + 60 * SECOND), f"wrote {len(data)} bytes, read {found!r:.200}")


def a_value_ends_at_its_time_to_live(store: Store) -> None:
    """A value is there a microsecond before its end and not at it; then it can be written as a new one."""
    for collection in BOTH:
        store.put_value(collection, "a", b"1", 1.5, now=NOW)
        end = NOW + 3 * SECOND // 2
        check(store.get_value(collection, "a", end - 1) is not None, "a value ended before its time to live")
        check(store.get_value(collection, "a", end) is None, "a value was there at its end")
        expect_conflict(store, Write(collection, "a", b"2", HOUR, None), end - 1, b"1")
        store.put_value(collection, "a", b"2", 60, None, end)
        check(data_of(store.get_value(collection, "a", end)) == b"2", "a value that had ended was not replaced")
    check(list(store.list_values(LISTED, NOW + HOUR)) == [], "values that had ended were listed")


def conditions_are_checked(store: Store) -> None:
    """A write with a condition is refused unless it holds, and the error has the stored value."""
    for collection in BOTH:
        expect_conflict(store, Write(collection, "a", b"1", HOUR, b"0"), NOW, None)
        store.put_value(collection, "a", b"1", 3600, None, NOW)
        expect_conflict(store, Write(collection, "a", b"2", HOUR, None), NOW, b"1")
        expect_conflict(store, Write(collection, "a", b"2", HOUR, b"0"), NOW, b"1")
        expect_conflict(store, Write(collection, "a", None, 0, b"0"), NOW, b"1")
        store.put_value(collection, "a", b"2", 3600, b"1", NOW)
        check(data_of(store.get_value(collection, "a", NOW)) == b"2", "compare-and-set did not write")
        store.delete_value(collection, "a", b"2", NOW)
        store.delete_value(collection, "a", now=NOW)
        check(store.get_value(collection, "a", NOW) is None, "a deleted value was found")


def a_charge_and_its_values_are_one_step(store: Store) -> None:
    """Values are written if the call is charged; a denial writes nothing, and a failed condition charges nothing."""
    write = Write(BESIDE, "first", b"1", HOUR, None)
    charge(store, NOW, write)
    check(data_of(store.get_value(BESIDE, "first", NOW)) == b"1", "a charged call did not write its value")
    expect_conflict(store, write, NOW, b"1", charged=True)
    expect(ask(store, "peek", POLICY, "k", (0, 0), NOW), remaining=[1, 4], what="after a step whose condition failed")
    charge(store, NOW, Write(BESIDE, "second", b"2", HOUR), Write(BESIDE, "first", None))
    check(store.get_value(BESIDE, "first", NOW) is None, "a charged call did not delete a value")
    decisions = store.apply("hold", ((POLICY, "k", (1, 1)),), NOW, None, (Write(BESIDE, "third", b"3", HOUR),))
    check(not decisions[0].within_limits, "a call above the limit was allowed")
    check(store.get_value(BESIDE, "third", NOW) is None, "a denied call wrote its value")
    store.apply("adjust", ((POLICY, "k", (-1, -1)),), NOW, NOW, (Write(BESIDE, "second", None, 0, b"2"),))
    expect(ask(store, "peek", POLICY, "k", (0, 0), NOW), remaining=[1, 4], what="after a refund with a deletion")
    check(store.get_value(BESIDE, "second", NOW) is None, "a refund did not delete its value")


def a_condition_alone_changes_nothing(store: Store) -> None:
    """A write that keeps its value refuses the step unless its condition holds, and changes neither value nor end."""
    for collection in (Collection("kit-beside", ("kit-values", "k"), listed=False), BESIDE):
        open_, closed = Write(collection, "state", KEEP, 0, b"open"), Write(collection, "state", KEEP, 0, b"closed")
        expect_conflict(store, open_, NOW, None, charged=True)
        charge(store, NOW, Write(collection, "state", KEEP, 0, None))
        check(store.get_value(collection, "state", NOW) is None, "a condition created a value")
        store.put_value(collection, "state", b"open", 60, now=NOW)
        store.apply("adjust", ((POLICY, "k", (-1, -1)),), NOW + 1, NOW, (open_,))
        charge(store, NOW + 2, open_)
        found = store.get_value(collection, "state", NOW + 3)
        check(found == Value(b"open", NOW, NOW + 60 * SECOND), f"a condition changed its value: {found}")
        expect_conflict(store, closed, NOW + 4, b"open", charged=True)
        expect(ask(store, "peek", POLICY, "k", (0, 0), NOW + 4), remaining=[1, 4], what="after failed conditions")
        expect_conflict(store, open_, NOW + 60 * SECOND, None, charged=True)
        store.apply("reset", ((POLICY, "k", (0, 0)),), NOW + 60 * SECOND)


def of_several_writes_all_are_made_or_none(store: Store) -> None:
    """If the condition of one write fails, no other write of the step is made."""
    store.put_value(LISTED, "b", b"old", 3600, now=NOW)
    writes = [Write(LISTED, name, b"new", HOUR, None) for name in ("a", "b", "c")]
    try:
        store.apply("acquire", (), NOW, None, writes)
    except ValueConflict as conflict:
        check(conflict.write == writes[1], f"the conflict is about {conflict.write.name!r} and not 'b'")
    else:
        check(holds=False, message="a step with a condition that fails was made")
    found = {name: value.data for name, value in store.list_values(LISTED, NOW).items()}
    check(found == {"b": b"old"}, f"after a refused step the values are {found}")


def a_collection_is_listed(store: Store) -> None:
    """`list_values` returns all values of one collection, of no other; the empty and the hostile names too."""
    names = ["a", "A", "a/b", "a%2Fb", "{a}", "a\nb", "a\0b", "\u00e9", "e\u0301", "\U0001f511", "*", "k" * 500]
    for number, name in enumerate(names):
        store.put_value(LISTED, name, b"%d" % number, 3600, now=NOW)
        store.put_value(Collection("kit-other"), name, b"other", 3600, now=NOW)
        store.put_value(Collection("kit", ("p", "k")), name, b"beside", 3600, now=NOW)
        store.put_value(UNLISTED, name, b"unlisted", 3600, now=NOW)
    found = {name: value.data for name, value in store.list_values(LISTED, NOW).items()}
    check(found == {name: b"%d" % number for number, name in enumerate(names)}, f"listed {found}")
    for name in names[::2]:
        store.delete_value(LISTED, name, now=NOW)
    check(sorted(store.list_values(LISTED, NOW)) == sorted(names[1::2]), "deleted values were listed")
    refused(lambda: store.list_values(UNLISTED, NOW), ConfigError, "a collection without an index was listed")


def a_listed_collection_is_bounded(store: Store) -> None:
    """A listed collection takes MAX_LISTED values and no more, all of which are listed; ended ones make room."""
    for start in range(0, MAX_LISTED, MAX_WRITES):
        numbers = range(start, min(start + MAX_WRITES, MAX_LISTED))
        store.apply("acquire", (), NOW, None, [Write(LISTED, f"{n}", b"%d" % n, HOUR + n) for n in numbers])
    more = Write(LISTED, "more", b"", HOUR)
    refused(lambda: store.apply("acquire", (), NOW, None, (more,)), CollectionFull, "more values than MAX_LISTED")
    store.put_value(LISTED, "7", b"7", 3600, now=NOW)  # replaces one
    listed = store.list_values(LISTED, NOW)
    check(len(listed) == MAX_LISTED, f"{len(listed)} of {MAX_LISTED} values were listed")
    check(all(value.data == name.encode() for name, value in listed.items()), "a value was listed under another name")
    store.put_value(LISTED, "more", b"", 3600, now=NOW + HOUR + 1)  # three have ended
    check(len(store.list_values(LISTED, NOW + HOUR + 1)) == MAX_LISTED - 2, "values that ended did not make room")


def wrong_values_are_refused(store: Store) -> None:
    """Values, names and times to live beyond the bounds are a ConfigError, and charge nothing."""
    bad: Sequence[Sequence[Write]] = (
        (Write(BESIDE, "a", b"x" * (MAX_BYTES + 1), HOUR),),
        (Write(BESIDE, "", b"x", HOUR),),
        (Write(BESIDE, "n" * 513, b"x", HOUR),),
        (Write(BESIDE, "a", b"x", 0),),
        (Write(BESIDE, "a", b"x", HOUR), Write(BESIDE, "a", b"y", HOUR)),
        [Write(BESIDE, f"{n}", b"x", HOUR) for n in range(MAX_WRITES + 1)],
    )
    for writes in bad:
        call = partial(store.apply, "acquire", ((POLICY, "k", (1, 1)),), NOW, None, writes)
        refused(call, ConfigError, f"wrong writes were accepted: {writes!r:.100}")
    expect(ask(store, "peek", POLICY, "k", (0, 0), NOW), remaining=[2, 5], what="after refused writes")


def one_of_many_threads_writes_first(store: Store) -> None:
    """Of many threads that write a value under the condition that there is none, one succeeds."""
    for collection in BOTH:

        def write(number: int, collection: Collection = collection) -> int:
            try:
                store.put_value(collection, "race", b"%d" % number, 3600, None, NOW)
            except ValueConflict as conflict:
                return int(data_of(conflict.found) or b"-1")
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = set(pool.map(write, range(64)))
        check(len(winners) == 1, f"several threads wrote a value first: {winners}")


def tasks_write_values_too(store: Store) -> None:
    """The `async` forms do the same as the others."""

    async def use() -> None:
        for collection in BOTH:
            await store.put_value_async(collection, "a", b"1", 3600, None, NOW)
            found = await store.get_value_async(collection, "a", NOW)
            check(found == Value(b"1", NOW, NOW + HOUR), f"a task read {found}")
        check(list(await store.list_values_async(LISTED, NOW)) == ["a"], "a task did not list the value")
        write = Write(BESIDE, "first", b"1", HOUR, None)
        await store.apply_async("acquire", ((POLICY, "k", (1, 1)),), NOW, None, (write,))
        try:
            await store.apply_async("acquire", ((POLICY, "k", (1, 1)),), NOW, None, (write,))
        except ValueConflict as conflict:
            check(data_of(conflict.found) == b"1", f"the conflict of a task has {conflict.found}")
        else:
            check(holds=False, message="a task wrote a value that exists")
        for collection in BOTH:
            await store.delete_value_async(collection, "a", b"1", NOW)
            check(await store.get_value_async(collection, "a", NOW) is None, "a task did not delete the value")
        await store.close_async()

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        thread.submit(asyncio.run, use()).result()


def random_steps_are_those_of_a_dictionary(store: Store) -> None:
    """Random writes, conditions, ends and charges have the results of a dictionary and a counter."""
    random = Random(20_261_118)  # noqa: S311 - a reproducible history
    expected: dict[tuple[Collection, str], Value] = {}
    now, admitted = NOW, 0
    for _ in range(400):
        now += random.choice((0, 1, SECOND, 20 * SECOND))
        writes = [random_write(random) for _ in range(random.randint(1, 3))]
        writes = list({(write.collection, write.name): write for write in writes}.values())
        live = {place: value for place, value in expected.items() if value.ends > now}
        holds = all(write.holds(live.get((write.collection, write.name))) for write in writes)
        try:
            decisions = store.apply("acquire", ((RANDOM_POLICY, "k", (1,)),), now, None, writes)
        except ValueConflict:
            check(not holds, f"a step whose conditions hold was refused: {writes}")
            continue
        check(holds, f"a step whose conditions do not hold was made: {writes}")
        check(decisions[0].within_limits == (admitted < RANDOM_QUOTA), f"call {admitted + 1} of {RANDOM_QUOTA}")
        if decisions[0].within_limits:
            admitted += 1
            for write in writes:
                if write.data is not KEEP:
                    live.pop((write.collection, write.name), None)
                if isinstance(write.data, bytes):
                    live[write.collection, write.name] = Value(write.data, now, now + write.ttl)
        expected = live
        for collection in RANDOM_COLLECTIONS[:2]:
            own = {name: value for (other, name), value in live.items() if other == collection}
            check(store.list_values(collection, now) == own, f"the values of {collection.name} differ at {now}")
        for name in "abc":
            found = store.get_value(RANDOM_COLLECTIONS[2], name, now)
            check(found == live.get((RANDOM_COLLECTIONS[2], name)), f"the value {name} differs at {now}: {found}")


RANDOM_QUOTA: Final = 90
RANDOM_POLICY: Final = Policy("kit-random", (Limit(RANDOM_QUOTA, "365d", "fixed_window"),))
RANDOM_COLLECTIONS: Final = tuple(
    Collection(name, ("kit-random", "k"), listed) for name, listed in (("one", True), ("two", True), ("three", False))
)


def random_write(random: Random) -> Write:
    """Return a write of one of few values."""
    expected: bytes | Anything | None = random.choice((ANYTHING, ANYTHING, None, b"0", b"1"))
    data = random.choice((None, b"0", b"1", b"1", KEEP))
    ttl = random.choice((1, SECOND, 30 * SECOND, HOUR))
    return Write(random.choice(RANDOM_COLLECTIONS), random.choice("abc"), data, ttl, expected)


def charge(store: Store, now: int, *writes: Write) -> list[Decision]:
    """Charge one permit and write values."""
    decisions = store.apply("hold", ((POLICY, "k", (1, 1)),), now, None, writes)
    check(decisions[0].within_limits, "a call with writes that fits was denied")
    return decisions


def data_of(value: Value | None) -> bytes | None:
    """Return the bytes of a value."""
    return None if value is None else value.data


def expect_conflict(store: Store, write: Write, now: int, found: bytes | None, *, charged: bool = False) -> None:
    """Check that a write is refused, and which value the error has."""
    asks = ((POLICY, "k", (1, 1)),) if charged else ()
    try:
        store.apply("acquire", asks, now, None, (write,))
    except ValueConflict as conflict:
        check(data_of(conflict.found) == found, f"the conflict has {conflict.found} in place of {found!r}")
    else:
        check(holds=False, message=f"{write} was written though the stored value is {found!r}")


def refused(call: Callable[[], object], error: type[RateLimitError], message: str) -> None:
    """Check that a call raises this error."""
    try:
        call()
    except error:
        return
    check(holds=False, message=message)


VALUE_GUARANTEES: Final[tuple[Callable[[Store], None], ...]] = (
    values_are_read_as_written,
    a_value_ends_at_its_time_to_live,
    conditions_are_checked,
    a_charge_and_its_values_are_one_step,
    a_condition_alone_changes_nothing,
    of_several_writes_all_are_made_or_none,
    a_collection_is_listed,
    a_listed_collection_is_bounded,
    wrong_values_are_refused,
    one_of_many_threads_writes_first,
    tasks_write_values_too,
    random_steps_are_those_of_a_dictionary,
)
