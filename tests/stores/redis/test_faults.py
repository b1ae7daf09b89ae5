"""Servers that are down, hung, slow or restarted: how long calls take, what errors say, and what was charged.

Over-admission in each test: 0.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests.servers.process import free_port, until
from tests.servers.tcp_proxy import TcpProxy
from tests.servers.valkey import ValkeyServer
from tests.stores.redis.conftest import address_of
from tidegate import Limit, Policy, StoreUnavailable
from tidegate.stores import open_store
from tidegate.stores._redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from tidegate import Decision

POLICY = Policy("p", (Limit(10, "1h"), Limit(10, "1h", "sliding_log", name="log")))
DEADLINE = 0.3


class StoreCaller:
    """Calls a store from threads or from tasks, so that each fault is tested with both."""

    def __init__(self, store: RedisStore, *, tasks: bool) -> None:
        self.store = store
        self.runner = asyncio.Runner() if tasks else None

    def ask(self, verb: str = "acquire", cost: int = 1) -> Decision:
        asks = ((POLICY, "k", (cost, cost)),)
        if self.runner is None:
            return self.store.apply(verb, asks)[0]
        return self.runner.run(self.store.apply_async(verb, asks))[0]

    def many(self, count: int) -> list[object]:
        assert self.runner is not None
        asks = ((POLICY, "k", (1, 1)),)

        async def together() -> list[object]:
            calls: list[Coroutine[Any, Any, object]] = [self.store.apply_async("acquire", asks) for _ in range(count)]
            return list(await asyncio.gather(*calls, return_exceptions=True))

        return self.runner.run(together())

    def close(self) -> None:
        if self.runner is not None:
            self.runner.run(self.store.close_async())
            self.runner.close()
        self.store.close()


@pytest.fixture(params=["threads", "tasks"])
def both(request: pytest.FixtureRequest) -> Iterator[Callable[..., StoreCaller]]:
    opened: list[StoreCaller] = []

    def open_both(port: int, timeout: float = DEADLINE) -> StoreCaller:
        server = ValkeyServer(port=port)
        opened.append(
            StoreCaller(
                RedisStore(address_of(server, timeout=timeout, connect_timeout=timeout)),
                tasks=request.param == "tasks",
            )
        )
        server.close()
        return opened[-1]

    yield open_both
    for each in opened:
        each.close()


def timed(ask: Callable[[], object]) -> tuple[float, str]:
    """Return how long a failing call takes, and its message."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        ask()
    assert caught.value.__cause__ is None
    return time.monotonic() - start, str(caught.value)


def test_a_server_that_is_down(both: Callable[..., StoreCaller]) -> None:
    port = free_port()
    seconds, message = timed(both(port).ask)
    assert seconds < DEADLINE + 0.2
    assert f"127.0.0.1:{port}" in message
    assert "check that the server runs" in message


def test_kill_and_restart(both: Callable[..., StoreCaller], server: ValkeyServer) -> None:
    caller = both(server.port, 5)
    assert caller.ask().remaining == 9
    server.kill()
    for _ in range(3):
        timed(caller.ask)
    server.start()  # without keys and scripts
    assert caller.ask().remaining == 9
    assert caller.ask().remaining == 8


def test_a_restart_with_persistence_loses_nothing(both: Callable[..., StoreCaller]) -> None:
    with ValkeyServer(None, "--appendonly", "yes", "--appendfsync", "always") as server:
        caller = both(server.port, 5)
        for left in (9, 8, 7):
            assert caller.ask().remaining == left
        server.restart()  # kill -9
        assert caller.ask().remaining == 6


def test_a_hung_server_costs_the_deadline_and_no_more(both: Callable[..., StoreCaller], server: ValkeyServer) -> None:
    caller = both(server.port)
    caller.ask()
    with server.frozen():
        seconds, message = timed(caller.ask)  # on an open connection
        assert seconds < DEADLINE + 0.2
        assert "timeout" in message
        seconds, message = timed(caller.ask)  # on a new connection
        assert seconds < DEADLINE + 0.2
    until(lambda: is_answered(caller), "an answer after the server woke up", 5)
    # Calls sent while it hung are run when it continues, at most once each.
    assert 10 - caller.ask("peek", 0).remaining in (1, 2, 3)


