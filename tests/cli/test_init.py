"""`tidegate init`: every file is valid, is never overwritten by accident, and really works."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.servers.nats import NatsServer
from tests.servers.process import free_port, until
from tests.service.harness import serving
from tidegate import Denied
from tidegate._cli import main
from tidegate._cli.file_kinds import KINDS, recognise
from tidegate._cli.init import TEMPLATES, read_template
from tidegate.budget import TaskBudget
from tidegate.bus import open_bus
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.outbound import Providers
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.service.client import Client
from tidegate.swarm import SwarmLimiter
from tidegate.testing import ManualClock

KIND_OF = {"api": "inbound", "swarm": "service"}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_file_is_valid_and_commented(kind, capsys, tmp_path):
    assert main(["init", kind]) == 0
    file = TEMPLATES[kind].file
    shown = capsys.readouterr().out
    assert shown.startswith(f"wrote {file}\n")
    assert f"next:\n  tidegate validate {file}\n" in shown
    assert recognise(file) == KIND_OF.get(kind, kind)
    assert main(["validate", file]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: valid ({KINDS[KIND_OF.get(kind, kind)].title})\n")
    text = (tmp_path / file).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert f"tidegate init {kind}" in text
    assert max(map(len, text.splitlines())) <= 120


COMMENTED = re.compile(r"^( *)# ([a-z_]+): (?!.*\.\.\.)(.+)$")
EXAMPLES = [
    (kind, number)
    for kind in TEMPLATES
    for number, line in enumerate(read_template(kind).splitlines())
    if COMMENTED.match(line)
]


@pytest.mark.parametrize(("kind", "number"), EXAMPLES)
def test_a_commented_setting_can_be_used(kind, number, capsys, monkeypatch, tmp_path):
    """A user removes the `# ` in front of a setting; tokens and keys are in variables."""
    for name in ("EXAMPLE_API_KEY", "TIDEGATE_DECISION_TOKEN", "TIDEGATE_ADMIN_TOKEN"):
        monkeypatch.setenv(name, f"{name}-0123456789")
    lines = read_template(kind).splitlines()
    lines[number] = COMMENTED.sub(r"\1\2: \3", lines[number])
    file = tmp_path / TEMPLATES[kind].file
    file.write_text("\n".join(lines) + "\n")
    main(["validate", str(file), "--kind", KIND_OF.get(kind, kind)])
    errors = capsys.readouterr().err
    assert not errors or "needs an api_key to send" in errors, errors


def test_a_file_is_not_overwritten(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text("mine: true\n")
    assert main(["init", "api"]) == 2
    message = "tidegate: config.yaml: exists already: name another file, or replace it with --force\n"
    assert capsys.readouterr().err == message
    assert (tmp_path / "config.yaml").read_text() == "mine: true\n"
    assert main(["init", "api", "--force"]) == 0
    assert "rate_limiting" in (tmp_path / "config.yaml").read_text()


def test_other_names_and_folders(capsys, tmp_path):
    assert main(["init", "provider", "providers/openai.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == ["providers/openai.yaml"]
    assert 'Providers.load(["openai.yaml"])' in (tmp_path / "providers/openai.yaml").read_text()
    assert main(["init", "provider", "providers"]) == 2
    assert capsys.readouterr().err == "tidegate: providers: cannot be written: it is not a file\n"
    assert main(["init", "api", "-"]) == 0
    assert capsys.readouterr().out == read_template("api")
    assert not (tmp_path / "config.yaml").exists()


def test_the_provider_of_an_egress_file_is_kept(capsys, tmp_path):
    (tmp_path / "provider.yaml").write_text("domain: mine.example\nlimits: 5/1m\n")
    assert main(["init", "egress"]) == 0
    assert "mine.example" in (tmp_path / "provider.yaml").read_text()
    assert capsys.readouterr().out.startswith("wrote egress.yaml\nnext:\n")


# ---- they work -------------------------------------------------------------------------------------------------------


async def hello(_scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def test_the_api_file_limits_an_application():
    main(["init", "api"])
    app = RateLimitMiddleware(hello, config="config.yaml", clock=ManualClock(start=0))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert [(await client.post("/login")).status_code for _ in range(6)] == [200] * 5 + [429]
        assert (await client.get("/login")).status_code == 200  # a GET is in the category read
        assert "x-ratelimit-limit" not in (await client.get("/health")).headers


class Upstream(BaseHTTPRequestHandler):
    """An API that answers every request."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


@pytest.fixture
def upstream():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_provider_file_limits_a_client():
    main(["init", "provider"])
    inner = httpx.MockTransport(lambda _request: httpx.Response(200))
    transport = RateLimitTransport(
        Providers.load(["provider.yaml"]), transport=inner, timeout=0, clock=ManualClock(start=0)
    )
    with httpx.Client(transport=transport) as client:
        assert [client.get("https://api.example.com/").status_code for _ in range(60)] == [200] * 60
        with pytest.raises(Denied):
            client.get("https://api.example.com/")


def test_the_budget_file_limits_tasks():
    main(["init", "budget"])
    with TaskBudget.from_config("budget.yaml") as budget:
        with budget.batch(5):
            pass
        assert budget.get_current_usage()["month"].used == 5
        assert not budget.check_all_limits(16)
    assert main(["budget", "--config", "budget.yaml"]) == 0


def test_the_service_file_starts(tmp_path):
    main(["init", "service"])
    with serving(tmp_path, (tmp_path / "service.yaml").read_text()) as service, Client(service.url) as client:
        assert client.try_acquire("api", "user:42").remaining == 99
        assert client.try_acquire("api", "partner:acme").remaining == 999


def test_the_swarm_file_shows_agents(tmp_path):
    main(["init", "swarm"])
    with NatsServer() as bus:
        text = (tmp_path / "swarm.yaml").read_text()
        with (
            serving(tmp_path, text, TIDEGATE_SWARM=bus.url) as service,
            open_bus(bus.url) as connected,
            SwarmLimiter(bus=connected, agent_id="agent-1") as agent,
        ):
            agent.set_capacity("model", 60, window=60)
            with agent.limited("model", timeout=30):
                pass

            def shown():
                panel = service.get("/v1/overview").json()["panels"].get("swarm", {})
                return "agent-1" in json.dumps(panel)

            until(shown, "the agent on the dashboard", 60)
            assert service.post("acquire", {"policy": "model", "key": "shared"}).json()["allowed"]


@pytest.mark.slow
def test_the_egress_file_runs(tmp_path, upstream):
    main(["init", "egress"])
    port = free_port()
    text = (tmp_path / "egress.yaml").read_text().replace("8090", str(port))
    text = text.replace('# upstreams: {example: "http://127.0.0.1:9000"}', f'upstreams: {{example: "{upstream}"}}')
    (tmp_path / "egress.yaml").write_text(text.replace("# allow_private", "allow_private"))
    command = [sys.executable, "-m", "tidegate", "egress", "egress.yaml"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ})
    try:

        def answers():
            response = httpx.get(f"http://127.0.0.1:{port}/example/v1", trust_env=False, timeout=30)
            return response.text == "ok" and "day=4999" in response.headers["x-tidegate-remaining"]

        def answers_now():
            assert process.poll() is None
            with suppress(httpx.ConnectError):
                return answers()

        until(answers_now, "an answer through the gateway", 60)
    finally:
        process.terminate()
        process.wait(30)


def test_without_a_kind_the_kinds_are_listed(capsys):
    assert main(["init"]) == 0
    output = capsys.readouterr().out
    assert all(f"  {kind} " in output for kind in TEMPLATES)
    assert main(["init", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["kinds"]) == set(TEMPLATES)
