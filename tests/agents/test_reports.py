"""Reports for each node, tool and model add up to what was used; spans have the names of OpenTelemetry."""

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.agents.test_one_step import CountingStore
from tidegate import ConfigError
from tidegate.agents import AsyncRun, Credits, Run, RunDenied, charged, list_runs, sum_rows
from tidegate.agents._node import labels_of
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.stores._values import Write


def test_the_rows_of_a_report_add_up(store):
    prepaid = Credits("c", store=store)
    prepaid.add(1)
    run = Run("r", store=store, limits=["0.20/run unit=usd", "9/run unit=tool:web_search"], on_exhausted=prepaid)
    planner = run.child("planner")
    writer = run.child("writer", carve={"usd": "0.05"})
    planner.charge({"usd": "0.02"}, label="model:large")
    with planner.reserve({"usd": "0.05"}, label="model:large") as call:
        call.commit({"usd": "0.01"})
    planner.reserve({"usd": "0.05"}, label="model:large").cancel()
    planner.charge({"usd": "0.003", "tool:web_search": 1}, label="tool:web_search")
    writer.charge({"usd": "0.04"}, label="model:small")
    writer.charge({"usd": "0.002"})
    run.charge({"usd": "0.001"})

    def expect(carved):
        rows = run.report()
        assert sorted((row.node, row.tool, row.model, row.used.get("usd_micros")) for row in rows) == [
            ("r", "", "", 1_000),
            ("r/planner", "", "large", 30_000),
            ("r/planner", "web_search", "", 3_000),
            ("r/writer", "", "", 2_000),
            ("r/writer", "", "small", 40_000),
        ]
        (total,) = sum_rows(rows, ())
        used = run.usage().used
        assert total["requests"] == used["requests"] == 6
        assert total["usd_micros"] == 76_000
        assert used["usd_micros"] == 76_000 + carved
        return {row["model"]: row["usd_micros"] for row in sum_rows(rows, ["model"])}

    assert expect(carved=8_000) == {"": 6_000, "large": 30_000, "small": 40_000}
    writer.close()
    assert expect(carved=0) == {"": 6_000, "large": 30_000, "small": 40_000}
    with pytest.raises(ConfigError, match="must be some of node, tool, model"):
        sum_rows([], ["day"])


def test_a_call_with_a_label_is_one_call_of_the_store(store):
    counting = CountingStore(store)
    run = Run("r", store=counting, limits="9/run").child("c")
    for _ in range(2):
        before = counting.calls
        run.reserve(label="tool:x")
        assert counting.calls == before + 1
    with pytest.raises(ConfigError, match="printable"):
        run.charge(label="x\n")


def test_a_late_settlement_of_a_returned_carve_out_keeps_the_report_right(store):
    run = Run("r", store=store, limits="100/run unit=tokens")
    child = run.child("c", carve={"tokens": 50})
    held = child.reserve({"tokens": 30}, label="model:m")
    child.close()
    held.commit({"tokens": 12})
    assert run.usage().used["tokens"] == 12
    assert [(row.model, row.used["tokens"]) for row in run.report() if row.model] == [("m", 12)]


def test_too_many_labels_are_counted_without_one(memory):
    run = Run("r", store=memory, limits="99/run")
    collection = labels_of(run.id)
    for number in range(10_000):
        memory.apply("acquire", (), None, None, (Write(collection, f"x={number}", b"", 10**9, None),))
    run.charge(label="tool:late")
    assert run.usage().used == {"requests": 1}
    assert [row.tool for row in run.report()] == [""]


def test_models_and_tools_have_labels_of_their_own(memory):
    price = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}}
    providers = Providers.of({"domain": "api.example", "limits": ["100/1h"], "profile": "openai", "price": price})
    usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"usage": usage}))
    client = httpx.Client(transport=RateLimitTransport(providers, store="memory://", transport=transport))

    @charged({"usd": "0.01"})
    def web_search():
        return []

    with Run("r", store=memory, limits="1/run unit=usd") as run, client:
        web_search()
        client.post("https://api.example/v1/chat/completions", json={"model": "m", "max_tokens": 500, "messages": []})
    assert sorted((row.tool, row.model, row.used["usd_micros"]) for row in run.report()) == [
        ("", "m", 600),
        ("web_search", "", 10_000),
    ]
    assert [each.name for each in list_runs(memory)] == ["r"]


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    exporter.tracer = provider.get_tracer("test")
    return exporter


def test_spans_have_the_names_of_the_conventions(memory, spans):
    @charged({"tool:search": 1}, name="search")
    def search():
        return []

    limits = ["1/run unit=tool:search"]
    with Run("research", store=memory, limits=limits, tracer=spans.tracer) as run, run.child("planner") as planner:
        search()
        with pytest.raises(RunDenied):
            search()
    found = {span.name: dict(span.attributes) for span in spans.get_finished_spans()}
    assert found["invoke_agent planner"] == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "planner",
        "gen_ai.agent.id": planner.id,
        "tidegate.run.node": "research/planner",
    }
    assert found["execute_tool search"] == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "error.type": "RunDenied",
        "tidegate.run.denied_by": "research",
        "tidegate.run.limit": "tool:search-run",
    }
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert by_name["invoke_agent planner"].parent.span_id == by_name["invoke_agent research"].context.span_id
    assert by_name["execute_tool search"].parent.span_id == by_name["invoke_agent planner"].context.span_id


async def test_spans_of_tasks(memory, spans):
    async with AsyncRun("research", store=memory, limits="1/run", tracer=spans.tracer) as run:
        await run.charge()
        with pytest.raises(RunDenied):
            async with run.child("planner") as planner:
                await planner.charge()
    found = {span.name: dict(span.attributes) for span in spans.get_finished_spans()}
    assert found["invoke_agent planner"]["tidegate.run.denied_by"] == "research"
    assert "error.type" not in found["invoke_agent research"]
