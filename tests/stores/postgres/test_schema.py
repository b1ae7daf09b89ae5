"""Creating and rejecting schemas, functions of several versions, and reading states with SQL."""

import datetime as dt
import hashlib

import pytest

from tests.cases import cases
from tests.servers.process import until
from tests.stores.postgres.conftest import drop_schemas
from tidegate import ConfigError, Limit, Policy, StoreUnavailable
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.schema import FUNCTIONS_VERSION, MARKER, TABLES_VERSION, read_schema

TEN = Policy("p", (Limit(10, "1d", "fixed_window"), Limit(10, "1d", "sliding_log", name="log")))
ONE = (1, 1)
NOON = dt.datetime(2025, 6, 15, 12, tzinfo=dt.UTC)
NOW = int(NOON.timestamp()) * 1_000_000


def other_version(open_store, version):
    """Open a store as another version of tidegate, whose functions differ in a comment."""
    store = open_store()
    store.schema = store.schema._replace(core=f"{store.schema.core}-- version {version}", version=version)
    return store


def function_schemas(sql, schema):
    rows = sql("select nspname from pg_namespace where nspname ~ %s order by 1", f"^{schema}_v[0-9]+$").fetchall()
    return [name for (name,) in rows]


def test_two_versions_share_the_tables_and_each_calls_its_own_functions(open_store, schema, sql):
    newest = FUNCTIONS_VERSION
    old, new = other_version(open_store, newest - 1), open_store()
    assert old.apply_one("acquire", TEN, "k", ONE).remaining == 9
    assert new.apply_one("acquire", TEN, "k", ONE).remaining == 8
    assert function_schemas(sql, schema) == [f"{schema}_v{newest - 1}", f"{schema}_v{newest}"]
    sql(f'drop schema "{schema}_v{newest}" cascade')
    assert old.apply_one("acquire", TEN, "k", ONE).remaining == 7
    with pytest.raises(StoreUnavailable, match="does not exist"):
        new.apply_one("acquire", TEN, "k", ONE)
    assert sql("select request_count from tidegate.rate_limiter_state").fetchone() == (3,)


@pytest.mark.parametrize("version", [3, 99])
def test_tables_of_another_version_are_rejected(open_store, sql, version):
    open_store().apply_one("acquire", TEN, "k", ONE)
    sql("update tidegate.schema_version set version = %s", version)
    age = "a newer" if version == 99 else "an older"
    with pytest.raises(
        StoreUnavailable,
        match=f"version {version}, from {age} tidegate; this tidegate supports version {TABLES_VERSION}: ",
    ):
        open_store().apply_one("acquire", TEN, "k", ONE)


def test_the_version_of_the_functions_is_raised_with_each_change():
    """Processes of two versions must not use the same functions; those of an earlier one are never replaced."""
    digest = hashlib.sha256(read_schema().core.encode()).hexdigest()[:12]
    assert (FUNCTIONS_VERSION, digest) == (4, "e74ea670a4c6"), "raise FUNCTIONS_VERSION, and update this test"


def test_unused_functions_of_older_versions_are_dropped_and_nothing_else(open_store, schema, sql):
    store = open_store()
    store.schema = store.schema._replace(version=10)
    assert store.apply_one("acquire", TEN, "k", ONE)
    for version in (2, 9, 11):
        other = other_version(open_store, version)
        assert other.apply_one("acquire", TEN, "k", ONE)
        other.close()
    used = other_version(open_store, 8)
    assert used.apply_one("acquire", TEN, "k", ONE)
    sql(f'create schema "{schema}_v3"')  # not of tidegate: it has no mark
    sql(f'create schema "{schema}_v4x"; comment on schema "{schema}_v4x" is %s'.replace("%s", f"'{MARKER}'"))
    until(lambda: sum(store.outdated().values()) == 1, "the end of the closed sessions")
    found = {f"{schema}_v2": False, f"{schema}_v8": True, f"{schema}_v9": False}
    assert store.outdated() == store.outdated(drop=True) == found
    assert store.outdated() == {f"{schema}_v8": True}
    assert set(function_schemas(sql, schema)) == {f"{schema}_v{version}" for version in (3, 8, 10, 11)}
    assert used.apply_one("acquire", TEN, "k", ONE).remaining == 4
    assert store.apply_one("acquire", TEN, "k", ONE).remaining == 3
    assert other_version(open_store, 9).apply_one("acquire", TEN, "k", ONE).remaining == 2  # creates them again
    sql(f'drop schema "{schema}_v4x"')


