"""Metrics, the overview, the access log and OpenTelemetry spans."""

import json

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.egress.harness import KEY, running
from tests.outbound.flows import Failing
from tests.outbound.server import Answer, as_json
from tidegate.egress._tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_metrics_count_by_caller_and_provider(upstream):
    async with running(upstream.url, limits=["2/1h"]) as gateway:
        for _ in range(3):
            await gateway.get("/up/x", headers={"X-Tidegate-Timeout": "0"})
        status, headers, body = await gateway.get("/metrics")
        assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        lines = body.decode().splitlines()
        labels = '{caller="local",provider="up"}'
        assert f"tidegate_egress_requests_total{labels} 2" in lines
        assert f"tidegate_egress_denied_total{labels} 1" in lines
        assert f"tidegate_egress_active{labels} 0" in lines
        assert f"tidegate_egress_first_byte_seconds_count{labels} 2" in lines
        overview = json.loads((await gateway.get("/v1/overview"))[2])["panels"]["egress"]
        assert overview["rules"] == {"adopted": 0, "refused": 0, "error": None, "since": None}
        assert overview["rows"][0]["requests"] == 2


async def test_the_overview_has_the_members_of_pools(upstream):
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 100, "completion_tokens": 30}})
    pool = {"members": [{"name": "a", "api_key": KEY}, {"name": "b", "api_key": "other", "drain": True}]}
    price = {"date": "2026-11-01", "models": {"m": {"input": 10, "output": 50}}}
    fields = {"profile": "openai", "limits": ["5/1h"], "key": {"header": "X-Key"}, "price": price, "pool": pool}
    async with running(upstream.url, **fields) as gateway:
        await gateway.send("POST", "/up/v1/chat/completions", json={"model": "m", "max_tokens": 50})
        panels = json.loads((await gateway.get("/v1/overview"))[2])["panels"]
    names = ("pool", "member", "state", "refused", "cost_micros", "currency")
    assert [tuple(member[name] for name in names) for member in panels["pools"]] == [
        ("up", "a", "ready", 0, 2500, "usd"),
        ("up", "b", "drained", 0, 0, "usd"),
    ]
    assert [limit["remaining"] for member in panels["pools"] for limit in member["limits"]] == [4, 5]
    assert KEY not in json.dumps(panels)


async def test_the_overview_says_that_the_store_is_unavailable_and_still_shows_the_callers(upstream):
    store = Failing()
    async with running(upstream.url, store=store, pool={"members": [{"name": "a"}]}) as gateway:
        await gateway.get("/up/x")
        store.fail = True
        status, _, body = await gateway.get("/v1/overview")
    panels = json.loads(body)["panels"]
    assert (status, panels["egress"]["rows"][0]["requests"]) == (200, 1)
    assert panels["pools"] == {"error": "lost"}


async def test_the_access_log_has_one_line_for_each_call_without_its_query(upstream, tmp_path):
    file = tmp_path / "access.log"
    upstream.respond = lambda _request: as_json({"usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    settings = {"access_log": str(file)}
    async with running(upstream.url, settings, profile="openai", limits=["5/1m", "9000/1m unit=tokens"]) as gateway:
        await gateway.send("POST", "/up/v1/chat/completions?secret=1", json={"model": "m", "max_tokens": 9})
        await gateway.get("/healthz")
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["caller"], line["provider"], line["method"], line["status"]) == ("local", "up", "POST", 200)
    assert line["path"] == "/v1/chat/completions"
    assert line["used"] == {"input": 3, "output": 4}
    assert line["reserved"]["requests"] == 1
    assert line["attempts"] == 1
    assert line["first_byte"] <= line["duration"]


async def test_the_traceparent_is_passed_on_unchanged_without_telemetry(upstream):
    async with running(upstream.url) as gateway:
        await gateway.get("/up/x", headers={"traceparent": PARENT})
    assert upstream.requests[0].headers["traceparent"] == PARENT


async def test_a_span_is_the_child_of_the_caller_and_the_parent_of_the_provider(upstream):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    upstream.respond = lambda _request: Answer(503, (), (b"",))
    async with running(upstream.url, {"telemetry": True}) as gateway:
        gateway.gateway.use_tracing(Tracing(provider.get_tracer("test")))
        await gateway.get("/up/v1/x?key=secret", headers={"traceparent": PARENT})
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert upstream.requests[0].headers["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"
    assert span.attributes["tidegate.provider"] == "up"
    assert span.attributes["http.response.status_code"] == 503
    assert not span.status.is_ok
    assert "secret" not in str(span.to_json())
