"""Creating, migrating and rejecting schemas, and reading states with SQL."""

import datetime as dt

import pytest

from tests.cases import cases
from tidegate import ConfigError, Limit, Policy, StoreUnavailable
from tidegate.stores.postgres import PostgresStore
from tidegate.stores.postgres.schema import read_schema

TEN = Policy("p", (Limit(10, "1d", "fixed_window"), Limit(10, "1d", "sliding_log", name="log")))
ONE = (1, 1)
NOON = dt.datetime(2025, 6, 15, 12, tzinfo=dt.UTC)
NOW = int(NOON.timestamp()) * 1_000_000


def test_an_older_schema_is_migrated_and_keeps_its_charges(open_store, schema, sql):
    latest = read_schema(schema)
    before, _, rest = latest.core.partition("-- Decide one call as `apply` does, and write values")
    _, _, after = rest.partition("-- The live states of a key")
    older = latest._replace(steps=latest.steps[:1], views="", core=f"{before}-- An older core{after}")
    old = open_store()
    old.schema = older
    assert old.apply_one("acquire", TEN, "k", ONE).remaining == 9
    assert sql("select version from tidegate.schema_version").fetchone() == (1,)
    new = open_store()
    assert new.apply_one("acquire", TEN, "k", ONE).remaining == 8
    assert sql("select version from tidegate.schema_version").fetchone() == (len(latest.steps),)
    assert sql("select request_count from tidegate.rate_limiter_state").fetchone() == (2,)
    assert old.apply_one("acquire", TEN, "k", ONE).remaining == 7  # an older process continues to work


def test_a_newer_schema_is_rejected(open_store, schema, sql):
    open_store().apply_one("acquire", TEN, "k", ONE)
    sql("update tidegate.schema_version set version = 99")
    with pytest.raises(
        StoreUnavailable, match="version 99, from a newer tidegate; this tidegate supports version 3: upgrade it"
    ):
        open_store().apply_one("acquire", TEN, "k", ONE)


def test_a_failed_migration_creates_nothing(open_store, schema, sql):
    broken = open_store()
    broken.schema = broken.schema._replace(core=broken.schema.core + "\nselect 1 / 0;\n")
    with pytest.raises(StoreUnavailable, match=f"could not create or migrate its schema '{schema}': division by zero"):
        broken.apply_one("acquire", TEN, "k", ONE)
    assert sql("select to_regnamespace(%s)", schema).fetchone() == (None,)
    assert open_store().apply_one("acquire", TEN, "k", ONE)


def test_the_error_of_a_role_without_create_says_what_to_do(server, open_store, schema, sql):
    sql("drop role if exists guest")
    sql("create role guest login password 'guest'")
    url = server.url.replace(f"tide:{server.password}", "guest:guest")
    guest = PostgresStore(url, schema=schema, timeout=10)
    with pytest.raises(StoreUnavailable, match=r"permission denied.*; let the owner of the database grant CREATE"):
        guest.apply_one("acquire", TEN, "k", ONE)
    open_store().apply_one("acquire", TEN, "k", ONE)
    for grant in (  # as docs/stores-postgres.md shows
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


@cases("name", ["", "Big", "a b", 'a"b', "a;drop", "pg_x", "x" * 64, "1a"])
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
