"""The library of functions: it is loaded when it is missing, and a script replaces it where functions are forbidden.

Over-admission in each test: 0. A call that is sent again was not run before.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import redis

from tests.servers.valkey import ValkeyServer
from tests.stores.redis.conftest import address_of
from tidegate import Limit, Policy, StoreUnavailable
from tidegate.stores._redis import RedisStore
from tidegate.stores._redis.library import SOURCE
from tidegate.testing import random_vectors, verify_store
from tidegate.testing._reference import answer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[], int]

POLICY = Policy("p", (Limit(1000, "52w", "fixed_window"),))
ASKS = ((POLICY, "k", (1,)),)
COMMANDS = "time get set getrange setrange pexpire pttl del"
NO_FUNCTIONS = ("--rename-command", "FCALL", "", "--rename-command", "FUNCTION", "")


@pytest.fixture(params=["threads", "tasks"])
def asking(request: pytest.FixtureRequest) -> Iterator[Callable[[RedisStore], Ask]]:
    """Return a function that makes an `ask` of a store, which charges 1 and returns what is used."""
    with asyncio.Runner() as runner:
        opened: list[RedisStore] = []

        def make(store: RedisStore) -> Ask:
            opened.append(store)
            if request.param == "threads":
                return lambda: 1000 - store.apply("acquire", ASKS)[0].remaining
            return lambda: 1000 - runner.run(store.apply_async("acquire", ASKS))[0].remaining

        yield make
        for store in opened:
            runner.run(store.close_async())


def limited(server: ValkeyServer, *commands: str) -> RedisStore:
    """Open a store as a user with these commands, and those that the core calls."""
    with redis.Redis(port=server.port) as client:
        allowed = [f"+{command}" for command in (*commands, *COMMANDS.split())]
        client.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=allowed, reset=True)
    return RedisStore(address_of(server, username="limited", password="any"))  # noqa: S106 - the user has none


def test_a_library_that_was_deleted_is_loaded_again(
    asking: Callable[[RedisStore], Ask], any_server: ValkeyServer
) -> None:
    ask = asking(RedisStore(address_of(any_server)))
    for used in (1, 2, 3):
        any_server.ask("FUNCTION", "FLUSH")
        assert ask() == used
    any_server.ask("CONFIG", "RESETSTAT")
    assert ask() == 4
    assert any_server.calls("fcall") == 1


async def test_calls_in_flight_while_the_library_is_deleted_are_charged_once(server: ValkeyServer) -> None:
    store = RedisStore(address_of(server, batch=3))
    ending = threading.Event()

    def delete() -> int:
        count = 0
        with redis.Redis(port=server.port) as client:
            while not ending.is_set():
                client.function_flush()
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(delete)
        found = []
        for _ in range(10):
            found += await asyncio.gather(
                *(store.apply_async("acquire", ASKS) for _ in range(40)), return_exceptions=True
            )
        ending.set()
    charged = 1000 - (await store.apply_async("peek", ((POLICY, "k", (0,)),)))[0].remaining
    answered = [answer for answer in found if isinstance(answer, list)]
    assert deleted.result() > 10
    assert charged == len(answered)  # an error here would mean: not run
    assert sorted(1000 - answer[0].remaining for answer in answered) == list(range(1, charged + 1))
    assert charged > 300
    await store.close_async()


def test_a_user_without_functions_uses_scripts(asking: Callable[[RedisStore], Ask], server: ValkeyServer) -> None:
    ask = asking(limited(server, "eval", "evalsha"))
    assert [ask(), ask()] == [1, 2]
    server.ask("SCRIPT", "FLUSH")
    assert ask() == 3
    assert (server.calls("fcall"), server.calls("eval")) == (0, 2)


def test_a_user_who_may_not_load_uses_a_library_that_is_there(
    asking: Callable[[RedisStore], Ask], server: ValkeyServer
) -> None:
    ask = asking(limited(server, "fcall", "eval", "evalsha"))
    assert ask() == 1  # as a script
    server.ask("CONFIG", "RESETSTAT")
    RedisStore(address_of(server)).apply("acquire", ASKS)  # an administrator
    other = asking(limited(server, "fcall"))
    assert [other(), other()] == [1, 2]
    assert server.calls("evalsha") == 0


def test_a_user_with_neither_is_told_what_to_allow(asking: Callable[[RedisStore], Ask], server: ValkeyServer) -> None:
    for commands in ((), ("fcall",)):
        with pytest.raises(StoreUnavailable, match=r"allow the user the commands fcall, function\|load"):
            asking(limited(server, *commands))()


def test_a_server_without_functions(asking: Callable[[RedisStore], Ask]) -> None:
    """Redis 6 has none; a provider may have renamed them."""
    with ValkeyServer(None, *NO_FUNCTIONS) as server:
        ask = asking(RedisStore(address_of(server)))
        assert [ask() for _ in range(5)] == [1, 2, 3, 4, 5]
        assert server.calls("eval") == 1


def test_scripts_pass_the_compatibility_kit() -> None:
    with ValkeyServer(None, *NO_FUNCTIONS) as server:
        verify_store(lambda: RedisStore(address_of(server)), rounds=4)


def test_more_policies_than_the_library_remembers(valkey: ValkeyServer) -> None:
    store = RedisStore(address_of(valkey))
    for number in range(60):
        policy = Policy("wide", tuple(Limit(100 + number, "1h", name=str(i)) for i in range(100)))
        assert store.apply("acquire", ((policy, str(number), policy.one),))[0].remaining == 99 + number
    for place, (verb, asks, now, at, answers) in enumerate(random_vectors(7, 100)):
        assert tuple(map(answer_of, store.apply(verb, asks, now, at))) == answers, f"step {place}"
    store.close()


def test_versions_have_libraries_of_their_own(server: ValkeyServer) -> None:
    """Two versions of tidegate that share a server do not replace each other's functions."""
    stores = [RedisStore(address_of(server, prefix="p"), source=SOURCE + tail) for tail in (b"", b"\n-- new")]
    used = [1000 - store.apply("acquire", ASKS)[0].remaining for store in (*stores, *stores)]
    assert used == [1, 2, 3, 4]
    server.ask("CONFIG", "RESETSTAT")
    for store in stores:
        store.apply("acquire", ASKS)
        store.close()
    assert (server.calls("fcall"), server.calls("function|load")) == (2, 0)
