"""Runs: what a node denies and says, stop, end, extension, several threads and processes, and calls that crash."""

import asyncio
import pickle
import threading
from contextlib import suppress

import pytest

from tidegate import AsyncLimiter, ConfigError, Denied, Limiter, StoreUnavailable
from tidegate.agents import AsyncRun, Run, RunDenied, RunEndedError, current_run


def test_a_call_is_charged_to_its_node_and_all_above_before_it_is_sent(store):
    with Run("research", store=store, limits=["0.20/run unit=usd", "9/run"]) as run:
        planner = run.child("planner", limits=["0.05/run unit=usd"])
        tool = planner.child("tool")
        with tool.reserve({"usd": "0.01"}) as call:
            assert [node.used["usd_micros"] for _, node in run.usage().walk()] == [10_000] * 3
            call.commit({"usd": "0.0072"})
        assert [node.used for _, node in run.usage().walk()] == [{"usd_micros": 7_200, "requests": 1}] * 3
        with pytest.raises(ZeroDivisionError), tool.reserve({"usd": "0.01"}):
            raise ZeroDivisionError
        assert run.usage().used == {"usd_micros": 7_200, "requests": 1}


def test_a_denial_names_the_node_the_limit_and_what_is_left(store):
    with Run("research", store=store, limits=["0.20/run unit=usd"]) as run:
        planner = run.child("planner", limits=["0.05/run unit=usd", "2/run"])
        planner.charge({"usd": "0.04"})
        with pytest.raises(Denied) as caught:
            planner.charge({"usd": "0.02"})
        denied = caught.value
        assert denied.node == "research/planner"
        assert denied.limit == "usd_micros-run"
        assert denied.left == {
            "research/planner": {"usd_micros-run": 10_000, "requests-run": 1},
            "research": {"usd_micros-run": 160_000},
        }
        assert denied.decision.retry_after is None, "a limit per run never refills"
        assert "usd_micros-run has 10000 of 50000 usd_micros left, and the call needs 20000" in str(denied)
        copy = pickle.loads(pickle.dumps(denied))  # noqa: S301 - our own
        assert (copy.node, copy.limit, copy.left, str(copy)) == (denied.node, denied.limit, denied.left, str(denied))
        run.charge({"usd": "0.16"})
        with pytest.raises(RunDenied) as caught:
            planner.charge({"usd": "0.01"})
        assert caught.value.node == "research"
        assert run.usage().used["usd_micros"] == 200_000, "a denied call is charged nowhere"


def test_a_run_never_refills_and_ends_exactly(store, clock):
    run = Run("r", store=store, limits="3/run", ttl=100, clock=clock)
    child = run.child("c", ttl=40)
    run.charge(3)
    clock.advance(39.999_999)
    with pytest.raises(RunDenied, match="0 of 3 requests left"):
        child.charge()
    run.extend({"requests": 5})
    child.charge()
    clock.advance(0.000_001)
    with pytest.raises(RunDenied, match="the run r/c has ended"):
        child.charge()
    clock.advance(59.999_999)
    run.charge()
    clock.advance(0.000_001)
    with pytest.raises(RunDenied, match="the run r has ended"):
        run.charge()
    with pytest.raises(RunDenied, match="it cannot be extended"):
        run.extend({"requests": 5}, ttl=60)
    assert run.usage().status == "ended"
    assert run.usage().used == {"requests": 5}, "usage is shown after the end"


def test_an_extension_keeps_usage_beyond_the_former_end(store, clock):
    run = Run("r", store=store, limits="3/run", ttl=10, clock=clock)
    run.charge(3)
    run.extend(ttl=8 * 86_400)
    clock.advance(8 * 86_400 - 1)
    with pytest.raises(RunDenied, match="0 of 3 requests left"):
        run.charge()
    assert run.usage().used == {"requests": 3}


def test_a_stop_is_read_in_the_step_of_the_next_call(store):
    run = Run("r", store=store, limits="9/run")
    child = run.child("a").child("b")
    other = Run.join(child.token(), store=store)
    other.charge()
    held = other.reserve()
    run.stop()
    for node in (other, child, run):
        with pytest.raises(RunDenied) as caught:
            node.charge()
        assert caught.value.node == "r"
        assert caught.value.limit == "stopped"
    held.commit()  # what was charged before is settled
    assert run.usage().status == "stopped"
    assert run.usage().used == {"requests": 2}
    with pytest.raises(RunDenied, match="is stopped"):
        run.extend({"requests": 1})
    with pytest.raises(RunDenied, match="was stopped"):
        run.child("late")


