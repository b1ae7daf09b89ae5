"""Forks of processes that use buses, clients of the service and transports; and web servers that fork."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import httpx
import pytest

from tests.engine.forking import forking, goes_on, spending
from tests.inbound.servers import serving as serving_site
from tests.servers.nats import NatsServer
from tests.servers.process import until
from tests.service.harness import serving
from tidegate._runtime.clock import SystemClock
from tidegate.adaptive._signing import MessageSigner
from tidegate.bus import open_bus
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.service.client._client import Client

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),  # that is the point
]

CHILDREN = 6
CALLS = 5  # of each child
numbers = count(1)


@pytest.fixture(scope="module")
def nats():
    with NatsServer() as server:
        yield server


@pytest.fixture
def children(tmp_path):
    with forking(tmp_path) as family:
        yield family


@pytest.mark.once
@pytest.mark.parametrize("kind", ["local", "nats", "valkey"])
def test_children_have_connections_to_the_bus_of_their_own(kind, children, request):
    url = "local://forks" if kind == "local" else request.getfixturevalue(kind).url
    subject, heard = f"forks{next(numbers)}", set()

    def publish(spender):
        while not spender.ending:
            bus.publish(f"{subject}.noise", b"noise")
            spender.calls += 1
            until(lambda: bus.metrics().get("queued", 0) < 100, "room in the queue")

    def work():
        mine = str(os.getpid()).encode()
        assert bus.wait(10)
        bus.publish(subject, mine)
        until(lambda: mine in heard, "the arrival of a message of one's own")
        bus.close()
        return mine.decode()

    bus = open_bus(url)
    try:
        bus.subscribe(subject, lambda event: heard.add(event.payload))
        assert bus.wait(10)
        with spending(publish, threads=2) as spenders:
            for _ in range(CHILDREN):
                children.fork(work)
            said = {answer.encode() for answer in children.answers()}
            goes_on(spenders)
        if kind != "local":
            until(lambda: heard >= said, "the messages of the children")
        assert bus.metrics()["connections"] == 1
        assert bus.metrics()["dropped"] == 0
    finally:
        bus.close()


@pytest.mark.once
@pytest.mark.parametrize("lease", [None, "1s"], ids=["plain", "leased"])
def test_clients_of_the_service(lease, children, tmp_path):
    quota = 10_000_000
    with (
        serving(tmp_path, f"policies: {{api: {quota}/1d fixed_window}}\n") as service,
        Client(service.url, lease=lease) as client,
    ):

        def spend(spender):
            while not spender.ending:
                spender.saw(client.try_acquire("api", "k"))

        def work():
            taken = sum(client.try_acquire("api", "k").allowed for _ in range(CALLS))
            client.close()
            return taken

        with spending(spend, threads=2) as spenders:
            for _ in range(CHILDREN):
                children.fork(work)
            answers = children.answers()
            goes_on(spenders)
        client.close()
        assert answers == [CALLS] * CHILDREN
        used = sum(spender.taken for spender in spenders) + sum(answers)
        assert service.post("peek", {"policy": "api", "key": "k", "cost": 0}).json()["remaining"] == quota - used


def test_transports_keep_to_the_quota_together(children, tmp_path):
    provider = {"domain": "api.test", "limit": 1_000_000, "period": "1d", "algorithm": "fixed_window"}
    store, bus = f"sqlite:///{tmp_path / 'store.db'}?deadline=20s", "local://transports"
    inner = httpx.MockTransport(lambda _: httpx.Response(200))
    transport = RateLimitTransport(Providers.of(provider), store, inner, bus=bus)
    with httpx.Client(transport=transport) as client:

        def spend(spender):
            while not spender.ending:
                client.get("https://api.test/")
                spender.calls += 1

        def work():
            return [client.get("https://api.test/").status_code for _ in range(CALLS)]

        with spending(spend, threads=2) as spenders:
            for _ in range(CHILDREN):
                children.fork(work)
            answers = children.answers()
            goes_on(spenders)
        assert answers == [[200] * CALLS] * CHILDREN


def test_signers_of_messages(children):
    signer = MessageSigner("a secret of many letters", SystemClock())
    text = signer.write({"n": 1}, "subject")

    def spend(spender):
        while not spender.ending:
            with signer._lock:  # noqa: SLF001 - held most of the time, so that a fork meets it: 1 in 100 does otherwise
                for _ in range(10_000):
                    spender.calls += 1

    def work():
        return signer.read_new(text, 1000, "subject")["n"]

    with spending(spend, threads=3):
        for _ in range(CHILDREN):
            children.fork(work)
        assert children.answers() == [1] * CHILDREN


# ---- children that end as Python programs do, so that what they inherited is finalized ------------------------------

ENDING = """
import asyncio, os, sys, threading
from tests.servers.process import until
from tidegate import AsyncLimiter, Limiter
from tidegate.bus import open_bus

