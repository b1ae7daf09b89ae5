"""A store that raises: requests are allowed or denied as configured."""

import json
import logging

import pytest
from prometheus_client import CollectorRegistry

from tests.servers.process import free_port
from tidegate.errors import StoreUnavailable
from tidegate.observe.prometheus import PrometheusObserver
from tidegate.stores import MemoryStore
from tidegate.stores._outage import GuardedStore


class BrokenStore(MemoryStore):
    """A third-party store that is unavailable."""

    def apply_one(self, *args, **kwargs):
        raise StoreUnavailable("no route to host")

    def apply(self, *args, **kwargs):
        raise StoreUnavailable("no route to host")

    def shortcut(self, policy, otherwise, live):
        return otherwise


class UncorrectableStore(MemoryStore):
    """A third-party store that raises an error of its own when a charge is corrected."""

    def apply(self, verb, *args, **kwargs):
        if verb == "adjust":
            raise OSError("connection reset")
        return super().apply(verb, *args, **kwargs)

    def apply_one(self, verb, *args, **kwargs):
        if verb == "adjust":
            raise OSError("connection reset")
        return super().apply_one(verb, *args, **kwargs)


def test_a_response_is_sent_even_if_its_charge_cannot_be_corrected(make_app, caplog):
    api = make_app({"categories": {"read": {"limit": 2, "count": [401]}}}, store=UncorrectableStore())
    assert api.statuses(3) == [200, 200, 429]  # what was not corrected stays charged
    assert "read: could not correct a charge: connection reset" in caplog.text


@pytest.mark.parametrize("extra", [{}, {"count": [401]}])
def test_requests_are_allowed_when_the_store_fails(make_app, caplog, extra):
    api = make_app({"categories": {"read": {"limit": 1, **extra}}}, store=BrokenStore())
    assert api.statuses(3) == [200] * 3
    assert [each.levelname for each in caplog.records if each.levelno > logging.INFO] == ["ERROR"] * 3
    assert "read: the store could not decide: no route to host" in caplog.text


@pytest.mark.parametrize("extra", [{}, {"count": [401]}])
def test_requests_get_503_when_the_store_fails_and_the_policy_denies(make_app, extra):
    api = make_app({"categories": {"read": {"limit": 1, "on_store_error": "deny", **extra}}}, store=BrokenStore())
    reply = api.request(headers=[("Accept", "application/json")])
    assert (reply.status, reply["retry-after"]) == (503, "1")
    assert json.loads(reply.body)["type"].endswith("#temporary-reduced-capacity")
    assert not api.reached


@pytest.mark.parametrize("options", [{}, {"lease": True}], ids=["plain", "leases"])
def test_one_logger_reports_an_outage(make_app, caplog, options):
    store = f"redis://127.0.0.1:{free_port()}"
    category = {"limit": 1, "algorithm": "token_bucket", "on_store_error": "deny"}
    api = make_app({"categories": {"read": category}}, store=store, clock=None, **options)
    assert api.request().status == 503
    lines = {record.getMessage().partition(":")[0]: record.name for record in caplog.records if record.levelno > 20}
    assert "store unavailable" in lines
    assert set(lines.values()) == {"tidegate.inbound"}


def test_one_logger_reports_an_outage_of_a_store_object(make_app, caplog):
    store = GuardedStore(BrokenStore(), background=False)
    make_app({"categories": {"read": {"limit": 1}}}, store=store).request()
    lines = {record.getMessage().partition(":")[0]: record.name for record in caplog.records if record.levelno > 20}
    assert lines["store unavailable"] == "tidegate.inbound"
    assert set(lines.values()) == {"tidegate.inbound"}


def test_a_store_that_was_never_reached_is_not_an_exceeded_limit(make_app, caplog):
    """With `on_store_error: local`, the default, a process that does not know its share denies."""
    registry = CollectorRegistry()
    store, observer = f"redis://127.0.0.1:{free_port()}", PrometheusObserver(registry)
    api = make_app({"categories": {"read": {"limit": 1}}}, store=store, observer=observer)
    reply = api.request()
    assert (reply.status, reply["retry-after"]) == (503, "1")
    assert reply.body == b"Rate limits cannot be checked at the moment. Try again later."
    lines = [record.getMessage() for record in caplog.records if record.name == "tidegate.inbound"]
    assert [line for line in lines if line.startswith("denied without the store: read: ")]
    assert not [line for line in lines if line.startswith("rate limit exceeded")]
    labels = {"policy": "read", "limit": "store-unavailable"}
    assert registry.get_sample_value("tidegate_denials_total", labels) == 1
