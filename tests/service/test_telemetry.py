"""OpenTelemetry: the metrics of the service and of the observer, and the export before a process ends."""

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
from tests.service.harness import ROOT, InProcessService
from tidegate import Limiter, Policy
from tidegate.observe.otel import OpenTelemetryObserver
from tidegate.service._runtime.telemetry import Telemetry
from tidegate.testing import ManualClock


class MetricsReader:
    """A meter provider, and the metrics that it received."""

    def __init__(self):
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader], shutdown_on_exit=False)
        self.meter = self._provider.get_meter("test")

    def read(self):
        """Return all values by metric name and attributes."""
        values = {}
        data = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        values[metric.name, tuple(sorted(point.attributes.values()))] = point.value
        return values

    def close(self):
        self._provider.shutdown()


@pytest.fixture
def metrics():
    reader = MetricsReader()
    yield reader
    reader.close()


async def test_the_service_exports_its_counters(metrics):
    async with InProcessService(policies={"api": "2/1h", "quiet": {"limits": "1/1h", "mode": "shadow"}}) as service:
        Telemetry(service.app, metrics.meter)
        for _ in range(3):
            await service.post("acquire", {"policy": "api", "key": "k"})
            await service.post("acquire", {"policy": "quiet", "key": "k"})
        await service.post("acquire", {"policy": "nope", "key": "k"})
        values = metrics.read()
        assert values["tidegate.decisions", ("allowed", "api")] == 2
        assert values["tidegate.decisions", ("api", "denied")] == 1
        assert values["tidegate.decisions", ("quiet", "shadow")] == 2
        assert values["tidegate.denials", ("1h", "api")] == 1
        assert values["tidegate.problems", ("unknown-policy",)] == 1
        assert values["tidegate.waiting", ()] == 0
        assert values["tidegate.requests.in_flight", ()] == 0
        names = {name for metric, names in values for name in names if metric == "tidegate.store"}
        assert names == set(service.decider.store.metrics())
        await service.post("acquire", {"policy": "api", "key": "another"})
        assert metrics.read()["tidegate.decisions", ("allowed", "api")] == 3
    assert metrics.read() == {}  # a closed service exports nothing


def test_the_observer_exports_metrics_and_span_events(metrics):
    clock = ManualClock(start=1000)
    exporter = InMemorySpanExporter()
    tracing = TracerProvider(shutdown_on_exit=False)
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    observer = OpenTelemetryObserver(metrics.meter, max_policies=1)
    with Limiter("1/1m", clock=clock, observer=observer) as limiter:
        with tracing.get_tracer("test").start_as_current_span("request"):
            assert limiter.try_acquire("k")
            assert not limiter.try_acquire("k")
        assert not limiter.try_acquire("k")  # no span: only a metric
        limiter.peek("k")
        limiter.refund("k")
    name = limiter.policy.name
    values = metrics.read()
    assert values == {
        ("tidegate.decisions", tuple(sorted(("allowed", name)))): 1,
        ("tidegate.decisions", tuple(sorted(("denied", name)))): 2,
        ("tidegate.denials", tuple(sorted(("1m", name)))): 2,
    }
    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert event.name == "tidegate.denied"
    assert dict(event.attributes) == {
        "tidegate._policy": name,
        "tidegate.outcome": "denied",
        "tidegate.violated": ("1m",),
        "tidegate.retry_after": 60.0,
    }
    tracing.shutdown()
    with Limiter(Policy("another", limiter.policy.limits), clock=clock, observer=observer) as second:
        second.try_acquire("k")
    assert metrics.read()["tidegate.decisions", ("allowed", "other")] == 1  # only one policy gets its own label


PROGRAM = """
import sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
reader = PeriodicExportingMetricReader(ConsoleMetricExporter(formatter=lambda data: data.to_json(indent=None) + "\\n"),
                                       export_interval_millis=3_600_000)
metrics.set_meter_provider(MeterProvider([reader]))
from tidegate._cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_a_process_exports_before_it_ends_if_telemetry_is_on(tmp_path, enabled):
    port = free_port()
    arguments = [
        "start",
        "--json",
        "--listen",
        f"127.0.0.1:{port}",
        "--policy",
        "api=2/1h",
        "--telemetry",
        str(enabled),
    ]
    with (tmp_path / "out").open("w+b") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=out, stderr=subprocess.DEVNULL, cwd=ROOT, env=os.environ
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
    exported = [json.loads(line) for line in lines if "tidegate.decisions" in line]
    assert bool(exported) == enabled
    if enabled:
        assert '"value": 2' in json.dumps(exported[-1])