url, store, leave = sys.argv[1:]
heard = []
bus = open_bus(url)
bus.subscribe("ending", heard.append)
assert bus.wait(10)
plain = Limiter("1000/1d", store=store)
assert plain.try_acquire("k")
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
limiter = AsyncLimiter("1000/1d", store=store)
ask = lambda: asyncio.run_coroutine_threadsafe(limiter.try_acquire("k"), loop).result(20).allowed
assert ask()
child = os.fork()
if not child:
    if leave == "used":
        assert plain.try_acquire("k") and asyncio.run(limiter.try_acquire("k"))
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert ask() and plain.try_acquire("k")
bus.publish("ending", b"after")
until(lambda: [event.payload for event in heard] == [b"after"], "an event", 10)
print(bus.metrics()["connections"], limiter.store.store.metrics().get("failures"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("child", ["unused", "used"])
@pytest.mark.parametrize("kind", ["nats", "valkey"])
def test_a_child_that_exits_harms_no_connection_of_its_parent(kind, child, request):
    url = request.getfixturevalue(kind).url
    store = f"{request.getfixturevalue('valkey').url}?deadline=20s&prefix=ending{next(numbers)}"
    words = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDING, url, store, child]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("1 0\n", "")


def test_a_program_that_ends_without_closing_says_nothing(tmp_path):
    program = (
        "import sys; from tidegate import Limit, Limiter, Policy;"
        "policy = Policy('p', [Limit(100, 'day')], 'enforce', 'local');"
        "limiter = Limiter(policy, store=sys.argv[1]); assert limiter.try_acquire('k');"
        "show = lambda: limiter"  # in a cycle with the module, so that it is finalized late
    )
    words = [sys.executable, "-c", program, f"sqlite:///{tmp_path / 'store.db'}?deadline=20s"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- gunicorn -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lease", ["", "yes"], ids=["plain", "leased"])
@pytest.mark.parametrize("kind", ["sqlite", "valkey"])
def test_gunicorn_workers_share_the_limit_of_a_preloaded_application(kind, lease, request, tmp_path):
    if kind == "sqlite":
        store = f"sqlite:///{tmp_path / 'store.db'}?deadline=20s"
    else:
        store = f"{request.getfixturevalue('valkey').url}?deadline=20s&prefix=gunicorn{next(numbers)}"
    words, environment = ("--preload", "--workers", "2"), {"STORE": store, "LEASE": lease}
    with (
        serving_site("gunicorn", "preload_site:app", *words, **environment) as url,
        ThreadPoolExecutor(8) as threads,
    ):
        admitted, workers = 0, set()

        def get(path):
            return httpx.get(f"{url}{path}", timeout=20, trust_env=False)

        def ask():
            nonlocal admitted
            replies = list(threads.map(get, ["/"] * 20))
            assert {reply.status_code for reply in replies} <= {200, 429}
            admitted += sum(reply.status_code == 200 for reply in replies)
            return admitted >= 39  # one went to the parent

        def see_workers():
            workers.update(reply.text for reply in threads.map(get, ["/health"] * 8))
            return len(workers) == 2

        until(see_workers, "an answer of each worker")
        until(ask, "the use of all permits")  # what a worker holds unused comes back within a second
        ask()
        assert admitted == 39
