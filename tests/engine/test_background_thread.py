"""BackgroundThread: runs a job when it is due, ends when there is nothing to do, and loses no `start`."""

import gc
import os
import threading
import weakref

import pytest

from tidegate._runtime.background_thread import BackgroundThread
from tidegate._runtime.clock import SystemClock, ThreadSignal

LONG = 3600.0
LONG_MICROS = 3_600_000_000


class Owner:
    """Runs a list of steps, each of which returns when the next one is due."""

    def __init__(self, *steps, **options):
        self.steps = list(steps)
        self.runs = 0
        self.ran = ThreadSignal()
        self.thread = BackgroundThread(self.run, "job", **options)

    def run(self):
        self.runs += 1
        step = self.steps.pop(0) if self.steps else lambda: None
        try:
            return step()
        finally:
            self.ran.set()


def ended(owner):
    """Wait for the thread; while it ends, a `start` may keep it or start another one."""
    for thread in [each for each in threading.enumerate() if each.name == "job"]:
        thread.join(5)
    return not owner.thread.running


def now():
    return SystemClock.steady()


def test_a_job_runs_until_there_is_nothing_to_do():
    owner = Owner(now, now)
    owner.thread.start()
    assert ended(owner)
    assert owner.runs == 3
    owner.thread.start()
    assert ended(owner)
    assert owner.runs == 4


def test_wake_runs_the_job_before_it_is_due():
    owner = Owner(delay=LONG)
    owner.thread.start()
    owner.thread.wake()
    assert ended(owner)
    assert owner.runs == 1


def test_a_start_while_the_job_ends_is_not_lost():
    owner = Owner()
    owner.steps.append(owner.thread.start)
    owner.thread.start()
    assert ended(owner)
    assert owner.runs == 2


def test_starts_of_many_threads_are_not_lost():
    todo, done = [], []

    class Counting(Owner):
        def run(self):
            while todo:
                done.append(todo.pop())

    owner = Counting()

    def produce():
        for number in range(500):
            todo.append(number)
            owner.thread.start()

    producers = [threading.Thread(target=produce) for _ in range(4)]
    for each in producers:
        each.start()
    for each in producers:
        each.join()
    assert ended(owner)
    assert (len(done), todo) == (2000, [])


def test_stop_runs_the_job_once_more_and_what_is_due():
    owner = Owner(lambda: now() + LONG_MICROS, now, lambda: now() + LONG_MICROS)
    owner.thread.wake()
    assert owner.ran.wait(5)
    owner.thread.stop(5)
    assert ended(owner)
    assert owner.runs == 3
    owner.thread.wake()
    assert not owner.thread.running


def test_a_job_that_fails_is_logged_and_runs_again(caplog):
    def fail():
        raise ValueError("no")

    owner = Owner(fail)
    owner.thread.start()
    assert owner.ran.wait(5)
    owner.thread.wake()
    assert ended(owner)
    assert owner.runs == 2
    assert "job failed; it runs again in 1 s" in caplog.text


@pytest.mark.parametrize("keeps_owner", [False, True])
def test_the_thread_ends_with_its_owner_unless_it_keeps_it(keeps_owner):
    owner = Owner(delay=LONG, keeps_owner=keeps_owner)
    owner.thread.start()
    thread, gone = owner.thread, weakref.ref(owner)
    [os_thread] = [each for each in threading.enumerate() if each.name == "job"]
    del owner
    gc.collect()
    assert (gone() is None) is not keeps_owner
    if keeps_owner:
        thread.stop(5)
    os_thread.join(5)
    assert not os_thread.is_alive()


def test_a_forked_process_starts_without_the_thread():
    owner = Owner(delay=LONG)
    owner.thread.start()
    process = os.fork()
    if process == 0:
        running, code = owner.thread.running, 1
        owner.thread.wake()
        if not running and owner.ran.wait(5):
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    owner.thread.stop()
