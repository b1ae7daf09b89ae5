"""Programs that tests start as processes of their own: python programs.py NAME PATH [numbers]."""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable

from tidegate.core.limit import Limit
from tidegate.policy import Policy
from tidegate.stores.sqlite import SQLiteStore

PATIENCE = "60s"  # on a busy machine, a process may wait long for its turn
QUOTA = 400


def policy(quota: int = QUOTA) -> Policy:
    """Give a bucket, a window and a log, of which nothing comes back within a test."""
    kinds = ("token_bucket", "fixed_window", "sliding_log")
    return Policy("shared", tuple(Limit(quota, "52w", kind, name=kind) for kind in kinds))


def spend(path: str, quota: int, threads: int, attempts: int) -> None:
    """Ask from several threads; print how many calls were admitted."""
    store = SQLiteStore(path, busy_timeout=PATIENCE)
    rules, admitted = policy(quota), []

    def ask() -> None:
        admitted.extend(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(attempts))

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.close()
    print(sum(admitted))  # noqa: T201 - how it answers


def be_killed(path: str, kills: int, seed: int) -> None:
    """Kill writers, two at a time, at random moments; print of how many calls they were told that they are admitted."""
    draw = random.Random(seed)
    answered = 0
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
                answered += len(os.read(mine, 1))
            os.kill(child, signal.SIGKILL)
        for child, mine in pipes:
            while told := os.read(mine, 4096):
                answered += len(told)
            os.close(mine)
            os.waitpid(child, 0)
    print(answered)  # noqa: T201 - how it answers


def write_until_killed(path: str, pipe: int) -> None:
    """Say a byte for each admitted call."""
    store = SQLiteStore(path, busy_timeout=PATIENCE)
    rules = policy()
    while store.apply_one("acquire", rules, "k", (1, 1, 1)):
        os.write(pipe, b".")
    os._exit(0)


def fork(path: str, children: int, calls: int) -> None:
    """Use a store, fork while threads use it, and use it on both sides; print how many calls were admitted."""
    store = SQLiteStore(path, busy_timeout=PATIENCE)
    rules = policy(10 * QUOTA)
    admitted = [bool(store.apply_one("acquire", rules, "k", (1, 1, 1)))]

    def ask() -> None:
        admitted.extend(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(calls))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    mine, theirs = os.pipe()
    forked = []
    for _ in range(children):
        child = os.fork()
        if not child:
            told = b"." * sum(bool(store.apply_one("acquire", rules, "k", (1, 1, 1))) for _ in range(calls))
            os.write(theirs, told)
            store.close()
            os._exit(0)
        forked.append(child)
        ask()
    os.close(theirs)
    for thread in threads:
        thread.join()
    children_admitted = 0
    while told := os.read(mine, 4096):
        children_admitted += len(told)
    for child in forked:
        os.waitpid(child, 0)
    store.close()
    print(sum(admitted) + children_admitted)  # noqa: T201 - how it answers


if __name__ == "__main__":
    name, path, *numbers = sys.argv[1:]
    programs: dict[str, Callable[..., None]] = {"spend": spend, "be_killed": be_killed, "fork": fork}
    programs[name](path, *map(int, numbers))
