"""The panel of applications, read from real admin endpoints."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from flask import Flask

from tidegate.clock import ManualClock
from tidegate.errors import ConfigError
from tidegate.inbound.flask import limit
from tidegate.inbound.wsgi import RateLimitMiddleware
from tidegate.service.config.settings import load_settings
from tidegate.service.dashboard.applications import MAX_AGE, ApplicationsPanel, describe_statistics

TOKEN = "the-token-of-the-application"  # noqa: S105 - of this test
PATH = "/api/admin/rate-limit-stats"


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *_):
        """Write no access log."""


@contextmanager
def serve(application):
    with make_server("127.0.0.1", 0, application, handler_class=QuietHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}{PATH}"
        finally:
            server.shutdown()
            thread.join()


def limited_application():
    app = Flask(__name__)

    @app.get("/login")
    @limit("1/1h")
    def log_in():
        return "hello"

    rules = {"categories": {"items": {"limits": ["3/1h"], "endpoints": ["/items"]}}}
    app.wsgi_app = RateLimitMiddleware(app.wsgi_app, rules, admin_token=TOKEN)
    app.get("/items")(lambda: "items")
    client = app.test_client()
    for path, count in (("/items", 5), ("/login", 4)):
        for _ in range(count):
            client.get(path)
    return app


async def test_categories_and_routes_of_an_application():
    clock = ManualClock()
    with serve(limited_application()) as url:
        panel = ApplicationsPanel((url,), TOKEN, clock)
        rows = await panel()
    assert {row["application"] for row in rows} == {url.removeprefix("http://").removesuffix(PATH)}
    (category,) = [row for row in rows if row["name"] == "items"]
    assert (category["clients"], category["allowed"], category["denied"]) == (1, 3, 2)
    (route,) = [row for row in rows if "log_in" in row["name"]]
    assert (route["denied"], route["allowed"]) == (3, None)
    assert rows[0] is route  # the most denials first
    assert await panel() is rows  # at most once in MAX_AGE
    clock.advance(MAX_AGE / 1_000_000)
    (row,) = await panel()
    assert "refused" in row["error"]  # the application has ended


def answering(status, body, headers=()):
    def application(_, start_response):
        start_response(status, [*headers])
        return [body]

    return application


@pytest.mark.parametrize(
    ("application", "reason"),
    [
        (answering("403 Forbidden", b"{}"), "its admin endpoint responded with status 403"),
        (answering("302 Found", b"", [("Location", "/")]), "its admin endpoint responded with status 302"),
        (answering("200 OK", b"<html>"), "its admin endpoint did not respond with JSON"),
        (answering("200 OK", b"[" * 100_000), "its admin endpoint did not respond with JSON"),
        (answering("200 OK", b"[]"), "list indices"),
        (answering("200 OK", json.dumps({"by_category": {}, "decisions": 7}).encode()), "'int' object"),
    ],
)
async def test_an_application_that_answers_something_else_is_shown_with_the_reason(application, reason):
    with serve(application) as url:
        (row,) = await ApplicationsPanel((url,), None, ManualClock())()
    assert reason in row["error"]


def test_rows_and_names_are_bounded():
    decisions = {f"{number}-{'x' * 5000}": {"allowed": 1, "denied": number} for number in range(500)}
    rows = describe_statistics({"by_category": {}, "decisions": decisions})
    assert len(rows) == 100
    assert max(len(row["name"]) for row in rows) == 200
    assert rows[0]["denied"] == 499


def test_the_setting():
    settings = load_settings({"applications": f"http://127.0.0.1:8000{PATH}", "applications_token": TOKEN})
    assert settings.applications == (f"http://127.0.0.1:8000{PATH}",)
    assert TOKEN not in repr(settings)
    with pytest.raises(ConfigError, match="expected a URL such as http"):
        load_settings({"applications": ["127.0.0.1:8000"]})
