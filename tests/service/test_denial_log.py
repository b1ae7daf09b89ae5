"""Log lines of denials."""

import asyncio

import pytest

from tests.service.harness import START
from tidegate.observe.logs import DecisionLog
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider, Subject
from tidegate.service._runtime.logs import log_denial_counts
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_shadow_mode_is_logged_only_for_allowed_calls(verb, caplog):
    rules = load_settings({"policies": {"quiet": {"limits": "1/1m", "mode": "shadow"}}}).policies
    decider = Decider(rules, MemoryStore(clock=ManualClock(start=START)), on_denial=(DecisionLog("tidegate.service"),))
    call, good, bad = getattr(decider, verb), Subject("quiet", "good"), Subject("quiet", "bad")
    await decider.block(bad, 90)
    for subject in (good, good, bad):
        await call(subject)
    assert [record.getMessage() for record in caplog.records] == [
        "rate limit exceeded (shadow mode: allowed): quiet: good, retry in 60 s",
        "rate limit exceeded: quiet: bad, retry in 90 s",
    ]
    await decider.close()


async def test_more_than_ten_denials_a_second_are_counted(caplog):
    clock = ManualClock(start=START)
    denials = DecisionLog("tidegate.service")
    rules = load_settings({"policies": {"busy": {"limits": "1/1m"}}}).policies
    decider = Decider(rules, MemoryStore(clock=clock), on_denial=(denials,))
    task = asyncio.create_task(log_denial_counts(denials, clock))
    for number in range(301):
        await decider.acquire(Subject("busy", f"client {number % 3}"), 2)
    assert len(caplog.records) == 10
    clock.advance(1)
    while len(caplog.records) == 10:
        await asyncio.sleep(0)
    assert caplog.records[-1].getMessage() == "rate limit exceeded: busy: 291 more denials within one second"
    task.cancel()
    await decider.close()
