"""core.sql returns and stores the same as the Python core; the comparison finds inserted faults."""

import os
from itertools import chain, islice
from pathlib import Path

import psycopg
import pytest

from tests.cases import cases
from tests.conformance.changes import changing_history, directed_histories
from tests.seeds import seeds
from tests.stores.postgres.comparison import first_difference, use_core
from tests.stores.postgres.conftest import drop_schemas, query_function
from tests.stores.postgres.faults import FAULTS
from tests.stores.postgres.histories import DIRECTED
from tidegate._runtime.flow import run
from tidegate.core import _bucket as bucket
from tidegate.core import _log as log
from tidegate.core import _sliding as sliding
from tidegate.core import _state as state
from tidegate.core import _windows as windows
from tidegate.errors import StoreUnavailable
from tidegate.stores import _postgres
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.call import MISSING, decode_decisions
from tidegate.stores._postgres.io_flow import SYSTEM_CLOCK, Caller, perform
from tidegate.testing import ReferenceStore, random_vectors, verify_store
from tidegate.testing._reference import answer_of

CORE = Path(_postgres.__file__).with_name("core.sql").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shared_schema(server):
    """Return the name of a schema shared by these tests, since creating one is slow, and a query function."""
    name = f"conformance{os.getpid()}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        sql = query_function(connection, name)
        yield name, sql
        drop_schemas(sql, name)


@pytest.fixture
def open_empty(server, shared_schema):
    """Return a function that opens a store with empty tables."""
    schema, sql = shared_schema
    opened = []

    def open_store():
        if sql("select to_regclass(%s)", f"{schema}.keys").fetchone()[0] is not None:
            sql("delete from tidegate.keys; delete from tidegate.log; delete from tidegate.stored_values")
        opened.append(PostgresStore(server.url, schema=schema, timeout=10, connect_timeout=10))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


def test_postgres_store_passes_the_compatibility_kit(open_empty):
    verify_store(open_empty)


@pytest.mark.seeds
@cases("seed", seeds(10))
def test_answers_and_stored_states_are_those_of_the_core(open_empty, shared_schema, seed):
    assert first_difference(open_empty(), shared_schema[1], random_vectors(1000 + seed, 240, alternatives=True)) is None


@pytest.mark.seeds
@cases("seed", seeds(15))
def test_answers_and_states_of_a_changing_limit_are_those_of_the_core(open_empty, shared_schema, seed):
    assert first_difference(open_empty(), shared_schema[1], changing_history(seed)) is None


def test_answers_and_states_of_directed_changes_are_those_of_the_core(open_empty, shared_schema):
    assert {first_difference(open_empty(), shared_schema[1], vectors) for vectors in directed_histories()} == {None}


def test_answers_and_states_of_rare_histories_are_those_of_the_core(open_empty, shared_schema):
    store = open_empty()
    assert [first_difference(store, shared_schema[1], vectors) for vectors in DIRECTED] == [None] * len(DIRECTED)


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_one_statement_are_decided_one_after_another(open_empty, seed):
    store, model = open_empty(), ReferenceStore()
    for vectors in batched(random_vectors(2000 + seed, 240, alternatives=True), 7):
        calls = [store._encode_call(verb, asks, now, at, now) for verb, asks, now, at, _ in vectors]  # noqa: SLF001 - to choose the calls of a statement
        caller = Caller()
        connection = run(store._pool.acquire_flow(calls[0], caller), perform)  # noqa: SLF001 - as above
        assert connection is not None
        parameters = store._parameters(calls)  # noqa: SLF001 - as above
        result = run(connection.call_flow("apply", parameters, SYSTEM_CLOCK.steady() + 10_000_000), perform)
        store._pool.release(caller)  # noqa: SLF001 - as above
        numbers = [int(number) for number in result.get_value(0, 0)[1:-1].split(b",")]
        taken = 0
        for call, (verb, asks, now, at, _) in zip(calls, vectors, strict=True):
            taken = call.take_answers(numbers, taken)
            answers = call.result()
            if answers[-1][0] == MISSING:
                return  # a calendar window is missing: the call would be sent again, and so out of order
            groups = zip(call.groups, answers, strict=False)
            decisions = [decision for group, answer in groups for decision in decode_decisions(group, answer)]
            assert tuple(map(answer_of, decisions)) == model.apply(verb, asks, now, at)
        assert taken == len(numbers)


def batched(items, size):
    items = iter(items)
    while batch := list(islice(items, size)):
        yield batch


# For Python's states, for the format in which it stores them (`dump_`, `load_`), and short paths.
# `_reset` is one expression, which the ports write where it is needed.
ONLY_IN_PYTHON = ("marked", "_owner", "remaining_bucket", "retry_bucket", "_view_common", "_reset")


def test_functions_have_the_order_of_the_core():
    """The same names in the same order, so that the two can be read side by side."""
    modules = (state, bucket, windows, sliding, log)
    code = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in modules)
    ours = [line.split("(")[0].split()[2] for line in CORE.splitlines() if line.startswith("create function")]
    theirs = [line[4:].split("(")[0] for line in code.splitlines() if line.startswith("def ")]
    theirs = [name for name in theirs if name not in ONLY_IN_PYTHON and not name.startswith(("dump_", "load_"))]
    assert [name for name in ours if name in theirs and name != "adjust"] == theirs


@pytest.mark.slow
@cases("fault", FAULTS[::2])  # all take two minutes
def test_an_inserted_fault_is_found(open_empty, shared_schema, fault):
    assert CORE.count(fault.right) >= 1, "the core has changed: update this fault"

    def faulty():
        wrong = CORE.replace(fault.right, fault.wrong, 1)
        assert wrong != CORE
        return use_core(open_empty(), wrong)

    histories = chain(
        [chain(*DIRECTED)],
        directed_histories(),
        map(changing_history, range(8)),
        (random_vectors(seed, 240, alternatives=True) for seed in range(fault.seed, fault.seed + 16)),
    )
    assert any(differs(faulty(), shared_schema[1], vectors) for vectors in histories)


def differs(store, sql, vectors):
    try:
        return first_difference(store, sql, vectors) is not None
    except StoreUnavailable as error:
        return "could not create" not in str(error)  # the fault made a call fail
