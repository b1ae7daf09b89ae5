"""`on_store_error: local`, in virtual time: N processes never admit more than the limit together, whoever is cut off.

Over-admission counted: 0, by an oracle over the instants of all uses, in random schedules with lost questions, lost and
late answers, crashes, starts and departures.
"""

import os

import pytest

from tests.outage.simulation import World, excess
from tidegate import Limit, Policy
from tidegate.core.decision import LocalDecision
from tidegate.stores.outage.local_share import MAX_KEYS

LIMITS = [
    Limit(20, "10s"),
    Limit(60, "10s", burst=10),
    Limit(20, "7s", algorithm="sliding_log"),
    Limit(20, "7s", algorithm="fixed_window"),
    Limit(20, "7s", algorithm="sliding_window"),
    Limit(40, "minute", algorithm="calendar_window"),
]
SEEDS = int(os.environ.get("FAULT_SEEDS", "3"))


def local(limit):
    return Policy("p", (limit,), on_store_error="local")


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_no_schedule_exceeds_the_limit(limit, seed, caplog):
    caplog.set_level("CRITICAL")
    world = World(local(limit), seed, processes=1 + seed % 5)
    world.run(1500, busy=0.3, trouble=world.random.choice((0.003, 0.01, 0.03)))
    assert excess(limit, world.used) == 0
    assert world.used


def steady(limit, processes=3, seconds=220, **options):
    """Make a world in which everybody knows everybody, past the middle of a term."""
    world = World(local(limit), 1, processes, **options)
    for process in world.processes:
        world.call(process)
    wait(world, seconds)
    world.used.clear()
    return world


def wait(world, seconds, busy=()):
    for _ in range(round(seconds * 4)):
        world.clock.advance(0.25)
        world.tend()
        for process in busy:
            while world.call(process):
                pass


def cut(world, processes, state="lost"):
    for process in processes:
        process.link.state = state
        world.call(process)


def test_together_the_processes_spend_half_of_the_limit_and_not_more():
    limit = Limit(600, "1m")  # ten a second
    world = steady(limit)
    cut(world, world.processes)
    wait(world, 6)  # nobody counts on anybody any more
    world.used.clear()
    wait(world, 60, busy=world.processes)
    assert 280 <= len(world.used) <= 5 * 63  # of 600: what came back since the share may be spent, and in a minute
    assert world.processes[0].guard.metrics()["share_ppm"] == pytest.approx(10**6 / 6, abs=2)


def test_nothing_is_spent_until_the_others_have_stopped_counting_on_one():
    world = steady(Limit(600, "1m"))
    one = world.processes[0]
    cut(world, [one])
    answer = world.call(one)
    assert isinstance(answer, LocalDecision)
    assert not answer
    wait(world, 3.25, busy=[one])  # it posted in the beat before, and three more must end
    assert world.used == []
    wait(world, 3, busy=[one])
    assert world.used


def test_windows_admit_nothing_for_a_period_after_the_loss():
    world = steady(Limit(60, "20s", algorithm="sliding_log"))
    one = world.processes[0]
    cut(world, [one])
    wait(world, 20, busy=[one])
    assert world.used == []
    wait(world, 10, busy=[one])
    assert len(world.used) == 10  # a sixth of 60


def test_while_one_is_cut_off_the_others_have_half():
    limit = Limit(60, "10s", algorithm="sliding_log")
    world = steady(limit)
    one, *others = world.processes
    cut(world, [one])
    wait(world, 20)
    world.used.clear()
    wait(world, 9.75, busy=others)
    assert len(world.used) == 30
    assert others[0].guard.metrics()["halved"] == 1
    one.link.state = "up"
    wait(world, 25)
    assert others[0].guard.metrics()["halved"] == 0
    world.used.clear()
    wait(world, 9, busy=others)
    assert len(world.used) == 60


def test_what_was_spent_alone_is_charged_before_anybody_has_the_whole_limit_again():
    limit = Limit(60, "20s", algorithm="sliding_log")
    world = steady(limit)
    one, *others = world.processes
    cut(world, [one])
    wait(world, 30, busy=[one])
    assert len(world.used) == 10
    one.link.state = "up"
    wait(world, 6)
    assert one.guard.metrics()["keys_unsettled"] == 0
    assert others[0].guard.metrics()["halved"] == 0
    seen = others[0].guard.apply_one("peek", world.policy, "k", (0,))
    assert seen.remaining == 50
    wait(world, 1, busy=others)
    assert excess(limit, world.used) == 0


def test_a_full_log_is_charged_all_the_same():
    limit = Limit(20, "60s", algorithm="sliding_log")
    world = steady(limit, processes=2)
    one, other = world.processes
    cut(world, [one])
    wait(world, 70, busy=[one])
    wait(world, 1, busy=[other])
    assert len(world.used) == 5 + 10
    one.link.state = "up"
    wait(world, 8, busy=[other])
    assert one.guard.metrics()["keys_unsettled"] == 0
    wait(world, 120, busy=[one, other])
    assert excess(limit, world.used) == 0


