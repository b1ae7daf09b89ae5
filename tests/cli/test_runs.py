"""`tidegate runs`: trees with bars, and stop, extend, close and report, in a store and by a service."""

import json

import pytest

from tests.service.harness import ADMIN, serving
from tidegate._cli import main
from tidegate.agents import Run, RunDenied


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/runs.db"


def make(store):
    run = Run("research", store=store, limits=["0.20/run unit=usd", "99/run"])
    planner = run.child("planner", limits=["0.05/run unit=usd"])
    planner.charge({"usd": "0.03"}, label="model:large")
    planner.child("search").charge({"usd": "0.01"}, label="tool:web_search")
    return run, planner


def test_the_tree_has_bars(url, capsys):
    run, _ = make(url)
    assert main(["runs", "--store", url, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == ["node", "research"]
    assert run.id in lines[1]
    assert "████░░░░░░░░░░░░░░░░" in lines[1]
    assert "0.04 usd" in lines[1]
    assert "ends in 1d" in lines[1]
    planner = next(line for line in lines if line.startswith("  planner"))
    assert "████████████████░░░░" in planner
    assert any(line.startswith("    search") for line in lines)
    assert main(["runs", "--store", url, "--once", "--json"]) == 0
    (tree,) = json.loads(capsys.readouterr().out)["runs"]
    assert tree["children"][0]["children"][0]["used"] == {"requests": 1, "usd_micros": 10_000}


def test_a_run_is_stopped_extended_and_closed(url, capsys):
    run, planner = make(url)
    assert main(["runs", "extend", planner.id, "--add", "usd=0.10", "--ttl", "2h", "--store", url]) == 0
    planner.charge({"usd": "0.10"})
    assert main(["runs", "stop", run.id, "--store", url]) == 0
    with pytest.raises(RunDenied, match="was stopped"):
        planner.charge()
    assert main(["runs", "show", run.id, "--store", url, "--once"]) == 0
    assert "stopped" in capsys.readouterr().out
    assert main(["runs", "close", run.id, "--store", url]) == 0
    capsys.readouterr()
    assert main(["runs", "--store", url, "--once"]) == 0
    assert "no run is open" in capsys.readouterr().out
    assert main(["runs", "--store", url, "--once", "--all"]) == 0
    assert "closed" in capsys.readouterr().out


def test_reports(url, capsys):
    run, _ = make(url)
    assert main(["runs", "report", run.id, "--by", "tool,model", "--csv", "--store", url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tool,model,usd_micros,requests",
        ",,0,0",
        ",large,30000,1",
        "web_search,,10000,1",
    ]
    assert main(["runs", "report", "--store", url, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["node"] for row in rows} == {"research", "research/planner", "research/planner/search"}
    assert main(["runs", "report", run.id, "--store", url]) == 0
    assert "0.03 usd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stop"], "expected the id of a node"),
        (["extend", "ID"], "needs --add"),
        (["extend", "ID", "--add", "usd"], "expected amounts such as"),
        (["stop", "nope"], "the run nope is unknown"),
        (["report", "ID", "--by", "day"], "must be some of node, tool, model"),
    ],
)
def test_what_is_wrong_is_said(url, capsys, arguments, message):
    run, _ = make(url)
    assert main(["runs", *(run.id if each == "ID" else each for each in arguments), "--store", url]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.process
def test_the_runs_of_a_service(url, tmp_path, capsys, monkeypatch):
    run, planner = make(url)
    monkeypatch.setenv("TIDEGATE_TOKEN", ADMIN)
    text = f"policies: {{api: 2/1m}}\nstore: {url}\nadmin_token: {ADMIN}\n"
    with serving(tmp_path, text) as service:
        where = ["--url", service.url]
        assert main(["runs", "--once", *where]) == 0
        assert "planner" in capsys.readouterr().out
        assert main(["runs", "extend", run.id, "--add", "usd=1", *where]) == 0
        assert main(["runs", "report", run.id, "--by", "model", "--csv", *where]) == 0
        assert "large,30000,1" in capsys.readouterr().out
        assert main(["runs", "stop", run.id, "--end-streams", *where]) == 0
        with pytest.raises(RunDenied):
            planner.charge()
        assert "tidegate_run_used{" in service.get("/metrics").text
        panel = service.get("/v1/overview", headers={"authorization": f"Bearer {ADMIN}"}).json()["panels"]["runs"]
        assert [row["name"] for row in panel if row["first"]] == ["research", "planner", "search"]
        assert main(["runs", "close", run.id, *where]) == 0
