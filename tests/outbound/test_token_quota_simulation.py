"""The quota of a language model in virtual time: 200 agents, 64,000 `max_tokens`, strict calls, tokens and requests.

The provider counts by the rule of its profile, in every window of a minute.
"""

from functools import partial

import pytest

from tests.outbound.virtual_model import INPUT, MEAN_ANSWER, Simulation

USABLE = 0.97
LEFT = 0.03


def learned(profile, warm_up=150, **options):
    """A simulation whose processes know how long answers are, and whose first burst is over."""
    world = Simulation(profile, **options)
    world.run(warm_up)
    world.tokens.total = world.requests.total = 0
    world.refusals.clear()
    return world


def measure(world, seconds):
    """Let it run; returns the share of the quota that calls took, and the most that was left when one was refused."""
    used = world.observe(seconds)
    return used, max((left for _, left in world.refusals), default=0.0)


def check_no_window_is_exceeded(world):
    assert world.tokens.most <= world.tokens.quota
    assert world.requests.most <= world.requests.quota
    assert sum(gate.metrics()["overrun"] for gate in world.gates) == 0


@pytest.mark.once
@pytest.mark.parametrize(
    ("profile", "options"),
    [
        ("openai", {}),
        ("anthropic", {}),
        ("bedrock", {"processes": 2}),
        ("azure", {"processes": 2, "warm_up": 300, "pause": 16.0}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_all_of_the_quota_is_used_and_no_window_exceeded(profile, options):
    world = learned(profile, **options)
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert used >= USABLE
    assert world.refusals
    assert left <= LEFT


@pytest.mark.parametrize("profile", ["openai", "anthropic"])
def test_the_same_while_processes_are_killed(profile):
    """A new process has learned nothing: it reserves 64,000 tokens for each of its first answers."""
    world = learned(profile, processes=8)
    for number in range(6):
        process = world.random.randrange(8)
        world.at(20 * number + 20 * world.random.random(), partial(world.kill, process))
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert used >= USABLE
    assert left <= LEFT


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["anthropic"])
def test_answers_ten_times_longer_than_learned(profile):
    """An answer of 54,000 tokens holds 64,000 until it has ended: nobody knows before that it will not need them."""
    world = learned(profile, processes=2)
    world.factor, world.pause = 10, world.pause * 4
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert world.answers > 500
    assert used >= USABLE
    assert left <= LEFT


@pytest.mark.parametrize("profile", ["openai", "anthropic"])
@pytest.mark.parametrize(("quota", "agents", "usable"), [(2_000_000, 40, USABLE), (200_000, 8, 0.9)])
def test_smaller_quotas_refuse_while_less_than_three_calls_are_left(profile, quota, agents, usable):
    """One call does not fit, and those of 0.3 s count here a little longer than at the provider.

    Nothing could admit a call into less than it may take: with 200,000 tokens, that is 7 % of the quota.
    """
    world = learned(profile, tokens=quota, agents=agents, processes=2)
    call = INPUT + 1.5 * MEAN_ANSWER  # the longest, which is about what is reserved
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert used >= usable
    assert left <= max(LEFT, 3 * call / quota)


@pytest.mark.slow
def test_answers_that_take_minutes_count_while_they_are_produced():
    """54,000 tokens at 200 tokens a second: a stream holds what it can produce in a minute, not all of its tokens."""
    world = learned("anthropic", tokens=400_000, agents=80, processes=2, speed=200, pause=5.0, streams=1.0)
    world.factor = 10
    world.tokens.most = 0
    world.run(world.now() + 400)
    check_no_window_is_exceeded(world)
    assert world.tokens.used >= 0.7 * world.tokens.quota  # 0.18 if each held 64,000
    assert world.answers > 20
