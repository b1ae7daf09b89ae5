"""A server that is gone, hung, slow or forgetful: what it costs, what is said, and that nothing is spent twice.

Over-admission counted in each test: 0.
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
from tidegate.stores.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Any

    from tidegate import Decision

POLICY = Policy("p", (Limit(10, "1h"), Limit(10, "1h", "sliding_log", name="log")))
DEADLINE = 0.3


class Both:
    """Asks a store as threads do, or as tasks do, so that each fault is tried on both."""

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
def both(request: pytest.FixtureRequest) -> Iterator[Callable[..., Both]]:
    opened: list[Both] = []

    def open_both(port: int, timeout: float = DEADLINE) -> Both:
        server = ValkeyServer(port=port)
        opened.append(
            Both(
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
    """Tell how long a failing call takes, and what it says."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        ask()
    assert caught.value.__cause__ is None
    return time.monotonic() - start, str(caught.value)


def test_a_server_that_is_not_there(both: Callable[..., Both]) -> None:
    port = free_port()
    seconds, said = timed(both(port).ask)
    assert seconds < DEADLINE + 0.2
    assert f"127.0.0.1:{port}" in said
    assert "check that the server runs" in said


def test_kill_and_restart(both: Callable[..., Both], server: ValkeyServer) -> None:
    asker = both(server.port, 5)
    assert asker.ask().remaining == 9
    server.kill()
    for _ in range(3):
        timed(asker.ask)
    server.start()  # with nothing in it: neither keys nor scripts
    assert asker.ask().remaining == 9
    assert asker.ask().remaining == 8


def test_a_restart_with_its_files_loses_nothing(both: Callable[..., Both]) -> None:
    with ValkeyServer(None, "--appendonly", "yes", "--appendfsync", "always") as server:
        asker = both(server.port, 5)
        for left in (9, 8, 7):
            assert asker.ask().remaining == left
        server.restart()  # kill -9
        assert asker.ask().remaining == 6


def test_a_script_that_was_flushed_is_sent_again(both: Callable[..., Both], server: ValkeyServer) -> None:
    asker = both(server.port, 5)
    for left in (9, 8, 7):
        server.ask("SCRIPT", "FLUSH")
        assert asker.ask().remaining == left


def test_a_hung_server_costs_the_deadline_and_no_more(both: Callable[..., Both], server: ValkeyServer) -> None:
    asker = both(server.port)
    asker.ask()
    with server.frozen():
        seconds, said = timed(asker.ask)  # on a connection that was made before
        assert seconds < DEADLINE + 0.2
        assert "timeout" in said
        seconds, said = timed(asker.ask)  # on one that has to be made
        assert seconds < DEADLINE + 0.2
    until(lambda: is_answered(asker), "an answer after the server woke up", 5)
    # What was asked while it hung was done when it woke up, at most once each: never fewer than were admitted.
    assert 10 - asker.ask("peek", 0).remaining in (1, 2, 3)


def is_answered(asker: Both) -> bool:
    with suppress(StoreUnavailable):
        asker.ask("peek", 0)
        return True
    return False


def test_a_hung_server_costs_many_calls_one_deadline(server: ValkeyServer) -> None:
    asker = Both(RedisStore(address_of(server, timeout=DEADLINE, connect_timeout=DEADLINE)), tasks=True)
    asker.ask()
    with server.frozen():
        start = time.monotonic()
        answers = asker.many(500)
        assert time.monotonic() - start < DEADLINE + 0.3
    assert all(isinstance(answer, StoreUnavailable) for answer in answers)
    asker.close()


def test_a_connection_that_was_reset(both: Callable[..., Both], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        asker = both(proxy.port, 5)
        before = asker.ask().remaining
        proxy.reset()
        until(lambda: is_answered(asker), "an answer after the reset", 5)
        assert (
            asker.ask().remaining == before - 1
        )  # noticed before anything was sent: nothing was lost or charged twice


def test_an_answer_that_was_lost_is_a_charge_that_stays(both: Callable[..., Both], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        asker = both(proxy.port)
        assert asker.ask().remaining == 9
        proxy.faults.drop_replies = True
        seconds, _ = timed(asker.ask)
        assert seconds < DEADLINE + 0.2
        proxy.faults.drop_replies = False
        assert asker.ask("peek", 0).remaining == 8  # charged once: not asked again, not given back


def test_a_slow_server_is_waited_for_up_to_the_deadline(both: Callable[..., Both], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        asker = both(proxy.port, 2)
        asker.ask()
        proxy.faults.delay = 0.1
        assert asker.ask().remaining == 8
        proxy.faults.delay = 60
        seconds, _ = timed(asker.ask)
        assert seconds < 2.3


def test_a_black_hole(both: Callable[..., Both], valkey: ValkeyServer) -> None:
    with TcpProxy(valkey.port) as proxy:
        asker = both(proxy.port)
        proxy.faults.blackhole = True
        seconds, _ = timed(asker.ask)
        assert seconds < DEADLINE + 0.2


def test_refusals_of_the_server_say_what_to_do(both: Callable[..., Both]) -> None:
    with ValkeyServer(None, "--requirepass", "secret-word") as server:
        _, said = timed(both(server.port, 5).ask)
        assert "give the user and password in the URL" in said
        store = open_store(f"redis://:wrong-word@127.0.0.1:{server.port}?timeout=5&connect_timeout=5")
        with pytest.raises(StoreUnavailable, match="check the user and password") as caught:
            store.apply("acquire", ((POLICY, "k", (1, 1)),))
        assert "wrong-word" not in str(caught.value)
        store = open_store(f"redis://:secret-word@127.0.0.1:{server.port}/3?timeout=5&connect_timeout=5")
        assert store.apply("acquire", ((POLICY, "k", (1, 1)),))[0].allowed
        assert "secret-word" not in repr(store.address)  # type: ignore[attr-defined]  # a RedisStore
        store.close()


def test_a_server_out_of_memory(both: Callable[..., Both], server: ValkeyServer) -> None:
    asker = both(server.port, 5)
    asker.ask()
    server.ask("CONFIG", "SET", "maxmemory", "1")
    _, said = timed(asker.ask)
    assert "out of memory" in said
    server.ask("CONFIG", "SET", "maxmemory", "0")
    assert asker.ask().remaining == 8


def test_keys_of_another_program(both: Callable[..., Both], server: ValkeyServer) -> None:
    asker = both(server.port, 5)
    name = asker.store.protocol.encode_policy(POLICY).key("k").decode()
    server.ask("LPUSH", name, "x")
    _, said = timed(asker.ask)
    assert "prefix" in said
