"""The port in PL/pgSQL answers as the core does and keeps what it keeps; and this would be noticed if it did not."""

import os
from itertools import chain, islice
from pathlib import Path

import psycopg
import pytest

import tidegate.stores.postgres
from tests.conformance.changes import changing_history, directed_histories
from tests.stores.postgres.comparison import first_difference
from tests.stores.postgres.conftest import asking
from tests.stores.postgres.faults import FAULTS
from tests.stores.postgres.histories import DIRECTED
from tidegate.core import bucket, log, sliding, state, windows
from tidegate.errors import StoreUnavailable
from tidegate.stores.postgres import PostgresStore
from tidegate.stores.postgres.call import MISSING, decisions_of
from tidegate.stores.postgres.io_flow import SYSTEM_CLOCK, ThreadCaller, drive
from tidegate.testing import ReferenceStore, random_vectors, verify_store
from tidegate.testing.reference import answer_of

CORE = Path(tidegate.stores.postgres.__file__).with_name("core.sql").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def place(server):
    """Share a schema among these tests, since creating one takes longer than most of them; and ask it."""
    name = f"conformance{os.getpid()}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield name, asking(connection, name)
        connection.execute(f'drop schema "{name}" cascade')


@pytest.fixture
def empty(server, place):
    """Open stores that find nothing of what those before have kept."""
    schema, sql = place
    opened = []

    def opening():
        if sql("select to_regclass(%s)", f"{schema}.keys").fetchone()[0] is not None:
            sql("delete from tidegate.keys; delete from tidegate.log")
        opened.append(PostgresStore(server.url, schema=schema, timeout=10, connect_timeout=10))
        return opened[-1]

    yield opening
    for store in opened:
        store.close()


def test_it_is_a_store(empty):
    verify_store(empty)


@pytest.mark.parametrize("seed", range(6))
def test_answers_and_stored_states_are_those_of_the_core(empty, place, seed):
    assert first_difference(empty(), place[1], random_vectors(1000 + seed, 240)) is None


@pytest.mark.parametrize("seed", range(12))
def test_so_they_are_for_a_limit_that_changes(empty, place, seed):
    assert first_difference(empty(), place[1], changing_history(seed)) is None


def test_so_they_are_where_a_change_is_seldom_met(empty, place):
    assert {first_difference(empty(), place[1], vectors) for vectors in directed_histories()} == {None}


def test_so_they_are_where_random_histories_seldom_go(empty, place):
    store = empty()
    assert [first_difference(store, place[1], vectors) for vectors in DIRECTED] == [None] * len(DIRECTED)


@pytest.mark.parametrize("seed", range(4))
def test_calls_that_go_together_are_decided_one_after_another(empty, seed):
    store, model = empty(), ReferenceStore()
    for vectors in batched(random_vectors(2000 + seed, 240), 7):
        calls = [store._worded(verb, asks, now, at, now) for verb, asks, now, at, _ in vectors]  # noqa: SLF001 - to choose who goes together
        caller = ThreadCaller()
        connection = drive(store._pool.taking(calls[0], caller))  # noqa: SLF001 - as above
        assert connection is not None
        result = drive(connection.calling("apply", store._parameters(calls), SYSTEM_CLOCK.steady() + 10_000_000))  # noqa: SLF001 - as above
        store._pool.give(caller)  # noqa: SLF001 - as above
        numbers = [int(number) for number in result.get_value(0, 0)[1:-1].split(b",")]
        for call, (verb, asks, now, at, _) in zip(calls, vectors, strict=True):
            numbers = call.take(numbers)
            answer, instant, *views = call.answered()
            if answer == MISSING:
                return  # a calendar window that the clock has stepped back from: asked for again, and so not in order
            decisions = decisions_of(asks, answer == 1, instant, views)
            assert tuple(map(answer_of, decisions)) == model.apply(verb, asks, now, at)
        assert numbers == []


def batched(items, size):
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


def test_functions_stand_in_the_order_of_the_core():
    """The same names in the same order, so that the two can be read side by side."""
    modules = (state, bucket, windows, sliding, log)
    code = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in modules)
    ours = [line.split("(")[0].split(".")[1] for line in CORE.splitlines() if line.startswith("create or replace")]
    theirs = [line[4:].split("(")[0] for line in code.splitlines() if line.startswith("def ")]
    theirs = [name for name in theirs if name not in ("marked", "_owner")]  # shapes of Python's states
    assert [name for name in ours if name in theirs and name != "adjust"] == theirs


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_noticed(empty, place, fault):
    assert CORE.count(fault.right) >= 1, "the core has changed: plant this fault anew"

    def faulty():
        store = empty()
        wrong = store.schema.core.replace(placed(fault.right, store), placed(fault.wrong, store), 1)
        assert wrong != store.schema.core
        store.schema = store.schema._replace(core=wrong)
        return store

    histories = chain(
        [chain(*DIRECTED)],
        directed_histories(),
        map(changing_history, range(8)),
        (random_vectors(seed, 240) for seed in range(fault.seed, fault.seed + 16)),
    )
    assert any(differs(faulty(), place[1], vectors) for vectors in histories)


def differs(store, sql, vectors):
    try:
        return first_difference(store, sql, vectors) is not None
    except StoreUnavailable as error:
        return "could not create" not in str(error)  # the fault broke something, at the time it mattered


def placed(text, store):
    return text.replace("tidegate.", f'"{store.schema.name}".')
