"""Milestones and denials: logged once, and posted to a webhook."""

import hashlib
import hmac
import json
import logging
import sqlite3
from contextlib import closing

import pytest

from tests.budget.polling import wait_until
from tests.budget.receiver import run_receiver
from tests.outbound.sources.hostile import HostileServer, endlessly, slowly
from tidegate.spending._webhook import MAX_QUEUED_WARNINGS, Webhook
from tidegate.testing import ManualClock


@pytest.fixture
def receiver():
    with run_receiver() as server:
        yield server


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.DEBUG, "tidegate.budget")
    return lambda level=logging.INFO: [
        record.getMessage() for record in caplog.records if record.name == "tidegate.budget" and record.levelno >= level
    ]


def test_milestones_are_logged_once_each(open_budget, messages, clock):
    budget = open_budget(per_hour=100)
    for _ in range(100):
        budget.check_all_limits(1)
        budget.record_completed_tasks(1)
    assert messages() == [
        "at least 50 % of the tier hour is used: 50 of 100",
        "at least 80 % of the tier hour is used: 80 of 100",
        "at least 95 % of the tier hour is used: 95 of 100",
    ]
    clock.advance(3600)
    budget.check_all_limits(10)
    budget.check_all_limits(60)
    assert messages()[3:] == ["at least 50 % of the tier hour is used: 70 of 100"]  # again, after usage had fallen


def test_milestones_are_logged_again_in_a_new_fixed_window(open_budget, messages, clock):
    budget = open_budget(per_hour=100, strategy="fixed", batch_ttl="1d")
    budget.check_all_limits(60)
    budget.check_all_limits(1)
    clock.advance(3600)
    budget.check_all_limits(55)
    budget.check_all_limits(1)
    assert messages() == [
        "at least 50 % of the tier hour is used: 60 of 100",
        "at least 50 % of the tier hour is used: 55 of 100",
    ]


def test_a_jump_over_several_milestones_logs_each(open_budget, messages):
    budget = open_budget(per_hour=100)
    budget.record_completed_tasks(97)
    budget.get_current_usage()
    assert messages() == [f"at least {milestone} % of the tier hour is used: 97 of 100" for milestone in (50, 80, 95)]


def test_a_window_that_stays_around_a_milestone_logs_it_once(open_budget, messages, clock):
    budget = open_budget(per_minute=10, batch_ttl="1h")
    for _ in range(20):  # 5 and 6 in turn are used
        budget.check_all_limits(6)
        budget.cancel()
        budget.check_all_limits(4)
        budget.cancel()
    assert messages() == ["at least 50 % of the tier minute is used: 6 of 10"]


def test_denials_are_logged_when_they_start(open_budget, messages, clock):
    budget = open_budget(per_minute=10, milestones=())
    budget.check_all_limits(10)
    for _ in range(3):
        budget.check_all_limits(1)
    warned = "rate limit exceeded: 10 of 10 tasks per minute are used: 1 task must wait, try again in 60.000 s"
    assert messages() == [warned]
    assert [message for message in messages(logging.DEBUG) if " took " not in message] == [warned] * 3
    clock.advance(60)
    budget.check_all_limits(10)
    budget.check_all_limits(1)
    assert messages() == [warned] * 2


def test_warnings_are_posted_and_signed(open_budget, receiver, path):
    budget = open_budget(per_hour=10, webhook=receiver.url, secret="s3cret", deadline=0.3)  # noqa: S106 - of a test
    budget.check_all_limits(8)
    budget.check_all_limits(8)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        budget.check_all_limits(1)
        other.execute("ROLLBACK")
    wait_until(lambda: not budget.lost, "the database answers again")
    budget.get_current_usage()
    wait_until(lambda: len(receiver.requests) == 5, "five warnings arrived")
    warnings = [json.loads(body) for _, body in receiver.requests]
    assert [(warning["event"], warning.get("tier"), warning["budget"]) for warning in warnings] == [
        ("milestone", "hour", "tasks"),
        ("milestone", "hour", "tasks"),
        ("limit_exceeded", "hour", "tasks"),
        ("database_lost", None, "tasks"),
        ("database_restored", None, "tasks"),
    ]
    assert [(warning["milestone"], warning["used"], warning["quota"]) for warning in warnings[:2]] == [
        (50, 8, 10),
        (80, 8, 10),
    ]
    assert warnings[2]["wait"] == 3600.0
    for headers, body in receiver.requests:
        signed = headers["X-Tidegate-Timestamp"].encode() + b"." + body
        expected = hmac.new(b"s3cret", signed, hashlib.sha256).hexdigest()
        assert headers["X-Tidegate-Signature"] == f"sha256={expected}"
        assert headers["Content-Type"] == "application/json"


