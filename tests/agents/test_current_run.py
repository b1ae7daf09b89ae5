"""The current run is charged by clients, gates and decorated functions that were not passed it."""

import asyncio
import contextlib
import contextvars
import threading

import httpx
import pytest

from tidegate import AsyncLimiter, ConfigError, Denied, Limiter
from tidegate.agents import AsyncRun, Run, RunDenied, charged
from tidegate.outbound import AsyncGate, Gate, Providers
from tidegate.outbound.httpx import AsyncRateLimitTransport, RateLimitTransport

PROVIDER = """
domain: api.example
limits: [100/1h, 5000/1h unit=tokens name=tpm]
estimate: {tokens: 30}
"""


@pytest.fixture
def providers(tmp_path):
    (tmp_path / "example.yaml").write_text(PROVIDER)
    return Providers.load(files=[tmp_path / "example.yaml"])


@pytest.fixture
def sent():
    return []


@pytest.fixture
def transport(sent):
    def answer(request):
        sent.append(str(request.url))
        return httpx.Response(200, text="ok")

    return httpx.MockTransport(answer)


def test_a_client_in_a_run_is_stopped_before_the_request_is_sent(providers, transport, sent, memory):
    with (
        Run("r", store=memory, limits="2/run") as run,
        httpx.Client(transport=RateLimitTransport(providers, store="memory://", transport=transport)) as client,
    ):
        assert [client.get("https://api.example/x").status_code for _ in range(2)] == [200, 200]
        with pytest.raises(Denied) as caught:
            client.get("https://api.example/x")
        assert caught.value.node == "r"
        assert len(sent) == 2
        assert run.usage().used["requests"] == 2


async def test_tasks_charge_the_run_of_their_block(providers, transport, sent, memory):
    client = httpx.AsyncClient(transport=AsyncRateLimitTransport(providers, store="memory://", transport=transport))
    async with AsyncRun("r", store=memory, limits="9/run") as run, client:
        async with run.child("a", limits="1/run"):
            await client.get("https://api.example/x")
            with pytest.raises(Denied) as caught:
                await client.get("https://api.example/x")
            assert caught.value.node == "r/a"
        async with run.child("b"):
            await asyncio.gather(*(client.get("https://api.example/x") for _ in range(3)))
        used = {node.name: node.used["requests"] for _, node in (await run.usage()).walk()}
        assert used == {"r": 4, "a": 1, "b": 3}
        assert len(sent) == 4


def test_a_gate_settles_the_run_with_its_charge(providers, memory):
    with (
        Run("r", store=memory, limits=["100/run unit=tokens"]) as run,
        contextlib.closing(Gate(providers, store="memory://")) as gate,
    ):
        held = gate.acquire("api.example", {"requests": 1, "tokens": 60})
        assert run.usage().used == {"tokens": 60, "requests": 1}
        held.commit({"tokens": 25})
        assert run.usage().used == {"tokens": 25, "requests": 1}
        gate.acquire("api.example", {"requests": 1, "tokens": 60}).cancel()
        assert run.usage().used == {"tokens": 25, "requests": 1}
        with pytest.raises(RunDenied, match="75 of 100 tokens left, and the call needs 80"):
            gate.acquire("api.example", {"requests": 1, "tokens": 80})
        run.extend({"tokens": 1000})
        held = gate.try_acquire("api.example", {"requests": 99})
        assert held.allowed, "the charge at the provider was returned"


async def test_an_async_gate_settles_a_run_of_threads_too(providers, memory):
    gate = AsyncGate(providers, store="memory://")
    with Run("r", store=memory, limits=["100/run unit=tokens"]) as run:
        async with gate.acquire("api.example", {"requests": 1, "tokens": 60}) as held:
            await held.commit({"tokens": 10})
        assert run.usage().used == {"tokens": 10, "requests": 1}
    await gate.close()


def test_a_limited_function_is_charged_to_the_run(memory):
    limiter = Limiter(["2/1h", "100/1h unit=tokens name=tpm"])
    call = limiter.limited("k", {"requests": 1, "tokens": 7})(lambda: "done")
    with Run("r", store=memory, limits=["10/run unit=tokens"]) as run:
        assert call() == "done"
        with pytest.raises(RunDenied):
            call()
        assert limiter.usage("k")["1h"].used == 1
        run.extend({"tokens": 50})
        assert call() == "done"
        held = limiter.limited("k", {"requests": 1, "tokens": 7}, timeout=0)(lambda: "done")
        with pytest.raises(Denied) as caught:
            held()
        assert caught.value.node is None, "the limiter denied it"
        assert run.usage().used == {"tokens": 14, "requests": 2}, "what the limiter denied is refunded"


async def test_a_limited_coroutine_is_charged_to_the_run(memory):
    limiter = AsyncLimiter("9/1h")

    @limiter.limited("k")
    async def call():
        return "done"

    async with AsyncRun("r", store=memory, limits="1/run") as run:
        assert await call() == "done"
        with pytest.raises(RunDenied):
            await call()
        assert (await run.usage()).used == {"requests": 1}


def test_tools_are_charged_to_the_run_that_calls_them(memory):
    @charged({"tool:search": 1})
    def search(fail=False):
        if fail:
            raise LookupError
        return "found"

    with pytest.raises(ConfigError, match="there is none"):
        search()
    with Run("r", store=memory, limits=["2/run unit=tool:search"]) as run:
        assert search() == "found"
        with pytest.raises(LookupError):
            search(fail=True)
        assert search() == "found"
        with pytest.raises(RunDenied, match="0 of 2 tool:search left"):
            search()
        assert run.usage().used == {"tool:search": 2, "requests": 2}


async def test_tools_of_tasks(memory):
    @charged({"tool:search": 1})
    async def search():
        return "found"

    @charged()
    def plain():
        """Do nothing."""

    async with AsyncRun("r", store=memory, limits=["1/run unit=tool:search"]):
        assert await search() == "found"
        with pytest.raises(RunDenied):
            await search()
        with pytest.raises(ConfigError, match="make it a coroutine function"):
            plain()
    with Run("r", store=memory, limits=["1/run unit=tool:search"]):
        assert await search() == "found"


def test_a_thread_has_the_run_of_its_context(memory):
    @charged()
    def call():
        """Do nothing."""

    with Run("r", store=memory, limits="5/run") as run:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(call,))
        thread.start()
        thread.join()
        assert run.usage().used == {"requests": 1}


def test_generators_cannot_be_charged():
    with pytest.raises(ConfigError, match="reserve inside it"):

        @charged()
        def produce():
            yield 1
