"""An exception at any instruction leaves an SQLite store usable, and a call has its complete effect or none."""

import asyncio
from itertools import count

import pytest

from tests.engine.interrupted_calls import (
    BUCKET,
    CALLS,
    LOG,
    QUOTA,
    START,
    check_effects,
    used,
)
from tests.interrupts import (
    Interrupted,
    interrupted_at,
    rarely,
    sampled_interruptions,
)
from tidegate import AsyncLimiter, Limiter
from tidegate.stores._sqlite import SQLiteStore
from tidegate.testing import ManualClock

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("impatient_clocks")]

REOPEN = {
    "reopen": (lambda limiter: (limiter.store._close(), limiter.try_acquire("k")), 1),  # noqa: SLF001 - as after a fork
}


@pytest.mark.parametrize("name", [*CALLS, *REOPEN])
@pytest.mark.parametrize("rules", [BUCKET, LOG], ids=["bucket", "log"])
def test_sqlite_store(tmp_path, rules, name):
    path = tmp_path / "limits.db"
    limiter = Limiter(rules, store=SQLiteStore(path, clock=ManualClock(START)))
    other = Limiter(rules, store=SQLiteStore(path, busy_timeout=0.2, clock=ManualClock(START)))
    call, effect = (CALLS | REOPEN)[name]
    kept = []

    def keeping(limiter):
        try:
            call(limiter)
        except Interrupted as error:
            kept.append(error)  # with its frames: what they hold is not freed by itself
            raise

    measure = lambda _: used(other)  # noqa: E731 - no connection keeps the file locked
    check_effects(limiter, keeping, effect, every=1 if name == "usual" else 4, measure=measure)


# A coroutine whose caller was interrupted before it awaited it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:.*never awaited")
@pytest.mark.parametrize("verb", ["try_acquire", "acquire", "peek"])
def test_tasks_on_an_sqlite_store(tmp_path, verb):
    """The thread that decides for tasks goes on, and tasks that share a transaction are answered."""
    store = SQLiteStore(tmp_path / "limits.db")
    limiter = AsyncLimiter(BUCKET, store=store)

    async def several():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # told of interrupted callbacks
        asked = (asyncio.wait_for(getattr(limiter, verb)(key), 20) for key in ("a", "b", "c"))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if any(isinstance(answer, Interrupted) for answer in answers):
            raise Interrupted
        return answers

    def call():
        assert all(asyncio.run(several()))

    call()
    steps = 0
    for step in sampled_interruptions(call, 700):
        assert all(asyncio.run(several())), step
        steps += 1
    assert steps > 5
    store.close()


def test_a_file_that_is_being_created(tmp_path):
    for step in count(1, rarely(1499)):
        path = tmp_path / f"{step}.db"
        limiter = Limiter(BUCKET, store=SQLiteStore(path, clock=ManualClock(START)))
        kept = []
        with interrupted_at(step) as countdown:
            try:
                limiter.try_acquire("k")
            except Interrupted as error:
                kept.append(error)
        if countdown.left > 0:
            break
        assert limiter.try_acquire("k"), step
        assert Limiter(BUCKET, store=SQLiteStore(path, busy_timeout=0.2)).peek("k"), step
    assert step > 10_000


def test_a_limiter_on_a_url(tmp_path):
    """GuardedStore does not treat an interruption as an outage."""
    limiter = Limiter(f"{QUOTA}/1d fixed_window", store=f"sqlite:///{tmp_path}/limits.db")
    check_effects(limiter, *CALLS["usual"], every=2)
    assert limiter.store.metrics()["losses"] == 0