def test_a_run_that_the_store_has_lost_denies(store):
    run = Run("r", store=store, limits="9/run")
    child = run.child("a")
    store.delete_value(run._node().collection, run.id)  # noqa: SLF001 - as an eviction would
    with pytest.raises(RunDenied, match="unknown") as caught:
        child.charge()
    assert caught.value.limit == "unknown"
    with pytest.raises(RunEndedError):
        Run.join(child.token(), store=store)


def test_rates_and_slots_of_a_node_hold_too(store, clock):
    run = Run("r", store=store, limits=["2/10s", "1/1m concurrency name=slots unit=concurrent-requests"], clock=clock)
    with run.reserve({"requests": 1, "concurrent-requests": 1}):
        with pytest.raises(RunDenied, match="try again in 60 s") as caught:
            run.reserve({"requests": 1, "concurrent-requests": 1})
        assert caught.value.limit == "slots"
    run.reserve({"requests": 1, "concurrent-requests": 1}).commit()
    with pytest.raises(RunDenied, match="try again in 5 s"):
        run.charge()


def test_a_team_is_charged_in_the_same_step(store):
    team = Limiter("30000/1d fixed_window unit=usd_micros", store=store, name="team")
    run = Run("r", store=store, limits="1/run unit=usd", parent=(team, "red"))
    with run.child("c").reserve({"usd": "0.02"}) as call:
        assert team.usage("red")["usd_micros-1d"].used == 20_000
        call.commit({"usd": "0.015"})
    assert team.usage("red")["usd_micros-1d"].used == 15_000
    with pytest.raises(RunDenied, match="team denied it") as caught:
        run.charge({"usd": "0.02"})
    assert caught.value.node == "team"
    assert run.usage().used["usd_micros"] == 15_000


def test_the_first_of_several_costs_that_fits_is_charged(store):
    run = Run("r", store=store, limits=["100/run unit=tokens", "0.10/run unit=usd"])
    costs = [{"tokens": 60}, {"usd": "0.07"}]
    assert [run.reserve_first(costs).chosen for _ in range(2)] == [0, 1]
    with pytest.raises(RunDenied):
        run.reserve_first(costs)
    assert run.usage().used == {"tokens": 60, "usd_micros": 70_000, "requests": 2}


def test_threads_charge_exactly_what_fits(store):
    run = Run("r", store=store, limits="40/run")
    children = [run.child(f"c{number}", limits="15/run") for number in range(4)]
    admitted = []

    def work(child):
        for _ in range(20):
            try:
                with child.reserve() as call:
                    call.commit()
            except RunDenied:
                continue
            admitted.append(child)

    threads = [threading.Thread(target=work, args=(child,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 40
    assert max(admitted.count(child) for child in children) <= 15


async def test_tasks_have_the_same_methods(store):
    async with AsyncRun("r", store=store, limits="6/run") as run:
        assert current_run() is run
        child = await run.child("c", limits="2/run")
        await asyncio.gather(child.charge(), child.charge())
        with pytest.raises(RunDenied, match="r/c denied it"):
            await child.charge()
        async with await run.reserve(2) as call:
            await call.cancel()
        joined = await AsyncRun.join(await run.token(), store=store)
        await joined.charge()
        await run.extend({"requests": 1})
        assert (await run.usage()).limits["requests-run"].remaining == 4
        await run.stop()
        with pytest.raises(RunDenied):
            await joined.charge()
    assert current_run() is None


async def test_the_charge_of_a_cancelled_task_is_refunded(store):
    run = await AsyncRun("r", store=store, limits="50/run")
    tasks = [asyncio.ensure_future(run.reserve()) for _ in range(20)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    received = sum(not isinstance(each, BaseException) for each in found)
    for _ in range(500):
        if (await run.usage()).used.get("requests", 0) == received:
            break
        await asyncio.sleep(0.01)  # the refund is made in the background, in real time
    assert (await run.usage()).used.get("requests", 0) == received


def test_the_current_run_is_that_of_the_innermost_block(memory):
    assert current_run() is None
    with Run("r", store=memory) as run:
        with run.child("c") as child:
            assert current_run() is child
        assert current_run() is run
        with pytest.raises(RunDenied, match="is closed"):
            child.charge()
        run.charge()
    with pytest.raises(RunDenied, match="r is closed"):
        run.charge()


def test_what_a_lost_store_decides(tmp_path):
    run = Run("r", store="sqlite:///" + str(tmp_path / "runs.db"), limits="5/run")
    run.charge()
    (tmp_path / "runs.db").unlink()
    with pytest.raises((StoreUnavailable, RunDenied)):
        run.charge()
    with suppress(StoreUnavailable, RunDenied):
        run.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": "5/run unit=usd burst=3"}, "unexpected 'burst=3'"),
        ({"limits": "0/run"}, "at least one"),
        ({"limits": "1.5/run"}, "must be an integer of requests"),
        ({"limits": ["5/run", "6/run"]}, "two limits are named 'requests-run'"),
        ({"limits": 5}, "expected limits such as"),
        ({"ttl": 0}, "at most 366 days"),
        ({"parent": "red"}, "a limiter and a key"),
        ({"parent": (Limiter("1/1s"), "red")}, "on the same Store object"),
    ],
)
def test_wrong_options_are_refused(memory, options, message):
    with pytest.raises(ConfigError, match=message):
        Run("r", store=memory, **options)


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 201, None])
def test_wrong_names_are_refused(memory, name):
    with pytest.raises(ConfigError, match="1 to 200 characters"):
        Run(name, store=memory)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"token": 1}, "no node of the run counts 'token'.*did you mean 'tokens'"),
        ({"tokens": 1.5}, "must be an integer of tokens"),
        ({"tokens": -1}, "must be a number of tokens"),
        ({"usd": "ten"}, "must be a number of usd"),
        ({"usd": float("nan")}, "must be a number of usd"),
        (True, "must be a number of requests"),
    ],
)
def test_wrong_costs_are_refused(memory, cost, message):
    run = Run("r", store=memory, limits=["9/run unit=tokens", "1/run unit=usd"])
    with pytest.raises(ConfigError, match=message):
        run.charge(cost)
    assert run.usage().used == {"tokens": 0, "usd_micros": 0, "requests": 0}


