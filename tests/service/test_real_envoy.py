"""An unmodified Envoy with deploy/proxies/envoy.yaml, which calls the service over gRPC."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from tests.servers.envoy import EnvoyProxy
from tests.servers.process import free_port, until
from tests.service.harness import serving
from tests.service.proxy_setup import Application, ClientAddresses, check_outages, rate_fields, send_request

CLIENTS = ClientAddresses()
RULES = """
domains:
  - domain: edge
    descriptors:
      - {key: masked_remote_address, rate_limit: {unit: hour, requests_per_unit: 7}}
      - key: path
        value: /login
        descriptors: [{key: masked_remote_address, rate_limit: {unit: day, requests_per_unit: 2}}]
      - {key: plan, value: free, rate_limit: {unit: hour, requests_per_unit: 1}}
      - {key: plan, value: "pre*", descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 2}}]}
      - {key: plan, value: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
      - {key: team, rate_limit: {unit: hour, requests_per_unit: 1}}
policies: {api: 5/1h}
"""
GRPC = ("--grpc", "GRPC")
SET_METADATA = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
LIMIT = {"requests_per_unit": 3, "unit": "HOUR"}


class WithMoreDescriptors(EnvoyProxy):
    """The example, with descriptors from header fields, one of them with a limit."""

    def adapt(self, text: str) -> str:
        """Add descriptors to the example."""
        config = yaml.safe_load(text)
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        metadata = {"@type": SET_METADATA, "metadata": [{"metadata_namespace": "ours", "value": {"limit": LIMIT}}]}
        manager["http_filters"].insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": metadata})

        def header(name):
            return {"request_headers": {"header_name": f"x-{name}", "descriptor_key": name}}

        limit = {"dynamic_metadata": {"metadata_key": {"key": "ours", "path": [{"key": "limit"}]}}}
        manager["route_config"]["virtual_hosts"][0]["rate_limits"] = [
            {"actions": [header("plan")]},
            {"actions": [header("plan"), header("user")]},
            {"actions": [header("team")], "limit": limit},
        ]
        return yaml.safe_dump(config)


@pytest.fixture(scope="module")
def app():
    with Application() as application:
        yield application


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service"), RULES, *GRPC) as running:
        yield running


@pytest.fixture(scope="module")
def envoy(app, service):
    with EnvoyProxy(app.port, service.port, service.grpc) as proxy:
        yield proxy


def test_exactly_the_limit_then_429_with_header_fields_and_a_body(envoy, app):
    client = CLIENTS.new()
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda _: send_request(envoy, client, "/exact"), range(12)))
    assert sorted(response.status_code for response in responses) == [200] * 7 + [429] * 5
    assert app.seen["GET /exact"] == 7
    allowed = [response for response in responses if response.status_code == 200]
    assert {rate_fields(response)["x-ratelimit-remaining"] for response in allowed} == set(range(7))
    denied = send_request(envoy, client)
    fields = rate_fields(denied)
    assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == (7, 0)
    assert 3500 < fields["retry-after"] <= 3600
    assert denied.headers["content-type"] == "application/problem+json"
    assert (denied.json()["status"], denied.json()["violated-policies"]) == (429, ["per-hour"])
    assert send_request(envoy, CLIENTS.new()).status_code == 200


def test_a_denial_by_a_route_descriptor_charges_nothing(envoy):
    client = CLIENTS.new()
    statuses = [send_request(envoy, client, "/login").status_code for _ in range(6)]
    assert statuses == [200, 200, 429, 429, 429, 429]
    # The denied requests were not charged to the hourly limit of seven.
    assert [send_request(envoy, client).status_code for _ in range(6)] == [200] * 5 + [429]


def test_a_route_sets_the_hits_of_a_request(envoy):
    client = CLIENTS.new()
    response = send_request(envoy, client, "/export")
    assert (response.status_code, rate_fields(response)["x-ratelimit-remaining"]) == (200, 2)
    assert send_request(envoy, client, "/export").status_code == 429
    assert [send_request(envoy, client).status_code for _ in range(3)] == [200, 200, 429]


def test_a_client_cannot_choose_its_key(envoy):
    client = CLIENTS.new()
    fields = ({"X-Forwarded-For": f"203.0.113.{number}", "X-Envoy-External-Address": "1.1.1.1"} for number in range(8))
    assert [send_request(envoy, client, **each).status_code for each in fields] == [200] * 7 + [429]


def test_nested_wildcard_and_shadow_descriptors_and_limits_in_requests(app, service):
    with WithMoreDescriptors(app.port, service.port, service.grpc) as envoy:

        def statuses(times, **fields):
            more = {f"x-{name}": value for name, value in fields.items()}
            return [send_request(envoy, CLIENTS.new(), **more).status_code for _ in range(times)]

        assert statuses(3, plan="free") == [200, 429, 429]
        for user in ("ann", "bob"):
            assert statuses(3, plan="premium", user=user) == [200, 200, 429]
        assert statuses(1, plan="prepaid", user="ann") == [200]
        assert statuses(3, plan="trial") == [200] * 3  # in shadow mode
        assert statuses(3) == statuses(3, plan="unknown") == [200] * 3  # no descriptor, or one that is not limited
        # Envoy sends a limit, which replaces the one in the file.
        assert statuses(4, team="red") == [200, 200, 200, 429]
        shadowed = 'tidegate_decisions_total{policy="edge/plan=trial",outcome="shadow"} 2'
        assert shadowed in service.get("/metrics").text


def test_outages_of_the_store_and_of_the_service(app, tmp_path):
    check_outages(EnvoyProxy, app, CLIENTS, tmp_path, RULES, *GRPC)


def test_envoy_starts_before_the_service(app, tmp_path):
    grpc = free_port()
    with EnvoyProxy(app.port, free_port(), grpc) as envoy:
        client = CLIENTS.new()
        assert [send_request(envoy, client).status_code for _ in range(8)] == [200] * 8
        with serving(tmp_path, RULES, "--grpc", f"127.0.0.1:{grpc}"):
            until(lambda: send_request(envoy, client).status_code == 429, "a denial, after the start of the service")
