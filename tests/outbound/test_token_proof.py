"""The quota of a language model in virtual time: 200 agents, 64,000 `max_tokens`, strict calls, tokens and requests.

The provider counts by the rule of its profile, in every window of a minute.
"""

from functools import partial

import pytest

from tests.outbound.virtual_model import Simulation

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
    """Let it run; returns the share of the quota that calls took, and how much was left at most when one was refused."""
    used = world.observe(seconds)
    return used, max((left for _, left in world.refusals), default=0.0)


def check_no_window_is_exceeded(world):
    assert world.tokens.most <= world.tokens.quota
    assert world.requests.most <= world.requests.quota
    assert sum(gate.metrics()["overrun"] for gate in world.gates) == 0


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


@pytest.mark.parametrize(("profile", "most_left"), [("openai", LEFT), ("anthropic", 0.04)])
def test_the_same_while_processes_are_killed(profile, most_left):
    """A new process has learned nothing: it reserves 64,000 tokens for each of its first answers.

    With Anthropic's rule, output that is reserved but not yet produced is idle as well.
    """
    world = learned(profile, processes=8)
    for number in range(6):
        process = world.random.randrange(8)
        world.at(20 * number + 20 * world.random.random(), partial(world.kill, process))
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert used >= USABLE
    assert left <= most_left


@pytest.mark.parametrize(("profile", "usable", "most_left"), [("openai", USABLE, 0.06), ("anthropic", 0.9, 0.12)])
def test_answers_ten_times_longer_than_learned(profile, usable, most_left):
    """An answer of 54,000 tokens holds 64,000 until it has ended: nobody knows before that it will not need them.

    With Anthropic's rule, output counts here from the end of its answer, up to six seconds longer than at the provider.
    """
    world = learned(profile, processes=2)
    world.factor, world.pause = 10, world.pause * 4
    used, left = measure(world, 120)
    check_no_window_is_exceeded(world)
    assert world.answers > 500
    assert used >= usable
    assert left <= most_left