def test_functions_beside_which_someone_keeps_a_table_are_not_dropped(open_store, schema, sql):
    old = other_version(open_store, 1)
    assert old.apply_one("acquire", TEN, "k", ONE)
    old.close()
    sql(f'create table "{schema}_v1".mine (a int)')
    store = open_store()
    store.schema = store.schema._replace(version=2)
    until(lambda: not any(store.outdated().values()), "the end of the session")
    with pytest.raises(StoreUnavailable, match=r"drop functions of older versions: cannot drop schema"):
        store.outdated(drop=True)
    assert sql("select to_regproc(%s) is not null", f"{schema}_v1.apply").fetchone() == (True,)
    assert store.apply_one("acquire", TEN, "k", ONE)


HOSTILE = """
create schema if not exists hostile;
create or replace function hostile.hashtextextended(text, bigint) returns bigint language sql as 'select 1 / 0::bigint';
create or replace function hostile.cardinality(text[]) returns int language sql as 'select 1 / 0';
create or replace function hostile.hash(text, text) returns bigint language sql as 'select 1 / 0::bigint';
create table if not exists hostile.keys (policy text);
alter role tide set search_path = hostile, public, pg_catalog;
"""


def test_a_search_path_of_the_role_changes_nothing(open_store, schema, sql):
    sql(HOSTILE)
    try:
        store = open_store()
        assert store.apply_one("acquire", TEN, "k", ONE).remaining == 9
        store.apply_one("acquire", TEN, "gone", ONE, 1)
        sql("set search_path = hostile, pg_catalog")
        assert sql(f'select "{store.schema.functions}".delete_expired(10)').fetchone() == (1,)
        assert sql("select request_count from tidegate.rate_limiter_state").fetchall() == [(1,)]
        assert store.apply_one("acquire", TEN, "k", ONE).remaining == 8
    finally:
        sql("alter role tide reset search_path")
        sql("drop schema hostile cascade")


@cases("name", ["select", "user", "order", "_", "x" * 50])
def test_schema_names_are_quoted(server, sql, name):
    store = PostgresStore(server.url, schema=name, timeout=10, connect_timeout=10)
    try:
        assert store.apply_one("acquire", TEN, "k", ONE).remaining == 9
        assert store.outdated(drop=True) == {}
        names = [name, f"{name}_v{FUNCTIONS_VERSION}"]
        query = "select count(*) from pg_namespace where nspname = any(%s)"
        assert sql(query, names).fetchone() == (2,)
    finally:
        store.close()
        drop_schemas(sql, name)


def test_a_failed_migration_creates_nothing(open_store, schema, sql):
    broken = open_store()
    broken.schema = broken.schema._replace(core=broken.schema.core + "\nselect 1 / 0;\n")
    with pytest.raises(StoreUnavailable, match=f"could not create its schema '{schema}': division by zero"):
        broken.apply_one("acquire", TEN, "k", ONE)
    assert sql("select to_regnamespace(%s)", schema).fetchone() == (None,)
    assert function_schemas(sql, schema) == []
    assert open_store().apply_one("acquire", TEN, "k", ONE)


def test_the_error_of_a_role_without_create_says_what_to_do(server, open_store, schema, sql):
    sql("drop role if exists guest")
    sql("create role guest login password 'guest'")
    url = server.url.replace(f"tide:{server.password}", "guest:guest")
    guest = PostgresStore(url, schema=schema, timeout=10)
    with pytest.raises(StoreUnavailable, match=r"permission denied.*; let its owner grant CREATE on it"):
        guest.apply_one("acquire", TEN, "k", ONE)
    open_store().apply_one("acquire", TEN, "k", ONE)
    for grant in (  # as docs/reference/stores-postgres.md shows
        f'grant usage on schema "{schema}" to guest',
        f'grant select, insert, update, delete on all tables in schema "{schema}" to guest',
        f'grant usage on all sequences in schema "{schema}" to guest',
    ):
        sql(grant)
    assert guest.apply_one("acquire", TEN, "k", ONE).remaining == 8
    guest.close()
    sql("drop owned by guest")
    sql("drop role guest")


@pytest.mark.parametrize(("unlogged", "kind"), [(False, "p"), (True, "u")])
def test_tables_are_logged_by_default(open_store, schema, sql, unlogged, kind):
    open_store(unlogged=unlogged).apply_one("acquire", TEN, "k", ONE)
    query = "select relname, relpersistence from pg_class where relnamespace = %s::regnamespace and relkind = 'r'"
    kinds = dict(sql(query, schema).fetchall())
    assert (kinds["keys"], kinds["log"]) == (kind, kind)


