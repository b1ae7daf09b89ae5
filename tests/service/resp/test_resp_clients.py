"""Redis clients, unmodified, against a real process: redis-py, redis-cli, node-redis, ioredis; workers."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.process import need, until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ADMIN, DECISION, serving
from tests.service.resp.harness import connected, serving_resp
from tidegate.stores import open_store

RULES = "policies: {api: 5/1h, big: 1000/1h, slow: 1/1h}\n"
TOKENS = f"decision_token: {DECISION}\nadmin_token: {ADMIN}\n"
NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving_resp(tmp_path_factory.mktemp("resp"), RULES + TOKENS) as it:
        yield it


@pytest.fixture(scope="module")
def port(service):
    return service[1]


def decisions(replies):
    return [reply[0] for reply in replies]


# ---- redis-py --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3])
def test_redis_py(port, protocol):
    with redis.Redis(port=port, password=DECISION, protocol=protocol, decode_responses=True) as client:
        key = f"py{protocol}"
        assert client.ping()
        allowed, remaining, retry, reset, violated = client.execute_command("TG.ACQUIRE", "api", key)
        assert (allowed, remaining, retry, violated) == (1, 4, 0, [])
        assert 0 < reset <= 720_000
        assert client.execute_command("TG.ACQUIRE", "api", key, "COST", 5)[4] == ["1h"]
        assert client.execute_command("CL.THROTTLE", key, 15, 30, 60, 1) == [0, 16, 15, -1, 2]
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(6):
                pipeline.execute_command("TG.ACQUIRE", "api", f"pipelined{protocol}")
            assert decisions(pipeline.execute()) == [1] * 5 + [0]
        *_, reserved = client.execute_command("TG.RESERVE", "big", key, "COST", 10, "TTL", 30)
        assert client.execute_command("TG.COMMIT", reserved, "COST", 3)
        assert client.execute_command("TG.USAGE", "big", key)[0][:4] == ["1h", 1000, 3, 997]
        with pytest.raises(redis.ResponseError, match="unknown command 'GET'"):
            client.get("x")
        with client.pipeline() as transaction:
            transaction.execute_command("TG.ACQUIRE", "big", key)
            with pytest.raises(redis.ResponseError, match="transactions are not supported"):
                transaction.execute()
        assert client.execute_command("TG.USAGE", "big", key)[0][2] == 3  # nothing was charged
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command("TG.RESET", "api", key)
        assert client.info("server")["server_name"] == "tidegate"


def test_tokens_of_redis_py(port):
    with redis.Redis(port=port, password=ADMIN, username="any") as client:
        assert client.execute_command("TG.RESET", "api", "py") in (True, b"OK")
    for token in (None, "wrong-token-01234"):
        client = redis.Redis(port=port, password=token, retry=Retry(NoBackoff(), 0))
        with client, pytest.raises(redis.AuthenticationError):
            client.ping()


async def test_redis_py_with_asyncio(port):
    pool = redis.asyncio.BlockingConnectionPool(port=port, password=DECISION, max_connections=8)
    async with redis.asyncio.Redis(connection_pool=pool) as client:
        calls = (client.execute_command("TG.ACQUIRE", "big", "asyncio") for _ in range(50))
        assert decisions(await asyncio.gather(*calls)) == [1] * 50
        async with client.pipeline(transaction=False) as pipeline:
            for _ in range(20):
                pipeline.execute_command("TG.ACQUIRE", "big", "asyncio")
            assert decisions(await pipeline.execute()) == [1] * 20
        assert (await client.execute_command("TG.USAGE", "big", "asyncio"))[0][2] == 70
    await pool.disconnect()


def test_a_pool_of_connections_in_threads(port):
    pool = redis.BlockingConnectionPool(port=port, password=DECISION, max_connections=4)
    with redis.Redis(connection_pool=pool) as client, ThreadPoolExecutor(16) as threads:
        replies = list(threads.map(lambda _: client.execute_command("TG.ACQUIRE", "big", "pool"), range(200)))
        assert sorted(reply[1] for reply in replies) == list(range(800, 1000))
    pool.disconnect()


def test_a_client_retries_after_the_service_was_restarted(tmp_path):
    with serving_resp(tmp_path, RULES) as (first, port):
        client = redis.Redis(port=port, retry=Retry(NoBackoff(), 1), retry_on_error=[redis.ConnectionError])
        assert client.execute_command("TG.ACQUIRE", "api", "k")[1] == 4
        assert first.stop() == 0
        with serving(tmp_path, RULES, "--resp", f"127.0.0.1:{port}"):
            assert client.execute_command("TG.ACQUIRE", "api", "k")[1] == 4  # a store in memory starts again
        client.close()


# ---- other clients ---------------------------------------------------------------------------------------------------


def test_redis_cli(port):
    program = need(shutil.which("redis-cli") or shutil.which("valkey-cli"), "redis-cli", "apt-get install redis-tools")
    environment = {**os.environ, "REDISCLI_AUTH": DECISION}

    def run(*words, text=None):
        found = subprocess.run([program, "-p", str(port), *words], env=environment, input=text, text=True,
                               capture_output=True, check=True, timeout=20)  # fmt: skip
        return found.stdout.splitlines()

    assert run("PING") == ["PONG"]
    assert run("TG.ACQUIRE", "slow", "cli")[:3] == ["1", "0", "0"]
    assert run("-3", "TG.ACQUIRE", "slow", "cli")[:2] == ["0", "0"]
    assert run("--no-raw", "CL.THROTTLE", "cli", "15", "30", "60", "1") == [
        "1) (integer) 0", "2) (integer) 16", "3) (integer) 15", "4) (integer) -1", "5) (integer) 2",
    ]  # fmt: skip
    assert run(text="PING\nTG.PEEK api cli\n")[:3] == ["PONG", "1", "4"]
    assert run("INFO")[0] == "# Server"
    assert "unknown command" in run("GET", "x")[0]


@pytest.mark.slow
def test_node_redis_and_ioredis(port, tmp_path):
    node = need(shutil.which("node"), "Node.js", "apt-get install nodejs npm")
    npm = need(shutil.which("npm"), "npm", "apt-get install npm")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(NODE / name, tmp_path)
    installed = subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=tmp_path, capture_output=True, text=True,
                               check=False, timeout=100)  # fmt: skip
    need("npm" if installed.returncode == 0 else None, "node-redis and ioredis", f"npm ci failed: {installed.stderr}")
    command = [node, str(NODE / "clients.mjs"), str(port), DECISION]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    replies = json.loads(found.stdout)
    remaining = 5
    for name in ("node-redis 2", "node-redis 3", "ioredis"):
        remaining -= 1
        ping, first, too_much, (usage,), throttled, pipelined, unknown = replies[name]
        assert (ping, first[:3], too_much[2], usage[0], usage[3]) == ("PONG", [1, remaining, 0], -1, "1h", remaining)
        assert throttled[:2] == [0, 16]
        assert pipelined == [1] * 5 + [0] * 5
        assert unknown.startswith("error: ERR unknown command 'GET'")
    assert "WRONGPASS" in replies["wrong"] or replies["wrong"].startswith("error")


# ---- several processes, a stop ---------------------------------------------------------------------------------------


def connect_to_two_processes(port):
    """Return at least six connections, some of them to another process than the first."""
    clients, identities = [], set()

    def connected():
        client = redis.Redis(port=port)
        clients.append(client)
        identities.add(client.execute_command("CLIENT", "ID"))  # each process counts from 1
        return len(identities) < len(clients) >= 6

    until(connected, "a connection to a second process")
    return clients


def test_several_processes_share_a_port_and_a_store(tmp_path):
    with serving_resp(
        tmp_path, RULES, "--workers", "2", "--store", f"sqlite:///{tmp_path / 'limits.db'}?deadline=20s"
    ) as (_, port):
        clients = connect_to_two_processes(port)
        replies = [client.execute_command("TG.ACQUIRE", "api", "shared") for client in clients]
        assert sum(decisions(replies)) == 5
        reserved = clients[0].execute_command("TG.RESERVE", "big", "k", "COST", 5)[5]
        assert [client.execute_command("TG.CANCEL", reserved) for client in clients] == [b"OK"] * len(clients)
        assert clients[1].execute_command("TG.USAGE", "big", "k")[0][2] == 0
        with pytest.raises(redis.ResponseError, match="already-settled"):
            clients[2].execute_command("TG.COMMIT", reserved)
        for client in clients:
            client.close()


def test_a_stop_answers_what_is_under_way(tmp_path):
    with serving_resp(tmp_path, RULES + "stop_within: 1s\n") as (service, port):
        client, idle = redis.Redis(port=port, retry=Retry(NoBackoff(), 0)), redis.Redis(port=port)
        assert idle.ping()
        client.execute_command("TG.ACQUIRE", "slow", "k")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.execute_command, "TG.ACQUIRE", "slow", "k", "TIMEOUT", 30)
            until(lambda: "tidegate_waiting 1" in service.get("/metrics").text, "a waiting call")
            assert service.stop(signal.SIGTERM) == 0
            with pytest.raises(redis.ResponseError, match="stopping"):
                waiting.result(20)
        client.close()
        idle.close()


def test_denials_are_logged_as_over_http(service):
    running, port = service
    with redis.Redis(port=port, password=DECISION) as client:
        for _ in range(2):
            client.execute_command("TG.ACQUIRE", "slow", "logged")
    until(lambda: running.logged("rate limit exceeded: slow: logged"), "the log line")


# ---- a shared store --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("TG.ACQUIRE", "api"), ("TG.PEEK", "api"), ("TG.USAGE", "api"), ("CL.THROTTLE",)])
async def test_pipelined_commands_are_one_round_trip_to_redis(words, shared_valkey):
    store = open_store(f"{shared_valkey.url}?prefix=resp{words[0][3]}")
    arguments = (15, 30, 60) if words[0] == "CL.THROTTLE" else ()
    async with connected(store, policies={"api": "1000/1h"}) as (_, client):
        await client.ask(*words, "warm", *arguments)
        shared_valkey.ask("CONFIG", "RESETSTAT")
        replies = await client.ask_all(*((*words, f"key{number}", *arguments) for number in range(16)))
        assert len(replies) == 16
        assert calls(shared_valkey) == 1


def calls(server: ValkeyServer) -> int:
    """Return how many scripts were called."""
    return server.calls("fcall") + server.calls("evalsha") + server.calls("eval")
