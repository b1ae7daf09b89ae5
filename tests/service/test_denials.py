"""What the log says of denials."""

import pytest

from tests.service.harness import START
from tidegate.observe.logs import DecisionLog
from tidegate.service.desk import Desk, Subject
from tidegate.service.settings import load_settings
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock


@pytest.mark.parametrize("verb", ["acquire", "reserve"])
async def test_only_what_was_allowed_is_said_to_be(verb, caplog):
    rules = load_settings({"policies": {"quiet": {"limits": "1/1m", "mode": "shadow"}}}).rules
    desk = Desk(rules, MemoryStore(clock=ManualClock(start=START)), on_denial=(DecisionLog("tidegate.service"),))
    ask, good, bad = getattr(desk, verb), Subject("quiet", "good"), Subject("quiet", "bad")
    await desk.block(bad, 90)
    for subject in (good, good, bad):
        await ask(subject)
    assert [record.getMessage() for record in caplog.records] == [
        "rate limit exceeded (shadow: allowed all the same): quiet: good, retry in 60 s",
        "rate limit exceeded: quiet: bad, retry in 90 s",
    ]
    await desk.close()
