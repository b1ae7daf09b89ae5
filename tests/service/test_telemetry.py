"""OpenTelemetry: what the service and the observer tell, read back by the SDK; and the farewell of a process."""

import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.servers.process import free_port, until
from tests.service.harness import ROOT, Site
from tidegate import Limiter, Policy
from tidegate.observe.otel import OpenTelemetryObserver
from tidegate.service.runtime.telemetry import Telemetry
from tidegate.testing import ManualClock


class Told:
    """A provider, and what was told to it."""

    def __init__(self):
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.meter = self._provider.get_meter("test")

    def read(self):
        """Every value, by the metric's name and its attributes."""
        found = {}
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        found[metric.name, tuple(sorted(point.attributes.values()))] = point.value
        return found

    def close(self):
        self._provider.shutdown()


@pytest.fixture
def told():
    it = Told()
    yield it
    it.close()


async def test_the_service_tells_what_it_counts(told):
    async with Site(policies={"api": "2/1h", "quiet": {"limits": "1/1h", "mode": "shadow"}}) as site:
        Telemetry(site.app, told.meter)
        for _ in range(3):
            await site.post("acquire", {"policy": "api", "key": "k"})
            await site.post("acquire", {"policy": "quiet", "key": "k"})
        await site.post("acquire", {"policy": "nope", "key": "k"})
        assert site.decider.fast_path("api") is not None  # nothing is added to a decision
        found = told.read()
        assert found["tidegate.decisions", ("allowed", "api")] == 2
        assert found["tidegate.decisions", ("api", "denied")] == 1
        assert found["tidegate.decisions", ("quiet", "shadow")] == 2
        assert found["tidegate.denials", ("1h", "api")] == 1
        assert found["tidegate.problems", ("unknown-policy",)] == 1
        assert found["tidegate.waiting", ()] == 0
        assert found["tidegate.requests.in_flight", ()] == 0
        names = {name for metric, names in found for name in names if metric == "tidegate.store"}
        assert names == set(site.decider.store.metrics())
        await site.post("acquire", {"policy": "api", "key": "another"})
        assert told.read()["tidegate.decisions", ("allowed", "api")] == 3
    assert told.read() == {}  # a service that is closed tells nothing


def test_an_observer_for_every_face(told):
    clock = ManualClock(start=1000)
    exporter = InMemorySpanExporter()
    tracing = TracerProvider(shutdown_on_exit=False)
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    observer = OpenTelemetryObserver(told.meter, most=1)
    with Limiter("1/1m", clock=clock, observer=observer) as limiter:
        with tracing.get_tracer("test").start_as_current_span("request"):
            assert limiter.try_acquire("k")
            assert not limiter.try_acquire("k")
        assert not limiter.try_acquire("k")  # no span: only counted
        limiter.peek("k")
        limiter.refund("k")
    name = limiter.policy.name
    found = told.read()
    assert found == {
        ("tidegate.decisions", tuple(sorted(("allowed", name)))): 1,
        ("tidegate.decisions", tuple(sorted(("denied", name)))): 2,
        ("tidegate.denials", tuple(sorted(("1m", name)))): 2,
    }
    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert event.name == "tidegate.denied"
    assert dict(event.attributes) == {
        "tidegate.policy": name,
        "tidegate.outcome": "denied",
        "tidegate.violated": ("1m",),
        "tidegate.retry_after": 60.0,
    }
    tracing.shutdown()
    with Limiter(Policy("another", limiter.policy.limits), clock=clock, observer=observer) as second:
        second.try_acquire("k")
    assert told.read()["tidegate.decisions", ("allowed", "other")] == 1  # only one has a label of its own


PROGRAM = """
import sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
reader = PeriodicExportingMetricReader(ConsoleMetricExporter(formatter=lambda data: data.to_json(indent=None) + "\\n"),
                                       export_interval_millis=3_600_000)
metrics.set_meter_provider(MeterProvider([reader]))
from tidegate.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("wanted", [True, False])
def test_a_process_tells_before_it_ends_and_only_if_wanted(tmp_path, wanted):
    port = free_port()
    words = ["start", "--json", "--listen", f"127.0.0.1:{port}", "--policy", "api=2/1h", "--telemetry", str(wanted)]
    with (tmp_path / "out").open("w+b") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdout=out, stderr=subprocess.DEVNULL, cwd=ROOT, env=os.environ
        )
        try:
            until(lambda: b"ready" in (tmp_path / "out").read_bytes(), "the start of the service", 60)
            body = {"policy": "api", "key": "k"}
            for _ in range(3):
                httpx.post(f"http://127.0.0.1:{port}/v1/acquire", json=body, trust_env=False, timeout=30)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait(10)
    lines = (tmp_path / "out").read_text(encoding="utf-8").splitlines()[1:]
    told = [json.loads(line) for line in lines if "tidegate.decisions" in line]
    assert bool(told) == wanted
    if wanted:
        assert '"value": 2' in json.dumps(told[-1])
