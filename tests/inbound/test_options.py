"""The tables of docs/reference/inbound.md name each option; combinations of options that have no use are refused."""

import inspect
import re
from pathlib import Path

import pytest

from tests.cases import cases
from tidegate import ConfigError
from tidegate.inbound import LimitsOptions, Options, RouteOptions, aiohttp, asgi, flask, wsgi

PAGE = Path(__file__).parents[2] / "docs/reference/inbound.md"


def options_in_table(start):
    """Return the options that a table of the page names in the first cell of its rows."""
    _, found, table = PAGE.read_text().partition(f"\n| {start}")
    assert found
    rows = table.split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([a-z0-9_]+)`", row.split("|")[1])}


def parameters(function):
    return {name for name in inspect.signature(function).parameters if name not in ("self", "app", "limits", "options")}


def test_each_option_of_a_limit_is_in_the_table():
    names = options_in_table("`limit(limits, …)` of a route")
    assert names == set(RouteOptions.__annotations__) == parameters(flask.limit.__init__)


def test_each_option_of_a_middleware_is_in_the_table():
    names = options_in_table("`RateLimitMiddleware(app, …)`")
    own = set(LimitsOptions.__annotations__) | set(Options.__annotations__)
    assert names == own | parameters(wsgi.RateLimitMiddleware.__init__)
    assert parameters(wsgi.RateLimitMiddleware.__init__) == parameters(asgi.RateLimitMiddleware.__init__)


def test_each_option_without_a_middleware_is_in_the_table():
    names = options_in_table("`Limits(…)` without a middleware")
    assert names == set(LimitsOptions.__annotations__) | parameters(flask.Limits.__init__)


@cases(
    ("options", "message"),
    [
        ({"mode": "shadow", "denied": lambda request, decision: None}, "denied: cannot be combined with mode='shadow'"),
        ({"mode": "shadow", "on_denied": lambda request, decision: None}, "on_denied: cannot be combined with mode"),
        ({"mode": "shadow", "block_after": {"3/1m": "1h"}}, "block_after: cannot be combined with mode='shadow'"),
        ({"per_method": True, "methods": ["POST"]}, "per_method: cannot be combined with `methods` of one method"),
        ({"methods": []}, "methods: must be methods such as"),
        ({"count": []}, r"count: must be statuses such as \[401, '5xx'\], not empty"),
        ({"cost": 5}, "cost: 5 is more than the limit 3/1m .* can ever allow"),
        ({"as_default": True}, None),
    ],
)
def test_options_of_a_limit_that_make_no_sense_together_are_refused(options, message):
    if message is None:
        assert flask.limit("3/1m", **options)
        return
    with pytest.raises(ConfigError, match=message):
        flask.limit("3/1m", **options)


def test_a_limit_of_0_takes_any_cost():
    assert flask.limit("0/1m", cost=5)


@cases(
    ("options", "message"),
    [
        ({"admin": False, "admin_token": "x" * 16}, "admin_token: cannot be combined with admin=False"),
        ({"reset_time": "next", "headers": "ietf"}, "reset_time: cannot be combined with headers='ietf'"),
        ({"reset_time": "next", "headers": "none"}, "reset_time: cannot be combined with headers='none'"),
        ({"block_for": "1m"}, "block_for: requires block_after"),
        ({"on_message": "drop"}, "on_message: needs the ASGI middleware"),
    ],
)
def test_options_of_a_middleware_that_make_no_sense_together_are_refused(options, message):
    def app(*_):
        """Do nothing."""

    for kind in (lambda **each: wsgi.RateLimitMiddleware(app, **each), aiohttp.RateLimitMiddleware):
        with pytest.raises(ConfigError, match=message):
            kind(**options)
    if "on_message" not in options:
        with pytest.raises(ConfigError, match=message):
            asgi.RateLimitMiddleware(app, **options)