def is_answered(caller: StoreCaller) -> bool:
    with suppress(StoreUnavailable):
        caller.ask("peek", 0)
        return True
    return False


def test_a_hung_server_costs_many_calls_one_deadline(server: ValkeyServer) -> None:
    caller = StoreCaller(RedisStore(address_of(server, timeout=DEADLINE, connect_timeout=DEADLINE)), tasks=True)
    caller.ask()
    with server.frozen():
        start = time.monotonic()
        answers = caller.many(500)
        assert time.monotonic() - start < DEADLINE + 0.3
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    caller.close()


def test_a_reset_connection_is_replaced(both: Callable[..., StoreCaller], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        caller = both(proxy.port, 5)
        before = caller.ask().remaining
        proxy.reset()
        until(lambda: is_answered(caller), "an answer after the reset", 5)
        assert (
            caller.ask().remaining == before - 1
        )  # detected before anything was sent: nothing was lost or charged twice


def test_a_call_whose_answer_was_lost_stays_charged(both: Callable[..., StoreCaller], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        caller = both(proxy.port)
        assert caller.ask().remaining == 9
        proxy.faults.drop_replies = True
        seconds, _ = timed(caller.ask)
        assert seconds < DEADLINE + 0.2
        proxy.faults.drop_replies = False
        assert caller.ask("peek", 0).remaining == 8  # charged once: not repeated, not given back


def test_a_slow_server_is_waited_for_up_to_the_deadline(both: Callable[..., StoreCaller], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        caller = both(proxy.port, 2)
        caller.ask()
        proxy.faults.delay = 0.1
        assert caller.ask().remaining == 8
        proxy.faults.delay = 60
        seconds, _ = timed(caller.ask)
        assert seconds < 2.3


def test_a_network_that_drops_everything(both: Callable[..., StoreCaller], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        caller = both(proxy.port)
        proxy.faults.blackhole = True
        seconds, _ = timed(caller.ask)
        assert seconds < DEADLINE + 0.2


def test_authentication_errors_say_what_to_do(both: Callable[..., StoreCaller]) -> None:
    with ValkeyServer(None, "--requirepass", "secret-word") as server:
        _, message = timed(both(server.port, 5).ask)
        assert "add the user and password to the URL" in message
        store = open_store(f"redis://:wrong-word@127.0.0.1:{server.port}?timeout=5&connect_timeout=5")
        with pytest.raises(StoreUnavailable, match="check the user and password") as caught:
            store.apply("acquire", ((POLICY, "k", (1, 1)),))
        assert "wrong-word" not in str(caught.value)
        store = open_store(f"redis://:secret-word@127.0.0.1:{server.port}/3?timeout=5&connect_timeout=5")
        assert store.apply("acquire", ((POLICY, "k", (1, 1)),))[0].allowed
        assert "secret-word" not in repr(store.address)  # type: ignore[attr-defined]  # a RedisStore
        store.close()


def test_a_server_out_of_memory(both: Callable[..., StoreCaller], server: ValkeyServer) -> None:
    caller = both(server.port, 5)
    caller.ask()
    server.ask("CONFIG", "SET", "maxmemory", "1")
    _, message = timed(caller.ask)
    assert "out of memory" in message
    server.ask("CONFIG", "SET", "maxmemory", "0")
    assert caller.ask().remaining == 8


def test_keys_of_another_type(both: Callable[..., StoreCaller], server: ValkeyServer) -> None:
    caller = both(server.port, 5)
    name = caller.store.protocol.encode_policy(POLICY).key("k").decode()
    server.ask("LPUSH", name, "x")
    _, message = timed(caller.ask)
    assert "prefix" in message
