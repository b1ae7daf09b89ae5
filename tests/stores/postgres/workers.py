"""Functions that these tests run in other processes."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from tests.stores.postgres.comparison import use_core
from tidegate import Limit, Policy
from tidegate.stores._postgres import PostgresStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUOTA = 60
KEYS = ("a", "b", "c", "d", "e")
SHARED = Policy("shared", (Limit(QUOTA, "1d", "fixed_window"), Limit(QUOTA * 2, "1d", "sliding_log", name="log")))


def in_processes(count: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Run a function in so many processes at once; its first argument is the number of the process."""
    with get_context("spawn").Pool(count) as pool:
        return pool.starmap(function, [(number, *arguments) for number in range(count)], chunksize=1)


def spend(number: int, url: str, schema: str, core: str | None, threads: int) -> tuple[dict[str, int], list[str]]:
    """Acquire overlapping batches of keys in several threads until nothing is left; count the admitted calls."""
    store = PostgresStore(url, schema=schema, timeout=20, connect_timeout=20, pool_size=threads)
    if core is not None:
        use_core(store, core)

    def spending(thread: int) -> tuple[list[str], list[str]]:
        choose = random.Random(f"{number}/{thread}")
        admitted: list[str] = []
        errors: list[str] = []

        def take(keys: Sequence[str]) -> bool:
            try:
                decisions = store.apply("acquire", [(SHARED, key, (1, 1)) for key in keys])
            except Exception as error:  # noqa: BLE001 - returned to the test
                errors.append(str(error))
                return False
            if decisions[0]:
                admitted.extend(keys)
            return bool(decisions[0])

        while take(choose.sample(KEYS, 3)) and not errors:
            pass
        for key in KEYS:
            while take([key]) and not errors:
                pass
        return admitted, errors

    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(spending, range(threads)))
    store.close()
    admitted = [key for keys, _ in results for key in keys]
    return {key: admitted.count(key) for key in KEYS}, [error for _, errors in results for error in errors]


def first_call(_number: int, url: str, schema: str) -> bool:
    """Open a store whose schema may not exist yet, and decide once."""
    store = PostgresStore(url, schema=schema, timeout=20, connect_timeout=20)
    try:
        return bool(store.apply_one("acquire", Policy("p", (Limit(4, "1d", "fixed_window"),)), "k", (1,)))
    finally:
        store.close()