def test_a_retried_warning_keeps_its_delivery_id(receiver):
    receiver.statuses = [500, 302, 429]
    webhook = Webhook(receiver.url, clock=ManualClock(start=1000))
    webhook.send({"event": "milestone"})
    wait_until(lambda: webhook.sent, "it was accepted")
    assert len({headers["X-Tidegate-Delivery"] for headers, _ in receiver.requests}) == 1
    assert [headers["X-Tidegate-Timestamp"] for headers, _ in receiver.requests] == ["1000", "1001", "1003", "1007"]
    assert "X-Tidegate-Signature" not in receiver.requests[0][0]
    assert (webhook.retried, webhook.dropped) == (3, 0)
    webhook.close()


def test_a_warning_is_dropped_after_the_last_retry(receiver, messages):
    receiver.statuses = [500] * 5
    webhook = Webhook(receiver.url, clock=ManualClock(start=1000))
    webhook.send({"event": "first"})
    webhook.send({"event": "second"})
    wait_until(lambda: webhook.sent, "the second was accepted")
    assert webhook.dropped == 1
    assert json.loads(receiver.requests[-1][1])["event"] == "second"
    assert messages() == ["dropped an event that could not be posted to the webhook: it responded with status 500"]
    webhook.close()


def test_a_hanging_receiver_does_not_delay_checks(open_budget, receiver):
    receiver.may_respond.clear()
    budget = open_budget(per_minute=1000, webhook=receiver.url, milestones=(1,))
    webhook = budget.operations.webhook
    for _ in range(MAX_QUEUED_WARNINGS + 50):  # denials start again in each round
        assert budget.check_all_limits(10)
        budget.cancel()
        assert not budget.check_all_limits(1001)
    assert receiver.requests == []
    assert webhook.dropped >= 40
    receiver.may_respond.set()
    wait_until(lambda: webhook.sent, "warnings are posted again")


def test_warnings_that_a_hanging_receiver_did_not_accept_before_the_end_are_counted(receiver, messages, monkeypatch):
    monkeypatch.setattr("tidegate.spending._webhook.CLOSE_TIMEOUT", 0.01)
    receiver.may_respond.clear()
    webhook = Webhook(receiver.url)
    for number in range(3):
        webhook.send({"number": number})
    wait_until(lambda: receiver.arrived, "the first request was sent")
    webhook.close()
    assert webhook.dropped == 3
    assert messages(logging.WARNING) == ["dropped 3 events that the webhook did not accept within 0.01 s"]
    receiver.may_respond.set()
    wait_until(lambda: receiver.requests, "the first request ends")
    webhook.close()
    assert (webhook.sent, webhook.dropped, len(receiver.requests)) == (0, 3, 1)


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"\x00\x01garbage\r\n\r\n", id="no HTTP response"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, id="too many headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, id="a header too long"),
        pytest.param(b"HTTP/1.1 999999999999999999999 OK\r\n\r\n", id="a status too large"),
    ],
)
def test_a_malformed_response_does_not_end_the_warnings(piece, messages):
    responses = iter([piece] * 5)

    async def script(_path, _headers):
        yield next(responses, b"HTTP/1.1 204 OK\r\n\r\n")

    with HostileServer(script) as server:
        webhook = Webhook(f"{server.url}/hook?token=hunter2", clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        wait_until(lambda: webhook.dropped, "it was dropped")
        webhook.send({"warning": "two"})
        wait_until(lambda: webhook.sent, "the second was accepted")
        webhook.close()
    assert "its response is malformed" in messages(logging.WARNING)[0]
    assert "hunter2" not in str(messages())


def test_a_dripping_response_ends_with_the_timeout(messages):
    async def script(_path, _headers):
        yield b"HTTP/1.1 200 OK\r\nX-Header: "
        async for piece in slowly(b"x"):
            yield piece

    with HostileServer(script) as server:
        webhook = Webhook(server.url, timeout=0.1, clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        wait_until(lambda: webhook.dropped, "it was dropped")
        webhook.close()
    (warning,) = messages(logging.WARNING)
    assert warning.endswith(("the response took too long", "timed out"))


def test_the_body_of_a_response_is_not_read():
    async def script(_path, _headers):
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        async for piece in endlessly(b"x" * 65_536):
            yield piece

    with HostileServer(script) as server:
        webhook = Webhook(server.url, clock=ManualClock(start=1000))
        webhook.send({"warning": "one"})
        wait_until(lambda: webhook.sent, "it was accepted")
        webhook.close()
        assert server.sent < 20 * 2**20


def test_a_refused_connection_is_logged(messages):
    webhook = Webhook("http://127.0.0.1:1/", clock=ManualClock(start=1000))
    webhook.send({"event": "milestone"})
    wait_until(lambda: webhook.dropped, "it was dropped")
    assert "Connection refused" in messages()[0]
    webhook.close()
