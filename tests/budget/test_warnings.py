"""Milestones and refusals: logged once, and posted to whoever wants to know."""

import hashlib
import hmac
import json
import logging
import sqlite3
from contextlib import closing

import pytest

from tests.budget.receiver import receiving
from tests.budget.waiting import until
from tests.outbound.sources.hostile import HostileServer, endlessly, slowly
from tidegate.budget.webhook import Webhook
from tidegate.testing import ManualClock


@pytest.fixture
def receiver():
    with receiving() as server:
        yield server


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.DEBUG, "tidegate.budget")
    return lambda level=logging.INFO: [
        record.getMessage() for record in caplog.records if record.name == "tidegate.budget" and record.levelno >= level
    ]


def test_milestones_are_logged_once_each(open_budget, said, clock):
    budget = open_budget(per_hour=100)
    for _ in range(100):
        budget.check_all_limits(1)
        budget.record_completed_tasks(1)
    assert said() == [
        "50 % of the tier hour are used: 50 of 100",
        "80 % of the tier hour are used: 80 of 100",
        "95 % of the tier hour are used: 95 of 100",
    ]
    clock.advance(3600)
    budget.check_all_limits(10)
    budget.check_all_limits(60)
    assert said()[3:] == ["50 % of the tier hour are used: 70 of 100"]  # again, after it had fallen


def test_milestones_are_new_in_a_new_fixed_window(open_budget, said, clock):
    budget = open_budget(per_hour=100, strategy="fixed", batch_ttl="1d")
    budget.check_all_limits(60)
    budget.check_all_limits(1)
    clock.advance(3600)
    budget.check_all_limits(55)
    budget.check_all_limits(1)
    assert said() == ["50 % of the tier hour are used: 60 of 100", "50 % of the tier hour are used: 55 of 100"]


def test_a_leap_over_several_milestones_tells_each(open_budget, said):
    budget = open_budget(per_hour=100)
    budget.record_completed_tasks(97)
    budget.get_current_usage()
    assert said() == [f"{milestone} % of the tier hour are used: 97 of 100" for milestone in (50, 80, 95)]


def test_a_window_that_hovers_around_a_milestone_tells_it_once(open_budget, said, clock):
    budget = open_budget(per_minute=10, batch_ttl="1h")
    for _ in range(20):  # 5 and 6 in turn are used
        budget.check_all_limits(6)
        budget.cancel()
        budget.check_all_limits(4)
        budget.cancel()
    assert said() == ["50 % of the tier minute are used: 6 of 10"]


def test_refusals_are_logged_when_they_begin(open_budget, said, clock):
    budget = open_budget(per_minute=10, milestones=())
    budget.check_all_limits(10)
    for _ in range(3):
        budget.check_all_limits(1)
    warned = "rate limit exceeded: 10 of 10 tasks per minute are used: 1 tasks must wait, try again in 60.000 s"
    assert said() == [warned]
    assert said(logging.DEBUG) == [warned] * 3
    clock.advance(60)
    budget.check_all_limits(10)
    budget.check_all_limits(1)
    assert said() == [warned] * 2


def test_warnings_are_posted_and_signed(open_budget, receiver, path):
    budget = open_budget(per_hour=10, webhook_url=receiver.url, webhook_secret="s3cret", deadline=0.3)  # noqa: S106 - of a test
    budget.check_all_limits(8)
    budget.check_all_limits(8)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        budget.check_all_limits(1)
        other.execute("ROLLBACK")
    until(lambda: not budget.lost, "the database is back")
    budget.get_current_usage()
    until(lambda: len(receiver.requests) == 5, "five warnings arrived")
    told = [json.loads(body) for _, body in receiver.requests]
    assert [(warning["event"], warning.get("tier"), warning["budget"]) for warning in told] == [
        ("milestone", "hour", "tasks"),
        ("milestone", "hour", "tasks"),
        ("limit_exceeded", "hour", "tasks"),
        ("database_lost", None, "tasks"),
        ("database_back", None, "tasks"),
    ]
    assert [(warning["milestone"], warning["used"], warning["quota"]) for warning in told[:2]] == [
        (50, 8, 10),
        (80, 8, 10),
    ]
    assert told[2]["wait"] == 3600.0
    for headers, body in receiver.requests:
        signed = headers["X-Tidegate-Timestamp"].encode() + b"." + body
        expected = hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()
        assert headers["X-Tidegate-Signature"] == f"sha256={expected}"
        assert headers["Content-Type"] == "application/json"


