"""What the soak calls in doubt is what happens: a client hangs up, and the store's reply to its call is lost."""

import asyncio
import json
import time

import pytest

from tests.servers.process import until
from tests.service.harness import serving
from tests.soak.connection import head
from tests.soak.effects import expected_effects
from tests.soak.journal import HUNG_UP, Journal
from tests.soak.ledger import FOREVER, MAX_REFUND, Outage, read_events
from tests.soak.targets import DEADLINE, open_target
from tidegate import Limiter, Policy

pytestmark = pytest.mark.once("redis")

WINDOW = "24/1d fixed_window"
PATIENT = "30s"  # a deadline that a loaded machine never reaches
HELD = 60.0  # seconds by which replies are late: none arrives before the connections are reset


@pytest.fixture(scope="module", params=["redis", "postgres"])
def target(request, tmp_path_factory):
    with open_target(request.param, tmp_path_factory.mktemp("target")) as target:
        yield target


@pytest.fixture(scope="module")
def running(target, tmp_path_factory):
    settings = f"store: {target.url.replace(DEADLINE, PATIENT)}\npolicies: {{window: {WINDOW}}}\n"
    with serving(tmp_path_factory.mktemp("service"), settings) as running:
        assert used_by_service(running, "connected") == 0
        # While the service reads the history of the dashboard, its calls could wait for each other's late replies.
        until(lambda: running.get("/v1/overview").json()["marks"], "the end of the start")
        yield running


@pytest.fixture(scope="module")
def limiter(target):
    """A limiter on the same store, whose connection is not disturbed."""
    direct = target.url.replace(f":{target.proxy.port}", f":{target.proxy.target}")
    with Limiter(Policy("window", [WINDOW]), store=direct) as limiter:
        yield limiter


def used_by_service(running, key):
    reply = running.post("usage", {"policy": "window", "key": key})
    return reply.json()["limits"][0]["used"] if reply.status_code == 200 else None


def wait_for_usage(limiter, key, used):
    until(lambda: limiter.usage(key)["1d"].used == used, f"a usage of {used}")


async def hang_up_when_charged(port, key, limiter):
    """Ask for a batch of 5 permits, hang up when the server has charged it; return the events of the journal."""
    events = []
    journal = Journal(events.append)
    batch = {"asks": [{"policy": "window", "key": key, "cost": cost} for cost in (2, 3)]}
    content = json.dumps(batch).encode()
    fields = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = journal.sent("batch", expected_effects("batch", batch, {}))
    writer.write(head("POST", "/v1/batch", fields) + content)
    await asyncio.to_thread(wait_for_usage, limiter, key, 5)
    writer.write_eof()
    assert await reader.read() == b""  # no answer
    journal.ended(number, HUNG_UP)
    writer.close()
    return events


def balance_of(events, *outages):
    (balance,) = read_events([events], outages).values()
    return balance


def test_a_charge_whose_reply_is_lost_after_its_client_hung_up_stays_and_is_in_doubt(target, running, limiter):
    target.proxy.faults.delay = HELD
    events = asyncio.run(hang_up_when_charged(running.port, "lost", limiter))
    ended, begin = events[-1][2], time.monotonic_ns()
    assert balance_of(events).hung_up == 5  # the client has seen the end of its connection, and no outage
    target.proxy.faults.delay = 0.0
    target.proxy.reset()
    # During the outage, the service reports a closed limit: 24 of 24.
    until(lambda: used_by_service(running, "lost") not in (None, 24), "the end of the outage")
    assert used_by_service(running, "lost") == 5
    assert balance_of(events, Outage("resets", min(begin, ended + MAX_REFUND), FOREVER)).holds(5)
    assert not balance_of(events, Outage("resets", ended + MAX_REFUND + 1, FOREVER)).holds(5)


def test_a_charge_whose_reply_is_late_is_refunded_after_its_client_hung_up(target, running, limiter):
    target.proxy.faults.delay = 0.2  # of the reply that the client does not wait for, and of that to the refund
    events = asyncio.run(hang_up_when_charged(running.port, "late", limiter))
    wait_for_usage(limiter, "late", 0)
    assert balance_of(events).holds(0)
    assert not balance_of(events).holds(1)  # a leak