def test_one_that_starts_during_the_outage_denies():
    world = steady(Limit(600, "1m"))
    late = world.join()
    late.link.state = "lost"
    wait(world, 30, busy=[late])
    assert world.used == []


def test_one_that_crashed_halves_the_limit_until_its_claims_end_and_one_that_left_does_not():
    world = steady(Limit(60, "10s", algorithm="sliding_log"), local_for=100)
    first, second, third = world.processes
    world.processes.remove(third)
    third.guard.close()
    wait(world, 6)
    assert first.guard.metrics()["halved"] == 0
    world.processes.remove(second)  # crashes
    wait(world, 6)
    assert first.guard.metrics()["halved"] == 1
    wait(world, 300)
    assert first.guard.metrics()["halved"] == 0


def test_an_outage_longer_than_the_claims_ends_in_denial():
    world = steady(Limit(600, "1m"), local_for=100)
    cut(world, world.processes)
    wait(world, 400)
    world.used.clear()
    wait(world, 10, busy=world.processes)
    assert world.used == []


def test_what_is_spent_before_the_claims_end_has_come_back_by_then():
    """Found by random schedules: when claims end, the others have the whole limit, and know nothing of such uses."""
    limit = Limit(60, "20s", algorithm="sliding_log")
    world = steady(limit, seconds=50, local_for=100)  # before the middle of the first term, which lasts 200 s
    one, *others = world.processes
    cut(world, [one])
    wait(world, 149, busy=[one])
    assert world.used
    wait(world, 3)
    wait(world, 30, busy=[one, *others])
    assert excess(limit, world.used) == 0


def test_one_that_cannot_settle_does_not_count_as_back():
    world = steady(Limit(60, "20s", algorithm="sliding_log"))
    one, *others = world.processes
    cut(world, [one])
    wait(world, 30, busy=[one])
    one.link.state = "stubborn"
    wait(world, 10)
    assert one.guard.metrics()["keys_unsettled"] == 1
    assert others[0].guard.metrics()["halved"] == 1


def test_the_moment_of_the_loss_gives_nobody_more():
    """The one that is cut off and the others ask all the time, before, during and after."""
    for limit in LIMITS:
        world = steady(limit)
        one, *others = world.processes
        wait(world, 15, busy=others)
        for state in ("lost", "up", "deaf", "up"):
            one.link.state = state
            wait(world, 25, busy=[one, *others])
        assert excess(limit, world.used) == 0


def test_slots_are_not_shared_out():
    world = steady(Limit(60, "10s", algorithm="concurrency"))
    cut(world, world.processes)
    wait(world, 60, busy=world.processes)
    assert world.used == []


def test_a_share_of_less_than_a_permit_denies_until_the_store_may_be_back():
    world = steady(Limit(5, "10s"))
    one = world.processes[0]
    cut(world, [one])
    wait(world, 20)
    answer = world.call(one)
    assert not answer
    assert answer.retry_after is not None


def test_a_cost_beyond_the_share_is_worth_asking_again_one_beyond_the_limit_is_not():
    world = steady(Limit(60, "10s"))
    one = world.processes[0]
    cut(world, [one])
    wait(world, 20)
    assert world.call(one, cost=50).retry_after is not None
    assert world.call(one, cost=61).retry_after is None


def test_a_reservation_made_alone_is_settled_alone():
    world = steady(Limit(600, "1m"))
    one = world.processes[0]
    cut(world, [one])
    wait(world, 60)
    held = one.guard.apply_one("hold", world.policy, "k", (10,))
    assert held
    before = one.guard.apply_one("peek", world.policy, "k", (0,)).remaining
    one.guard.apply_one("adjust", world.policy, "k", (-4,), at=held.at)
    assert one.guard.apply_one("peek", world.policy, "k", (0,)).remaining == before + 4
    assert one.guard.metrics()["corrections_waiting"] == 0


def test_keys_beyond_those_that_can_be_remembered_are_denied(monkeypatch):
    assert MAX_KEYS >= 10_000
    monkeypatch.setattr("tidegate.stores.outage.fallback.MAX_KEYS", 3)
    world = steady(Limit(600, "1m"))
    one = world.processes[0]
    cut(world, [one])
    wait(world, 60)
    assert [bool(world.call(one, key=str(n))) for n in range(5)] == [True, True, True, False, False]


def test_alone_and_healthy_the_whole_limit_is_there_from_the_first_call():
    world = World(local(Limit(10, "1h")), 1, processes=1)
    assert [bool(world.call(world.processes[0])) for _ in range(11)] == [True] * 10 + [False]


def test_what_peers_keep_in_the_store_goes_by_itself():
    world = steady(Limit(10, "1s"), processes=2, seconds=60)
    entries = world.server.metrics()["entries"]
    wait(world, 300)
    assert world.server.metrics()["entries"] <= entries + 5
