"""nginx, Caddy, HAProxy and Traefik, each with its file in deploy/proxies, with a real service."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.servers.caddy import Caddy
from tests.servers.haproxy import Haproxy
from tests.servers.nginx import Nginx
from tests.servers.process import free_port
from tests.servers.proxy import EXAMPLES
from tests.servers.traefik import Traefik
from tests.service.harness import ADMIN, DECISION, serving
from tests.service.proxy_setup import Application, ClientAddresses, check_outages, rate_fields, send_request
from tidegate.service._config.settings import load_settings

RULES = "policies: {api: 5/1h fixed_window}\n"
PROXIES = (Nginx, Caddy, Haproxy, Traefik)
CLIENTS = ClientAddresses()
FORGED_FIELDS = {
    "X-Forwarded-For": "203.0.113.{n}",
    "X-Real-Ip": "203.0.113.{n}",
    "Forwarded": "for=203.0.113.{n}",
    "X-Original-Uri": "/v1/check?policy=other&key={n}",
    "X-Forwarded-Uri": "/v1/check?policy=other&key={n}",
    "X-Tidegate-Token": "{n}",
}


@pytest.fixture(scope="module")
def app():
    with Application() as application:
        yield application


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service"), RULES) as running:
        yield running


@pytest.fixture(scope="module", params=PROXIES, ids=lambda proxy: proxy.name)
def proxy(request, app, service):
    with request.param(app.port, service.port) as running:
        yield running


def test_exactly_the_limit_is_admitted(proxy, app):
    client, path = CLIENTS.new(), f"/exact/{proxy.name}"
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda _: send_request(proxy, client, path), range(12)))
    assert sorted(response.status_code for response in responses) == [200] * 5 + [429] * 7
    assert app.seen[f"GET {path}"] == 5
    assert send_request(proxy, CLIENTS.new(), path).status_code == 200  # another client


def test_a_denied_client_gets_retry_after_and_limit_fields(proxy):
    client = CLIENTS.new()
    allowed = [send_request(proxy, client) for _ in range(5)]
    denied = send_request(proxy, client)
    assert denied.status_code == 429
    fields = rate_fields(denied)
    now = time.time()
    assert fields.keys() == {"retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
    assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == (5, 0)
    assert 3500 < fields["retry-after"] <= 3600
    assert now + 3500 < fields["x-ratelimit-reset"] < now + 3700
    assert denied.headers.get_list("cache-control") == ["no-store"]
    assert denied.headers["content-type"] == "application/problem+json"
    assert denied.json()["status"] == 429
    remaining = [rate_fields(response).get("x-ratelimit-remaining") for response in allowed]
    assert remaining == ([4, 3, 2, 1, 0] if proxy.on_allowed else [None] * 5)
    assert not any("retry-after" in response.headers for response in allowed)


def test_a_client_cannot_choose_its_key(proxy):
    client = CLIENTS.new()
    statuses = []
    for number in range(6):
        path = f"/?policy=other&address=203.0.113.{number}&key={number}"
        fields = {name: value.format(n=number) for name, value in FORGED_FIELDS.items()}
        statuses.append(send_request(proxy, client, path, **fields).status_code)
    assert statuses == [200] * 5 + [429]


def test_clients_cannot_reach_the_check_of_the_service(proxy, app):
    client = CLIENTS.new()
    for path in ("/_tidegate", "/v1/check?policy=api&key=x", "/v1/reset"):
        response = send_request(proxy, client, path)
        assert response.status_code == (404 if (proxy.name, path) == ("nginx", "/_tidegate") else 200)
        assert response.status_code == 404 or app.seen[f"GET {path}"]


def test_requests_and_responses_pass_unchanged(proxy, app):
    client, body = CLIENTS.new(), bytes(range(256)) * 1000
    response = send_request(proxy, client, "/status/201", "POST", body)
    assert (response.status_code, response.text, app.bodies[-1]) == (201, "the application responds 201", body)
    for status in (403, 429, 503):  # statuses with a meaning between the proxy and the service
        response = send_request(proxy, client, f"/status/{status}")
        assert (response.status_code, response.text) == (status, f"the application responds {status}")
        assert "retry-after" not in response.headers


def test_a_page_of_another_site_can_call_the_application(proxy, app):
    fields = {"Origin": "https://shop.example", "Sec-Fetch-Site": "cross-site"}
    client = CLIENTS.new()
    assert [send_request(proxy, client, "/", "POST", **fields).status_code for _ in range(6)] == [200] * 5 + [429]
    assert app.origins[-1] == "https://shop.example"


def test_a_request_that_fails_in_the_application_is_not_retried(proxy, app):
    before = app.seen["POST /drop"]
    assert send_request(proxy, CLIENTS.new(), "/drop", "POST", b"pay").status_code in (500, 502, 504)
    assert app.seen["POST /drop"] == before + 1


@pytest.mark.parametrize("kind", PROXIES, ids=lambda proxy: proxy.name)
def test_outages_of_the_store_and_of_the_service(kind, app, tmp_path):
    check_outages(kind, app, CLIENTS, tmp_path, RULES)


@pytest.mark.parametrize("kind", PROXIES, ids=lambda proxy: proxy.name)
def test_a_proxy_starts_before_the_service(kind, app):
    with kind(app.port, free_port()) as proxy:
        assert send_request(proxy, CLIENTS.new()).status_code == 200


def test_an_ipv6_address_is_limited_by_its_network(service):
    def statuses(*queries, **headers):
        path = "/v1/check?policy=api&{}"
        return [service.get(path.format(query), headers=headers).status_code for query in queries]

    network = [f"address=2001:db8:1:2::{number}" for number in range(6)]
    assert statuses(*network, "address=2001:db8:1:3::1") == [200] * 5 + [429, 200]
    assert statuses("address=203.0.113.5&cost=5", "address=::ffff:203.0.113.5", "key=203.0.113.5") == [200, 429, 429]
    by_header = {"x-real-ip": "203.0.113.5", "x-forwarded-for": "203.0.113.6, 203.0.113.5"}
    assert statuses("address_header=x-real-ip", "address_header=X-Forwarded-For", **by_header) == [429, 429]
    assert statuses("address=nobody", "address=", "address_header=x-real-ip", "address=203.0.113.5:80") == [400] * 4
    assert statuses("key=login&address=203.0.113.5", "address=203.0.113.5&key=login") == [200, 200]


@pytest.fixture(scope="module")
def service_with_token(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("token"), f"decision_token: {DECISION}\n{RULES}") as running:
        yield running


@pytest.mark.parametrize("kind", PROXIES, ids=lambda proxy: proxy.name)
def test_configuration_errors_do_not_fail_open(kind, app, service_with_token):
    class UnknownPolicy(kind):
        def adapt(self, text):
            return super().adapt(text.replace("policy=api", "policy=nope"))

    path = f"/mistake/{kind.name}"
    with kind(app.port, service_with_token.port, token=DECISION) as proxy:
        client = CLIENTS.new()
        assert [send_request(proxy, client).status_code for _ in range(6)] == [200] * 5 + [429]
    with UnknownPolicy(app.port, service_with_token.port, token=DECISION) as proxy:
        assert send_request(proxy, CLIENTS.new(), path).status_code == (500 if kind is Nginx else 404)
    with kind(app.port, service_with_token.port, token=ADMIN) as proxy:
        assert send_request(proxy, CLIENTS.new(), path).status_code == 401
    assert not app.seen[f"GET {path}"]


def test_the_service_file_of_the_examples():
    rules = load_settings(EXAMPLES / "service.yaml").policies
    assert rules.choose("api", "203.0.113.9").policy.limits[0].quota == 60
    address = ("masked_remote_address", "203.0.113.9/32")
    assert rules.match_descriptor("edge", [address])[0].policy.limits[0].quota == 60
    assert rules.match_descriptor("edge", [("path", "/login"), address])[0].policy.limits[0].quota == 5