@cases("name", ["", "Big", "a b", 'a"b', "a;drop", "pg_x", "x" * 51, "1a", "a_v1"])
def test_invalid_schema_names_raise_config_error(name):
    with pytest.raises(ConfigError, match="lower-case letters, digits and _"):
        read_schema(name)


def test_states_are_read_with_plain_sql(open_store, sql):
    store = open_store()
    limits = (
        Limit(300, "1m", "fixed_window"),
        Limit(100, "1h", "token_bucket"),
        Limit(500, "1d", "sliding_log"),
        Limit(2000, "1w", "sliding_log"),
        Limit(7500, "month", "calendar_window"),
        Limit(50, "10s", "sliding_window"),
    )
    policy = Policy("provider", limits)
    second = 1_000_000
    store.apply_one("acquire", policy, "financialmodelingprep.com", (2,) * 6, NOW)
    store.apply_one("acquire", policy, "financialmodelingprep.com", (1,) * 6, NOW + 12 * second)

    def rows(query):
        return sql(query.replace("FROM ", "FROM tidegate.")).fetchall()

    def at(seconds):
        return NOON + dt.timedelta(seconds=seconds)

    assert rows("SELECT domain, request_count, window_start, updated_at FROM rate_limiter_state") == [
        ("financialmodelingprep.com", 3, at(0), at(12))
    ]
    day, month = 86_400, dt.datetime(2025, 6, 1, tzinfo=dt.UTC)
    assert rows("SELECT time_period, current_count, window_start, window_end, last_updated FROM rate_limits") == [
        ("minute", 3, at(0), at(60), at(12)),
        ("hour", 3, at(12), at(108), at(12)),
        ("day", 3, at(0), at(12 + day), at(12)),
        ("week", 3, at(0), at(12 + 7 * day), at(12)),
        ("month", 3, month, month.replace(month=7), at(12)),
        ("10s", 3, at(10), at(20), at(12)),
    ]
    assert rows("SELECT id, completed_at, task_type, task_id FROM task_completions ORDER BY id") == [
        (1, at(0), None, None),
        (2, at(0), None, None),
        (3, at(12), None, None),
    ]
    store.apply_one("reset", policy, "financialmodelingprep.com", (0,) * 6, NOW)
    assert rows("SELECT domain FROM rate_limiter_state") == rows("SELECT id FROM task_completions") == []


def test_the_views_show_no_policies_of_tidegate_itself(open_store, sql):
    store = open_store()
    for name in ("tidegate.probe", "tidegate.capacity:x", "tidegates"):
        store.apply_one("acquire", Policy(name, (Limit(5, "1m", "fixed_window"),)), name, (1,), NOW)
    assert sql("select domain from tidegate.rate_limiter_state").fetchall() == [("tidegates",)]
    assert sql("select count(*) from tidegate.rate_limits").fetchone() == (1,)


def test_rows_of_a_budget_have_its_name_and_its_tiers(open_store, sql):
    names = ("day", "day:tokens", "day<1")
    policy = Policy("budget:embeddings", tuple(Limit(5, "1d", "sliding_log", name=name) for name in names))
    open_store().apply_one("acquire", policy, "tasks", (1, 2, 1), NOW)
    assert sql("select budget, time_period, current_count from tidegate.rate_limits").fetchall() == [
        ("embeddings", "day", 1),
        ("embeddings", "day:tokens", 2),
    ]


def test_the_window_of_a_log_is_that_of_its_counted_permits(open_store, sql):
    """From the oldest one until the newest leaves; a margin shows in the end, and not in the period."""
    store = open_store()
    policy = Policy("provider:fmp", (Limit(300, "1m", "sliding_log", margin=300_000),))
    for seconds in (0, 30, 65):
        store.apply_one("acquire", policy, "fmp.example", (1,), NOW + seconds * 1_000_000)
    row = sql("select time_period, current_count, window_start, window_end from tidegate.rate_limits").fetchone()
    assert row == ("minute", 2, NOON + dt.timedelta(seconds=30), NOON + dt.timedelta(seconds=125.3))
    assert sql("select period from tidegate.states").fetchone() == ("1m",)
    store.apply_one("adjust", policy, "fmp.example", (-1,), NOW + 70_000_000, NOW + 65_000_000)
    row = sql("select current_count, window_start, window_end from tidegate.rate_limits").fetchone()
    assert row == (1, NOON + dt.timedelta(seconds=30), NOON + dt.timedelta(seconds=90.3))
