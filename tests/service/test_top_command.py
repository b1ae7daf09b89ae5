"""`tidegate top` shows the overview of a running service, as text and as JSON."""

import json

import pytest

from tests.outbound.server import QuotaServer, as_json
from tests.servers.process import until
from tests.service.harness import ADMIN, DECISION, serving
from tidegate._cli import main, top
from tidegate._cli.live import watch
from tidegate._cli.output import CLEAR_SCREEN, Output

SORTING = top.Sorting(top.POLICY_ORDERS)
RULES = "policies: {api: 3/1h fixed_window, quiet: 5/1h}\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("service"), RULES) as running:
        running.get("/v1/overview")  # from now on, keys near a limit are recorded
        for key in ("k", "k", "k", "k", "evil\x1b[2J"):
            running.post("acquire", {"policy": "api", "key": key})
        yield running


def run_top(service, capsys, *options):
    code = main(["top", "--once", "--url", service.url, *options])
    return code, capsys.readouterr().out


def test_text_output(service, capsys):
    def has_counts():
        outputs.append(run_top(service, capsys))
        row = outputs[-1][1].split("\n")[5].split()
        return row[4:6] == ["4", "1"]

    outputs = []
    until(has_counts, "the counts of the first seconds")
    code, text = outputs[-1]
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith("tidegate ")
    assert "store memory ok, 1 in flight, 0 waiting" in lines[1]
    assert "calls" in lines[2]  # the status line of the dashboard
    assert lines[4].split()[:6] == ["policy", "admitted/s", "denied/s", "waiting", "admitted", "denied"]
    assert lines[5].split()[0] == "api"
    near = text.partition("nearest to a limit")[2].splitlines()
    assert near[0].split() == ["left", "of", "unit", "limit", "reset", "in"]
    assert near[1].split()[:2] == ["api:", "k"]
    assert near[1].split()[3:7] == ["0", "3", "requests", "1h"]
    denial = text.partition("latest denials")[2].splitlines()[1].split()
    assert denial[1:4] == ["api:", "k", "1h"]
    assert "\x1b" not in text


def test_json_output(service, capsys):
    code, text = run_top(service, capsys, "--json", "--rows", "1")
    data = json.loads(text)
    assert code == 0
    assert set(data) == {"store", "waiting", "in_flight", "policies", "findings", "near", "denials", "pools"}
    assert [len(data[name]) for name in ("policies", "near", "denials")] == [1, 1, 1]
    assert data["denials"][0]["violated"] == ["1h"]


def test_a_service_without_an_egress_gateway(service, capsys):
    assert main(["top", "--egress", "--once", "--url", service.url]) == 2
    reason = "has no egress gateway: start the service with egress: ADDRESS, or use the URL of an egress gateway"
    assert capsys.readouterr().err == f"tidegate: --egress: {service.url} {reason}\n"


@pytest.mark.parametrize("options", [(), ("--egress",)])
def test_a_server_that_is_no_service(options, capsys):
    with QuotaServer(respond=lambda _request: as_json({"status": "ok"})) as server:
        assert main(["top", "--once", "--url", server.url, *options]) == 3
    assert "not a tidegate service" in capsys.readouterr().err


def test_an_order_of_the_other_view_is_refused(capsys):
    assert main(["top", "--sort", "money"]) == 2
    assert capsys.readouterr().err.startswith("tidegate: --sort: expected rate, admitted, denied, waiting, name for ")


def test_a_token_from_the_environment(tmp_path, capsys, monkeypatch):
    text = f"decision_token: {DECISION}\nadmin_token: {ADMIN}\n{RULES}"
    with serving(tmp_path, text) as service:
        assert main(["top", "--once", "--url", service.url]) == 2
        assert capsys.readouterr().err.endswith(
            "; this command sends the token in --token-file FILE, or in TIDEGATE_TOKEN\n"
        )
        monkeypatch.setenv("TIDEGATE_TOKEN", DECISION)
        assert main(["top", "--once", "--url", service.url]) == 0
        capsys.readouterr()
        assert main(["block", "--url", service.url]) == 2
        assert capsys.readouterr().err.startswith("tidegate: token: this needs the admin token; this command sends ")


OVERVIEW = {
    "at": 1_728_000_090_000,
    "process": {"id": 7, "workers": 2, "since": 1_728_000_000_000, "version": "1"},
    "waiting": 1,
    "in_flight": 2,
    "policies": [
        {"name": name, "mode": "enforce", "waiting": 0, "admitted": 10, "denied": denied, "shadow": 0}
        for name, denied in (("calm", 0), ("busy", 4))
    ],
    "tracks": {"calm": [[1, 1], [0, 0], [0, 0]], "busy": [[0, 8, 4], [0, 0, 4], [0, 0, 0]]},
    "latency": [[None, 80], [None, 2500]],
    "store": {"kind": "redis", "lost": True, "leased": False, "counts": {}},
    "near": [],
    "panels": {},
    "denials": [
        {"at": 0, "policy": "busy", "key": ["a", "b"], "violated": ["1m"], "retry_after": None, "shadow": True},
    ],
}


def test_the_busiest_policies_are_first():
    rows = top.list_policies(OVERVIEW, SORTING)
    assert [(row["name"], row["admitted_per_second"], row["denied_per_second"]) for row in rows] == [
        ("busy", 4.0, 1.3),
        ("calm", 1.0, 0.0),
    ]
    assert top.curve([0, 1, 8]).lstrip(" ") == "▁█"
    assert top.curve([]) == " " * top.CURVE_SECONDS


def test_the_layout_of_the_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    output = Output()
    lines = top.draw(OVERVIEW, "http://here", output, 5, SORTING)
    assert lines[0] == "tidegate 1 on http://here"
    assert lines[1] == (
        "process 7 with 2 workers, up 1m30s, store redis lost, 2 in flight, 1 waiting, p50 0.08 ms, p99 2.5 ms"
    )
    assert lines[4].endswith(" █▄")
    assert lines[-1].split() == ["00:00:00", "busy:", "a", "b", "1m", "shadow"]
    assert "no policy is configured" in top.draw({**OVERVIEW, "policies": []}, "", output, 5, SORTING)
    output.live = True  # a terminal, without colours
    for columns in ("80", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = top.draw(OVERVIEW, "http://here", output, 5, SORTING)
        assert max(map(len, lines)) <= int(columns)
        assert not any(line.endswith("▄") for line in lines)


def test_keys_change_the_order():
    sorting = top.Sorting(top.POLICY_ORDERS)
    assert [row["name"] for row in top.list_policies(OVERVIEW, sorting)] == ["busy", "calm"]
    assert sorting.press("n")
    assert [row["name"] for row in top.list_policies(OVERVIEW, sorting)] == ["busy", "calm"]
    assert not sorting.press("x")
    assert sorting.footer() == "sort by r:rate a:admitted d:denied w:waiting n:[name]"
    overview = {**OVERVIEW, "policies": [{**each, "waiting": each["name"] == "calm"} for each in OVERVIEW["policies"]]}
    assert sorting.press("W")
    assert [row["name"] for row in top.list_policies(overview, sorting)] == ["calm", "busy"]


def test_a_terminal_is_redrawn(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    output = Output()
    watch(lambda: top.show(OVERVIEW, "http://here", output, 5, SORTING), output, 1.0, footer=SORTING.footer, rounds=1)
    text = capsys.readouterr().out
    assert text.startswith(CLEAR_SCREEN)
    assert "Ctrl-C ends  sort by r:[rate]" in text