def test_a_warning_is_tried_again_as_the_same_delivery(receiver):
    receiver.answers = [500, 302, 429]
    webhook = Webhook(receiver.url, clock=ManualClock(start=1000))
    webhook.send({"event": "milestone"})
    until(lambda: webhook.sent, "it was taken")
    assert len({headers["X-Tidegate-Delivery"] for headers, _ in receiver.requests}) == 1
    assert [headers["X-Tidegate-Timestamp"] for headers, _ in receiver.requests] == ["1000", "1001", "1003", "1007"]
    assert "X-Tidegate-Signature" not in receiver.requests[0][0]
    assert (webhook.retried, webhook.dropped) == (3, 0)
    webhook.close()


def test_a_warning_that_nobody_takes_is_dropped(receiver, said):
    receiver.answers = [500] * 5
    webhook = Webhook(receiver.url, clock=ManualClock(start=1000))
    webhook.send({"event": "first"})
    webhook.send({"event": "second"})
    until(lambda: webhook.sent, "the second was taken")
    assert webhook.dropped == 1
    assert json.loads(receiver.requests[-1][1])["event"] == "second"
    assert said() == ["a warning could not be posted to the webhook, and is dropped: it answered 500"]
    webhook.close()


def test_a_receiver_that_hangs_is_not_in_the_way_of_checks(open_budget, receiver):
    receiver.gate.clear()
    budget = open_budget(per_minute=1000, webhook_url=receiver.url, milestones=(1,))
    budget.webhook._most = 5  # noqa: SLF001 - a queue that is soon full
    for _ in range(50):  # each begins to be refused anew
        assert budget.check_all_limits(10)
        budget.cancel()
        assert not budget.check_all_limits(1001)
    assert receiver.requests == []
    assert budget.webhook.dropped >= 40
    receiver.gate.set()
    until(lambda: budget.webhook.sent, "it goes on")


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"\x00\x01garbage\r\n\r\n", id="no answer of HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, id="too many headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, id="a header too long"),
        pytest.param(b"HTTP/1.1 999999999999999999999 OK\r\n\r\n", id="a status too large"),
    ],
)
def test_a_malformed_answer_does_not_end_the_warnings(piece, said):
    answers = iter([piece] * 5)

    async def script(_path, _headers):
        yield next(answers, b"HTTP/1.1 204 OK\r\n\r\n")

    with HostileServer(script) as server:
        webhook = Webhook(f"{server.url}/hook?token=hunter2", clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        until(lambda: webhook.dropped, "it gave up")
        webhook.send({"warning": "two"})
        until(lambda: webhook.sent, "the second was taken")
        webhook.close()
    assert "its answer is malformed" in said(logging.WARNING)[0]
    assert "hunter2" not in str(said())


def test_an_answer_that_drips_ends_with_the_timeout(said):
    async def script(_path, _headers):
        yield b"HTTP/1.1 200 OK\r\nX-Header: "
        async for piece in slowly(b"x"):
            yield piece

    with HostileServer(script) as server:
        webhook = Webhook(server.url, timeout=0.1, clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        until(lambda: webhook.dropped, "it gave up")
        webhook.close()
    (warning,) = said(logging.WARNING)
    assert warning.endswith(("its answer took too long", "timed out"))


def test_the_body_of_an_answer_is_not_read():
    async def script(_path, _headers):
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        async for piece in endlessly(b"x" * 65_536):
            yield piece

    with HostileServer(script) as server:
        webhook = Webhook(server.url, clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        until(lambda: webhook.sent, "it was taken")
        webhook.close()
        assert server.sent < 20 * 2**20


def test_nobody_there(said):
    webhook = Webhook("http://127.0.0.1:1/", clock=ManualClock(start=1000))
    webhook.send({"event": "milestone"})
    until(lambda: webhook.dropped, "it gave up")
    assert "Connection refused" in said()[0]
    webhook.close()
