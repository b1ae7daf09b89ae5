"""The setting `spending` of a service and a gateway: costs are recorded, warnings posted, money limits in /metrics."""

import json

import pytest

from tests.egress.harness import TOKEN, running, settled
from tests.outbound.server import Answer, QuotaServer, as_json
from tests.servers.process import until
from tests.service.harness import serving
from tidegate._cli import main
from tidegate.egress import load_egress
from tidegate.errors import ConfigError
from tidegate.spending import Ledger, Spending, SpendingSettings

PROVIDER = """
domain: ai.example
name: ai
profile: openai
limits: [500/1m, 1/day unit=usd]
price: {date: 2026-11-01, models: {m: {input: 1, output: 4}}}
spend: [{limit: 2, period: month, unit: usd, per: team}, 10/month unit=usd]
"""
SERVICE = """
store: sqlite:///FOLDER/limits.db
data: FOLDER/data
providers: ai.yaml
spending: {ledger: spending.db, timezone: Europe/Berlin, webhook: "${HOOK}", secret: abc, milestones: [80]}
"""


def money(text, name):
    """The samples of a metric: the key and limit of each, and its value."""
    lines = [line for line in text.splitlines() if line.startswith(f"tidegate_money_{name}_micros{{")]
    return {line.partition("{")[2].rpartition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_service_records_costs_warns_and_reports(tmp_path, capsys):
    (tmp_path / "ai.yaml").write_text(PROVIDER, encoding="utf-8")
    text = SERVICE.replace("FOLDER", str(tmp_path))
    with QuotaServer(respond=lambda _request: Answer(200)) as hook:
        with serving(tmp_path, text, HOOK=f"{hook.url}/hook") as service:
            held = service.post("reserve", {"provider": "ai", "cost": {"usd_micros": 900_000}}).json()
            service.post("commit", {"id": held["id"], "cost": {"usd_micros": 850_000}})
            metrics = service.get("/metrics").text
            until(lambda: hook.requests, "the warning")
        posted = json.loads(hook.requests[0].body)
    assert (posted["milestone"], posted["quota"], posted["ceiling"]) == (80, 1_000_000, "ai.example usd-day")
    assert hook.requests[0].headers["x-tidegate-signature"].startswith("sha256=")
    spent = money(metrics, "spent")
    assert set(spent.values()) == {850_000.0}
    assert {label.split('"')[3] for label in spent} == {"all", "team=", "ai.example"}
    assert sorted(money(metrics, "ceiling").values()) == [1_000_000.0, 2_000_000.0, 10_000_000.0]
    assert set(money(metrics, "debt").values()) == {0.0}
    assert 'tidegate_money_warnings_total{milestone="80"} 1' in metrics.splitlines()
    assert [entry.amount for entry in Ledger(tmp_path / "spending.db").read()] == [850_000]
    assert main(["budget", "--by", "source,day", "--ledger", str(tmp_path / "spending.db")]) == 0
    assert "0.85" in capsys.readouterr().out


def test_each_worker_reports_the_warnings_of_all_workers(tmp_path):
    (tmp_path / "ai.yaml").write_text(PROVIDER, encoding="utf-8")
    text = SERVICE.replace("FOLDER", str(tmp_path)).partition("spending:")[0] + "spending: {milestones: [50, 80]}\n"
    with serving(tmp_path, text, "--workers", "2") as service:
        for _ in range(2):
            service.post("reserve", {"provider": "ai", "cost": {"usd_micros": 300_000}})
        found = {
            line
            for _ in range(20)  # each on a connection of its own, so to both workers
            for line in service.get("/metrics").text.splitlines()
            if line.startswith("tidegate_money_warnings_total{")
        }
    assert found == {
        'tidegate_money_warnings_total{milestone="50"} 1',
        'tidegate_money_warnings_total{milestone="80"} 0',
    }


async def test_a_gateway_reports_the_money_of_its_callers_and_warnings():
    prices = {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 10}}}
    spend = [{"limit": 1, "period": "day", "unit": "usd", "per": "team"}]
    usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}}
    settings = {"callers": {"a": {"token": TOKEN}}, "metrics_token": "metrics-token-0123"}
    fields = {"profile": "openai", "price": prices, "limits": ["100/1m"], "spend": spend}
    with QuotaServer(respond=lambda _request: as_json(usage)) as server:
        async with running(server.url, settings, spending=Spending(milestones=[50]), **fields) as gateway:
            body = {"model": "m", "max_tokens": 500, "messages": []}
            path, headers = "/up/v1/chat/completions", {"Authorization": f"Bearer {TOKEN}"}
            status, _, _ = await gateway.send("POST", path, json=body, headers=headers)
            assert status == 200
            await settled(lambda: gateway.gateway.stats.counts("a", "up").active == 0)
            metrics = {"Authorization": "Bearer metrics-token-0123"}
            _, _, text = await gateway.send("GET", "/metrics", headers=metrics)
    assert 'tidegate_money_warnings_total{milestone="50"} 0' in text.decode().splitlines()
    spent = money(text.decode(), "spent")
    assert list(spent.values()) == [600.0]
    assert 'key="team=a"' in next(iter(spent))


def test_the_setting_of_an_egress_file(tmp_path, capsys):
    file = tmp_path / "egress.yaml"
    file.write_text("provider_dirs: [providers]\nspending: costs.db\n", encoding="utf-8")
    assert load_egress(file).spending == SpendingSettings(tmp_path / "costs.db")
    assert main(["validate", str(file)]) == 0
    file.write_text("provider_dirs: [providers]\nspending: {milestones: [0]}\n", encoding="utf-8")
    assert main(["validate", str(file)]) == 2
    assert "spending.milestones[0]: expected an integer from 1 to 100, not 0" in capsys.readouterr().err


def test_a_ledger_that_cannot_be_created_is_an_error_of_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"spending: cannot create the ledger .*no/such: No such file or directory"):
        SpendingSettings(tmp_path / "no" / "such").open()
