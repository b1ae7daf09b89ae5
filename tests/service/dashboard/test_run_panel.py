"""The panel and the metrics of runs: bounded by nodes, depth and age, and read at most once a second."""

import pytest

from tidegate.agents import AsyncRun
from tidegate.observe._text_format import write_families
from tidegate.service._dashboard.run_panel import MAX_NODES, RunPanel
from tidegate.stores import open_store
from tidegate.testing import ManualClock


@pytest.fixture
def store():
    return open_store("memory://", clock=ManualClock(start=1_800_000_000))


async def test_there_is_nothing_to_show_without_runs(store):
    assert await RunPanel(store)() is None


async def test_trees_are_rows_and_deep_nodes_have_no_metrics(store):
    run = await AsyncRun("r", store=store, limits=["1/run unit=usd", "9/run"], ttl=100)
    node = run
    for name in ("a", "b", "c"):
        node = await node.child(name, limits=["5/run"])
    await node.charge({"usd": "0.25"})
    panel = RunPanel(store)
    rows = await panel()
    assert [(row["name"], row["depth"], row["limit"], row["used"]) for row in rows] == [
        ("r", 0, "usd_micros-run", 250_000),
        ("r", 0, "requests-run", 1),
        ("a", 1, "requests-run", 1),
        ("b", 2, "requests-run", 1),
        ("c", 3, "requests-run", 1),
    ]
    assert rows[0]["ends_in"] == 100
    text = write_families(await panel.families()).decode()
    assert f'tidegate_run_used{{run="{run.id}",node="r/a/b",id="' in text
    assert 'node="r/a/b/c"' not in text
    assert "tidegate_run_quota{" in text
    await run.stop()
    assert (await panel())[0]["state"] == "open", "at most one reading a second"
    store.clock.advance(1)
    assert (await panel())[0]["state"] == "stopped"
    await run.close()
    store.clock.advance(1)
    assert await panel() is None


async def test_old_runs_have_no_metrics(store):
    run = await AsyncRun("r", store=store, limits="9/run", ttl=5 * 86_400)
    panel = RunPanel(store)
    assert b"tidegate_run_quota{" in write_families(await panel.families())
    store.clock.advance(86_401)
    assert b"tidegate_run_quota{" not in write_families(await panel.families())
    assert (await panel())[0]["id"] == run.id


async def test_a_wide_tree_is_cut(store):
    run = await AsyncRun("r", store=store, limits="9/run")
    for number in range(MAX_NODES + 5):
        await run.child(f"c{number}")
    rows = await RunPanel(store)()
    assert len(rows) == MAX_NODES + 1
    assert rows[-1]["more"] == 6
