"""Deadlines of calls: one timer for all of them."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.egress._deadlines import CallDeadline, CallDeadlines


async def wait_for_ever(deadlines: CallDeadlines, started: asyncio.Event | None = None) -> None:
    with CallDeadline(deadlines):
        if started is not None:
            started.set()
        await asyncio.Event().wait()


async def test_each_call_ends_at_its_deadline() -> None:
    deadlines = CallDeadlines(0.01)
    results = await asyncio.gather(*(wait_for_ever(deadlines) for _ in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [TimeoutError] * 5
    with pytest.raises(TimeoutError):  # the timer starts again
        await wait_for_ever(deadlines)
    assert not deadlines.active


async def test_a_call_that_ends_in_time_is_forgotten() -> None:
    deadlines = CallDeadlines(60)
    with CallDeadline(deadlines):
        assert len(deadlines.active) == 1
    assert not deadlines.active


async def test_a_cancelled_call_is_not_a_timeout() -> None:
    deadlines, started = CallDeadlines(60), asyncio.Event()
    task = asyncio.create_task(wait_for_ever(deadlines, started))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not deadlines.active


async def test_another_error_is_passed_on() -> None:
    with pytest.raises(KeyError), CallDeadline(CallDeadlines(60)):
        raise KeyError