def test_parts_of_a_micro_are_rounded_up(memory):
    run = Run("r", store=memory, limits="1/run unit=usd")
    run.charge({"usd": "0.0000001"})
    run.charge({"usd": 0.1 + 0.2})
    assert run.usage().used["usd_micros"] == 1 + 300_001


def test_a_tree_has_a_bounded_depth(memory):
    run = Run("r", store=memory)
    for _ in range(15):
        run = run.child("c")
    with pytest.raises(ConfigError, match="at most 16 levels"):
        run.child("c")


def test_a_run_of_tasks_needs_a_store_object_that_it_can_share(memory):
    async def use():
        team = AsyncLimiter("5/1h", store=memory, name="team")
        run = await AsyncRun("r", store=memory, parent=(team, "red"))
        await run.charge()
        assert (await team.usage("red"))["1h"].used == 1

    asyncio.run(use())


def test_carve_outs_are_charged_once_and_returned_once(store, clock):
    run = Run("r", store=store, limits=["0.10/run unit=usd", "9/run"], clock=clock)
    part = run.child("part", carve={"usd": "0.06"}, ttl=60)
    with pytest.raises(RunDenied, match="r denied it"):
        run.charge({"usd": "0.05"})
    held = part.reserve({"usd": "0.02"})
    late = part.reserve({"usd": "0.01"})
    assert run.usage().used == {"usd_micros": 60_000, "requests": 2}
    held.commit({"usd": "0.015"})
    clock.advance(60)
    run.charge({"usd": "0.05"})  # the rest of the carve-out that ended is returned by the call that would be denied
    assert run.usage().used["usd_micros"] == 15_000 + 10_000 + 50_000
    late.commit({"usd": "0.004"})
    assert run.usage().used["usd_micros"] == 15_000 + 4_000 + 50_000, "settled where it counts now"
    part.close()
    assert run.usage().used["usd_micros"] == 69_000


def test_a_carve_out_below_a_node_is_returned_although_the_process_that_closed_the_node_was_killed(
    memory, clock, monkeypatch
):
    run = Run("r", store=memory, limits="0.10/run unit=usd", clock=clock)
    middle = run.child("middle")
    middle.child("part", carve={"usd": "0.06"}).charge({"usd": "0.01"})
    with monkeypatch.context() as killed:
        killed.setattr(memory, "list_values", killing)  # after the node was closed, before the rest is returned
        with pytest.raises(KeyboardInterrupt):
            middle.close()
    with pytest.raises(RunDenied, match="is closed"):
        middle.charge()
    run.charge({"usd": "0.09"})
    assert run.usage().used["usd_micros"] == 100_000


def killing(*_arguments):
    raise KeyboardInterrupt


def test_an_unsettled_call_stays_charged_at_its_estimate(store, clock):
    run = Run("r", store=store, limits="100/run unit=tokens", clock=clock)
    held = run.reserve({"tokens": 60}, ttl=30)
    clock.advance(31)
    held.commit({"tokens": 10})
    assert run.usage().used["tokens"] == 60


def test_runs_need_a_store_that_keeps_values(memory):
    memory.keeps_values = False
    with pytest.raises(ConfigError, match="keeps no values"):
        Run("r", store=memory)
