"""Programs that tests start as separate processes: python programs.py NAME PATH [numbers]."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable

from tidegate._policy import Policy
from tidegate.core._limit import Limit
from tidegate.stores._sqlite import SQLiteStore

BUSY_TIMEOUT = "60s"  # on a busy machine, a process may wait long for the file
QUOTA = 400


def policy(quota: int = QUOTA) -> Policy:
    """Return a policy of a bucket, a window and a log, whose permits do not come back within a test."""
    kinds = ("token_bucket", "fixed_window", "sliding_log")
    return Policy("shared", tuple(Limit(quota, "52w", kind, name=kind) for kind in kinds))


def spend(path: str, quota: int, threads: int, attempts: int) -> None:
    """Call from several threads; print how many calls were admitted."""
    store = SQLiteStore(path, busy_timeout=BUSY_TIMEOUT)
    rules, admitted = policy(quota), []

    def call() -> None:
        admitted.extend(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(attempts))

    workers = [threading.Thread(target=call) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.close()
    print(sum(admitted))  # noqa: T201 - the result of the program


def kill_writers(path: str, kills: int, seed: int) -> None:
    """Kill writers, two at a time, at random moments; print how many admitted calls they reported."""
    draw = random.Random(seed)
    reported = 0
    for _ in range(kills // 2):
        pipes = []
        for _ in range(2):
            mine, theirs = os.pipe()
            child = os.fork()
            if not child:
                write_until_killed(path, theirs)
            os.close(theirs)
            pipes.append((child, mine))
        for child, mine in pipes:
            for _ in range(draw.randrange(8)):
                reported += len(os.read(mine, 1))
            os.kill(child, signal.SIGKILL)
        for child, mine in pipes:
            while received := os.read(mine, 4096):
                reported += len(received)
            os.close(mine)
            os.waitpid(child, 0)
    print(reported)  # noqa: T201 - the result of the program


def write_until_killed(path: str, pipe: int) -> None:
    """Write a byte for each admitted call."""
    store = SQLiteStore(path, busy_timeout=BUSY_TIMEOUT)
    rules = policy()
    while store.apply_one("acquire", rules, "k", (1, 1, 1)):
        os.write(pipe, b".")
    os._exit(0)


def fork(path: str, children: int, calls: int) -> None:
    """Fork while threads use a store, and use it in both processes; print how many calls were admitted."""
    store = SQLiteStore(path, busy_timeout=BUSY_TIMEOUT)
    rules = policy(10 * QUOTA)
    admitted = [bool(store.apply_one("acquire", rules, "k", (1, 1, 1)))]

    def call() -> None:
        admitted.extend(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(calls))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    mine, theirs = os.pipe()
    forked = []
    for _ in range(children):
        child = os.fork()
        if not child:
            sent = b"." * sum(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(calls))
            os.write(theirs, sent)
            store.close()
            os._exit(0)
        forked.append(child)
        call()
    os.close(theirs)
    for thread in threads:
        thread.join()
    children_admitted = 0
    while received := os.read(mine, 4096):
        children_admitted += len(received)
    for child in forked:
        os.waitpid(child, 0)
    store.close()
    print(sum(admitted) + children_admitted)  # noqa: T201 - the result of the program


if __name__ == "__main__":
    name, path, *numbers = sys.argv[1:]
    programs: dict[str, Callable[..., None]] = {"spend": spend, "kill_writers": kill_writers, "fork": fork}
    programs[name](path, *map(int, numbers))
