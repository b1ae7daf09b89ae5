"""Processes of `tidegate start`: requests over real connections, commands, reloads, stops, several workers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest

from tests.servers.process import free_port, need, until
from tests.servers.valkey import ValkeyServer
from tests.service.harness import ROOT, serving
from tests.service.test_envoy import EnvoyClient
from tidegate import ConfigError, ResourceUnknown, StoreUnavailable
from tidegate._cli import main
from tidegate.service._decisions.reservation_ids import AlreadySettledError
from tidegate.service.client._client import AsyncClient, Client

RULES = "policies: {api: 3/1h fixed_window, slow: {limits: 1/1h fixed_window}}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    text = RULES + "domains: [{domain: edge, descriptors: [{key: ip, limits: 2/1h}]}]\n"
    with serving(
        tmp_path_factory.mktemp("service"), text, "--grpc", "GRPC", "--policy", "tokens=100/1h unit=tokens"
    ) as it:
        yield it


def test_curl_can_send_requests(service):
    curl = need(shutil.which("curl"), "curl", "apt-get install curl")
    command = [curl, "-s", "--json", '{"policy":"api","key":"curl"}', f"{service.url}/v1/acquire"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.startswith('{"allowed":true,"remaining":2,')


def test_health_readiness_metrics_and_the_openapi_description(service):
    assert service.get("/healthz").json() == {"ok": True}
    assert service.get("/readyz").json() == {"ok": True, "state": "ready"}
    assert service.get("/openapi.json").json()["openapi"] == "3.1.0"
    assert "tidegate_decisions_total" in service.get("/metrics").text


async def test_grpc_and_http_share_counters(service):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc}") as channel:
        envoy = EnvoyClient(None, channel)
        assert [(await envoy.codes(({"ip": "1"},)))[0] for _ in range(3)] == [1, 1, 2]
    # The same counter over HTTP.
    body = {"domain": "edge", "descriptor": [["ip", "1"]]}
    assert service.post("acquire", body).json()["allowed"] is False
    assert service.post("acquire", {"domain": "edge", "descriptor": [["x", "1"]]}).json()["limits"] == []


def test_the_client_for_threads(service):
    with Client(service.url) as client:
        responses = [client.try_acquire("api", ("thread", "1")) for _ in range(4)]
        assert [bool(response) for response in responses] == [True, True, True, False]
        assert responses[3].violated == ("1h",)
        assert not client.peek("api", ("thread", "1"))
        reservation = client.reserve("tokens", "t", {"tokens": 60})
        client.commit(reservation.id, {"tokens": 10})
        with pytest.raises(AlreadySettledError):
            client.cancel(reservation.id)
        client.cancel(client.reserve("tokens", "t", 90).id)
        assert [usage.used for usage in client.usage("tokens", "t").values()] == [10]
        client.reset("tokens", "t")
        assert [usage.used for usage in client.usage("tokens", "t").values()] == [0]
        results = client.batch([("api", "b"), ("api", "b", 3), ("nope", "b")])
        assert [getattr(each, "allowed", type(each)) for each in results] == [True, False, ResourceUnknown]
        assert [each.allowed for each in client.batch([("api", "c")] * 4)] == [True, True, True, False]
        assert {policy["name"] for policy in client.policies()["policies"]} == {"api", "slow", "tokens"}
        with pytest.raises(ResourceUnknown, match="there is no policy 'nope'"):
            client.try_acquire("nope", "x")


def test_the_client_sends_zeros_and_checks_keys(service):
    with Client(service.url) as client:
        with pytest.raises(ConfigError, match="seconds"):
            client.block("slow", "zero", seconds=0)
        with pytest.raises(ConfigError, match="ttl"):
            client.reserve("slow", "zero", ttl=0)
        assert client.acquire("slow", "zero", timeout=0, priority=0)  # neither blocked nor charged
        for key in (5, (), ("a", 1)):
            with pytest.raises(ConfigError, match="a key is a string or a tuple of strings"):
                client.try_acquire("api", key)
            with pytest.raises(ConfigError, match="a key is a string or a tuple of strings"):
                client.batch([("api", key)])


async def test_the_client_for_tasks(service):
    async with AsyncClient(service.url) as client:
        responses = [await client.try_acquire("api", "task") for _ in range(4)]
        assert [bool(response) for response in responses] == [True, True, True, False]
        reservation = await client.reserve("tokens", "task", 60)
        await client.commit(reservation.id, 7)
        assert [usage.used for usage in (await client.usage("tokens", "task")).values()] == [7]
        await client.cancel((await client.reserve("tokens", "task", 5)).id)
        await client.reset("tokens", "task")
        assert (await client.peek("tokens", "task", 100)).allowed
        assert [each.allowed for each in await client.batch([("api", "tasks")] * 4)] == [True, True, True, False]
        assert (await client.policies())["domains"] == ["edge"]


def test_a_client_without_a_service():
    with Client(f"http://127.0.0.1:{free_port()}") as client, pytest.raises(StoreUnavailable, match="tidegate start"):
        client.try_acquire("api", "k")


def test_commands(service, capsys):
    def command(*arguments):
        code = main([*arguments, "--url", service.url])
        captured = capsys.readouterr()
        return code, captured.out.strip(), captured.err.strip()

    assert command("acquire", "api", "cli", "--cost", "3") == (0, "allowed, 0 left", "")
    code, output, _ = command("acquire", "api", "cli")
    assert (code, output.startswith("denied by 1h, try again in ")) == (1, True)
    assert command("peek", "api", "cli", "--cost", "4") == (
        1,
        "denied by 1h: the cost is more than the limit can ever allow",
        "",
    )
    code, output, _ = command("usage", "api", "cli")
    assert (code, " 3 3 requests " in " ".join(output.split())) == (0, True)
    assert command("reset", "api", "cli") == (0, "api: the usage of cli is reset", "")
    code, output, _ = command("policies", "--json")
    assert (code, [policy["name"] for policy in json.loads(output)["policies"]]) == (0, ["api", "slow", "tokens"])
    code, _, wrong = command("acquire", "nope", "cli")
    assert (code, wrong) == (2, "tidegate: there is no policy 'nope': known names are api, slow, tokens")
    code, output, _ = command("acquire", "tokens", "cli", "parts", "--cost", "tokens=7", "--json")
    assert (code, json.loads(output)["remaining"]) == (0, 93)
    code, _, wrong = command("acquire", "tokens", "cli", "--cost", "seven")
    assert (code, wrong.startswith("tidegate: --cost: expected an integer")) == (2, True)


def test_validate(tmp_path, capsys):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(RULES, encoding="utf-8")
    bad.write_text("policies: {api: many}\n", encoding="utf-8")
    assert main(["validate", str(good)]) == 0
    assert "policy slow: 1/1h fixed_window" in capsys.readouterr().out
    assert main(["validate", str(good), str(bad)]) == 2
    assert f"{bad}:1: policies.api: expected a limit" in capsys.readouterr().err
    assert main(["validate", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "tidegate service"
    envoys = tmp_path / "envoy.yaml"
    envoys.write_text(
        "domain: a\ndescriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]\n", encoding="utf-8"
    )
    assert main(["validate", "--from-envoy", str(envoys)]) == 0
    good.write_text(capsys.readouterr().out, encoding="utf-8")
    assert main(["validate", str(good), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["domains"] == ["a"]


def test_an_address_in_use_is_refused(service, tmp_path):
    full = [sys.executable, "-m", "tidegate", "start", "--listen", f"127.0.0.1:{service.port}"]
    done = subprocess.run(full, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "listen: cannot listen on" in done.stderr
    assert "stop the other program, or choose another address with --listen" in done.stderr


def test_a_reload_changes_policies_and_refuses_invalid_files(tmp_path):
    with serving(tmp_path, "reload_every: 60s\n" + RULES) as service:
        ask = {"policy": "api", "key": "k"}
        assert service.post("acquire", {**ask, "cost": 3}).json()["allowed"]
        config = tmp_path / "service.yaml"
        config.write_text("policies: {api: many}\n", encoding="utf-8")
        service.process.send_signal(signal.SIGHUP)
        until(
            lambda: service.logged("reload refused, the previous policies stay in effect"), "the refusal of a bad file"
        )
        assert service.logged("service.yaml:1: policies.api: expected a limit")
        rules = service.get("/v1/overview").json()["rules"]
        assert "policies.api: expected a limit" in rules["error"]
        assert service.post("acquire", ask).json()["allowed"] is False
        config.write_text("", encoding="utf-8")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.logged("needs policies or domains"), "the refusal of an empty file")
        config.write_text("policies: {api: 4/1h fixed_window, new: 1/1h}\n", encoding="utf-8")
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.logged("new policies are in effect"), "the new policies")
        expected = {"adopted": 1, "refused": 2, "error": None, "since": None}
        until(lambda: service.get("/v1/overview").json()["rules"] == expected, "the overview without an error")
        responses = [service.post("acquire", ask).json()["allowed"] for _ in range(2)]
        assert responses == [True, False]  # one more than before, not four
        assert service.post("acquire", {"policy": "slow", "key": "k"}).status_code == 404
        text = service.get("/metrics").text
        assert 'tidegate_reloads_total{outcome="adopted"} 1' in text
        assert 'tidegate_reloads_total{outcome="refused"} 2' in text


def test_a_changed_file_is_reloaded(tmp_path):
    with serving(tmp_path, "reload_every: 20ms\n" + RULES) as service:
        (tmp_path / "service.yaml").write_text("policies: {other: 1/1h}\n", encoding="utf-8")
        until(lambda: service.post("peek", {"policy": "other", "key": "k"}).status_code == 200, "the new policies")


def test_a_stop_answers_waiting_calls(tmp_path):
    with serving(tmp_path, RULES, "--stop-within", "100ms") as service, ThreadPoolExecutor() as pool:
        ask = {"policy": "slow", "key": "k"}
        assert service.post("acquire", ask).json()["allowed"]
        waiting = pool.submit(service.post, "acquire", {**ask, "timeout": 25})
        until(lambda: "tidegate_waiting 1" in service.get("/metrics").text, "a call that waits")
        assert service.stop() == 0
        # It waits longer than `stop_within`: it gets a response, and is not disconnected.
        assert waiting.result(30).json()["type"] == "urn:tidegate:problem:stopping"
        assert service.logged("stopped")


def test_workers_on_sqlite_admit_exactly_the_limit(tmp_path):
    store = f"store: sqlite:///{tmp_path / 'limits.db'}?deadline=10s\n"
    text = store + "policies: {api: 100/1h, tokens: 50/1h fixed_window unit=tokens}\n"
    with serving(tmp_path, text, "--workers", "3") as service:

        def ask(_):
            with httpx.Client(trust_env=False, timeout=30) as http:  # a new connection: any worker may respond
                responses = [
                    http.post(f"{service.url}/v1/acquire", json={"policy": "api", "key": "k"}) for _ in range(10)
                ]
                reservation = http.post(
                    f"{service.url}/v1/reserve", json={"policy": "tokens", "key": "k", "cost": 2}
                ).json()
            return sum(response.json()["allowed"] for response in responses), reservation["id"]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(ask, range(14)))
        assert sum(count for count, _ in results) == 100
        ids = [reservation_id for _, reservation_id in results]
        # Every worker can settle a reservation of any other, but only once.
        twice = [service.post("cancel", {"id": reservation_id}).status_code for reservation_id in ids for _ in range(2)]
        assert twice == [200, 409] * 14
        assert service.post("usage", {"policy": "tokens", "key": "k"}).json()["limits"][0]["used"] == 0
        processes = {line.split("process ")[1].split('"')[0] for line in log_lines(service, "process ")}
        assert len(processes) == 3
        # A worker that dies is replaced.
        os.kill(int(min(processes)), signal.SIGKILL)
        until(lambda: service.logged("a new process starts in"), "a replacement")
        until(lambda: len(log_lines(service, "serving on")) == 4, "its start")
        assert service.stop() == 0


def log_lines(service, text):
    return [line for line in service.log.read_text(encoding="utf-8").splitlines() if text in line]


def test_an_unavailable_store_is_not_a_denial(tmp_path):
    with ValkeyServer() as valkey:
        text = (
            f"store: {valkey.url}?deadline=200ms\npolicies:\n  api: 100/1h\n"
            "  open: {limits: 1/1h, on_store_error: allow}\n"
        )
        with serving(tmp_path, text) as service:
            ask = {"policy": "api", "key": "k"}
            assert service.post("acquire", ask).json()["remaining"] == 99
            valkey.kill()
            until(lambda: service.post("acquire", ask).status_code == 503, "the outage of the store")
            assert service.post("acquire", ask).json()["type"] == "urn:tidegate:problem:store-unavailable"
            assert service.get("/readyz").status_code == 503
            assert service.get("/healthz").status_code == 200
            assert service.get("/v1/check?policy=api&key=k").status_code == 503
            responses = [service.post("acquire", {"policy": "open", "key": "k"}).json() for _ in range(2)]
            assert [(response["allowed"], response["local"]) for response in responses] == [(True, True)] * 2
            valkey.start()
            until(lambda: service.get("/readyz").status_code == 200, "the return of the store")


def test_a_client_that_disconnects_leaves_the_wait_queue(service):
    ask = {"policy": "slow", "key": "hangs up"}
    service.post("acquire", ask)
    body = json.dumps({**ask, "timeout": 25}).encode()
    head = (
        f"POST /v1/acquire HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", service.port)) as caller:
        caller.sendall(f"{head}\r\n\r\n".encode() + body)
        until(lambda: "tidegate_waiting 1" in service.get("/metrics").text, "a call that waits")
    until(lambda: "tidegate_waiting 0" in service.get("/metrics").text, "the end of its wait")


def test_a_slow_client_does_not_delay_others(service):
    with socket.create_connection(("127.0.0.1", service.port)) as slow:
        slow.sendall(
            b"POST /v1/acquire HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
        assert service.post("peek", {"policy": "api", "key": "k"}).status_code == 200
