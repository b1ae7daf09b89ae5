"""A framework is one module: aiohttp is named nowhere else, and an unknown framework gets every feature from one."""

import ast
from pathlib import Path

import pytest

from tests.inbound.tiny_framework import Answer, AnswerError, Limits, RateLimitExceeded, serve
from tidegate import Denied
from tidegate.inbound import aiohttp, by_api_key, by_header, common_request, current_limits, limited
from tidegate.testing import ManualClock

PACKAGE = Path(aiohttp.__file__).parent


def names_in(tree):
    """Return all names, attributes, imports and short strings of a module; not its docstrings."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "module", "arg"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def test_no_other_module_knows_aiohttp():
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if any("aiohttp" in name.lower() for name in names_in(ast.parse(path.read_text())))
    }
    assert found == {"aiohttp.py"}


@pytest.fixture
def clock():
    return ManualClock(start=1_728_000_000)


@pytest.fixture
def limits(clock):
    return Limits(clock=clock)


def hello(call):
    return Answer(int(call.fields.get("status", 200)), "hello", {})


def test_a_handler_is_limited(limits, clock):
    handler = limits.limit(["2/1m", "3/1h"])(hello)
    answers = [serve(handler) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert [answer.fields["X-RateLimit-Remaining"] for answer in answers] == ["1", "0", "0"]
    assert answers[2].fields["Retry-After"] == "60"
    clock.advance(60)
    assert [serve(handler).status for _ in range(2)] == [200, 429]


def test_limits_are_decided_together(limits):
    handler = limits.limit("5/1h")(limits.limit("1/1m", key=by_header("x-user"))(hello))
    assert [serve(handler, x_user="ann").status for _ in range(5)] == [200, 429, 429, 429, 429]
    assert serve(handler, x_user="bob").fields["X-RateLimit-Remaining"] == "0"
    assert [serve(handler, x_user=user).status for user in "abcd"] == [200, 200, 200, 429]


def test_keys_costs_methods_and_exemptions(limits):
    handler = limits.limit(
        "4/1m",
        key=by_api_key(),
        cost=lambda call: 3 if call.verb == "POST" else 1,
        methods=["GET", "POST"],
        exempt_when=lambda call: "x-staff" in call.fields,
    )(hello)
    assert [serve(handler, "POST", x_api_key="a").status, serve(handler, "POST", x_api_key="a").status] == [200, 429]
    assert serve(handler, x_api_key="a").status == serve(handler, "PUT", x_api_key="a").status == 200
    assert (
        serve(handler, "POST", x_api_key="b").status == serve(handler, "POST", x_api_key="a", x_staff="1").status == 200
    )


def test_statuses_decide_what_counts(limits):
    handler = limits.limit("1/1m", count=[401])(hello)
    assert [serve(handler, status=status).status for status in ("200", "200", "401", "200")] == [200, 200, 401, 429]


def test_an_error_of_a_handler_counts_as_its_status(limits):
    def fail(call):
        raise AnswerError(Answer(401, "no", {})) if "bad" in call.fields else ValueError("broken")

    handler = limits.limit("1/1m", count=[401])(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            serve(handler)
    assert [serve(handler, bad="1").status for _ in range(2)] == [401, 429]


def test_denials_are_exceptions_of_the_framework_and_of_tidegate(limits):
    seen = []
    options = {"denied": lambda call, decision: {"path": call.where}, "on_denied": lambda *each: seen.append(each)}
    handler = limits.limit("1/1m", **options)(hello)
    assert serve(handler).status == 200
    assert serve(handler, where="/x").text == '{"path": "/x"}'
    assert [(call.where, decision.violated) for call, decision in seen] == [("/x", ("1m",))]
    assert issubclass(RateLimitExceeded, Denied)


def test_blocks_and_reading(limits):
    export = limits.limit("1/1m", scope="export")

    def handler(call):
        left = export.peek(call, cost=0).remaining
        with export.check(call):
            return Answer(200, f"{left} before", {})

    assert serve(handler).text == "1 before"
    assert serve(handler).status == 429


def test_blocked_clients(limits):
    handler = limits.limit("1/10s", block_after="2/1m", block_for="5m")(hello)
    assert [serve(handler).fields.get("Retry-After") for _ in range(4)] == [None, "10", "300", "300"]


def test_what_handlers_can_ask(limits):
    def handler(call):
        common = common_request(call)
        found = f"{common.method} {common.path} {common.address} {common.header('X-User')}"
        return Answer(200, f"{found} {current_limits(call)[0].remaining} {limited(call)}", {})

    decorated = limits.limit("1/1m", mode="shadow")(handler)
    assert serve(decorated, where="/a", x_user="ann").text == "GET /a 203.0.113.9 ann 0 False"
    assert serve(decorated, where="/a").text == "GET /a 203.0.113.9 None 0 True"


def test_concurrency_is_released_with_the_answer(limits):
    inner = []

    def handler(call):
        if "nested" not in call.fields:
            inner.append(serve(decorated, nested="1").status)
        return Answer(200, "done", {})

    decorated = limits.limit("1/1m concurrency")(handler)
    assert [serve(decorated).status for _ in range(2)] == [200, 200]
    assert inner == [429, 429]
