"""The report of a replay, and the command that writes it."""

import json
import random
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from tests.plan.drivers import LOG_FORMAT, START, Call, write_log
from tidegate._cli import main
from tidegate.plan import ReplayOptions, read_spec, replay
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._report import ClientNames

OPTIONS = ReplayOptions(LogOptions(log_format=LOG_FORMAT))
COARSE = '203.0.113.9 - - [10/Oct/2026:13:55:{:02} +0000] "GET /{} HTTP/1.1" 200 1 "-" "-"\n'
CONFIG = """
rate_limiting:
  categories:
    items: {limits: [2/10s], endpoints: [/items/*]}
    save: {limits: [1/1h, 5/1d], endpoints: [{path: /save, methods: [POST]}]}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def log(tmp_path):
    made = [Call(at * 1000, target=f"/items/{at}", peer=f"203.0.113.{at % 2}") for at in range(8)]
    made += [Call(9000 + at, target="/save", method="POST", peer="203.0.113.7") for at in range(3)]
    return write_log(tmp_path / "access.log", [*made, Call(20_000, target="/free", peer="203.0.113.8")])


def test_a_report_says_who_was_denied_by_what(log, config):
    report = replay([log], read_spec([config]), OPTIONS)
    assert report["totals"] == {
        "requests": 12, "limited": 11, "denied": 6, "denied_share": 0.5, "blocked": 0, "shadow_denied": 0, "clients": 4,
        "denied_clients": 3, "denied_clients_share": 0.75,
    }  # fmt: skip
    assert {each["policy"]: each["denied"] for each in report["policies"]} == {"items": 4, "save": 2}
    (items,) = report["policies"][0]["limits"]
    assert (items["name"], items["denied"], items["clients"], items["closeness"]) == (
        "items-10s",
        4,
        2,
        [0, 0, 0, 0, 2],
    )
    hour, day = report["policies"][1]["limits"]
    assert (hour["denied"], day["denied"], day["closeness"]) == (2, 0, [1, 0, 0, 0, 0])
    first = report["clients"][0]
    assert (first["client"], first["requests"], first["denied"]) == ("203.0.113.0", 4, 2)
    assert first["closest"] == {"limit": "items items-10s", "used": 2, "quota": 2, "share": 1.0}
    assert first["first_denied"] == "2026-09-21T14:13:24+00:00"
    assert {each["endpoint"]: each["denied"] for each in report["endpoints"]} == {
        "GET /items/{id}": 4, "POST /save": 2, "GET /free": 0,
    }  # fmt: skip
    assert sum(report["timeline"]["requests"]) == 12
    assert sum(report["timeline"]["denied"]) == 6
    assert report["retry_after"]["longest"] == 3599.999
    assert report["range"] is None


def test_retries_take_permits_and_are_counted_apart(tmp_path):
    log = write_log(tmp_path / "a.log", [Call(0), Call(1000), Call(2000)])
    spec = read_spec(["api=1/10s sliding_log"])
    report = replay([log], spec, ReplayOptions(OPTIONS.logs, retries=5))
    assert report["totals"]["denied"] == 2
    assert report["retries"] == {"requests": 3, "denied": 1, "given_up": 0}
    report = replay([log], spec, ReplayOptions(OPTIONS.logs, retries=1))
    assert report["retries"] == {"requests": 2, "denied": 1, "given_up": 1}


def test_coarse_times_give_a_range_that_holds_the_truth(tmp_path):
    (tmp_path / "a.log").write_text("".join(COARSE.format(second, "a") for second in (0, 0, 1, 1, 2, 3, 3, 4, 5, 6)))
    report = replay([tmp_path / "a.log"], read_spec(["api=2/3s sliding_log"]))
    low, high = report["range"]["denied"]
    assert low < report["totals"]["denied"] <= high
    assert report["range"]["resolution"] == 1.0
    assert not report["log"]["arrival_times"]
    exact = ReplayOptions(uncertainty=0)
    assert replay([tmp_path / "a.log"], read_spec(["api=2/3s sliding_log"]), exact)["range"] is None


@pytest.mark.parametrize("seed", range(5))
def test_the_range_of_one_limit_is_a_bound(seed, tmp_path):
    chosen = random.Random(seed)
    at, made = 0, []
    for _ in range(200):
        at += chosen.choice([0, 50, 300, 900, 2000])
        made.append(Call(at, peer="203.0.113.9", target="/a"))
    spec = read_spec([chosen.choice(["api=3/2s sliding_log", "api=4/5s sliding_log", "api=2/3s sliding_log"])])
    exact = replay([write_log(tmp_path / "exact.log", made)], spec, OPTIONS)["totals"]["denied"]
    times = [datetime.fromtimestamp((START + call.at) // 1000, UTC) for call in made]
    line = '203.0.113.9 - - [{:%d/%b/%Y:%H:%M:%S} +0000] "GET /a HTTP/1.1" 200 1 "-" "-"\n'
    text = "".join(map(line.format, times))
    (tmp_path / "coarse.log").write_text(text)
    low, high = replay([tmp_path / "coarse.log"], spec)["range"]["denied"]
    assert low <= exact <= high


def test_hashed_names_hide_clients_and_malformed_lines(log, tmp_path):
    with log.open("a") as file:
        file.write("203.0.113.99 secret\n")
    spec = read_spec(["api=2/10s"])
    shown = json.dumps(
        replay([log], spec, ReplayOptions(OPTIONS.logs, names=ClientNames(hashed=True, secret="k" * 20)))
    )
    assert "203.0.113" not in shown
    again = json.dumps(
        replay([log], spec, ReplayOptions(OPTIONS.logs, names=ClientNames(hashed=True, secret="k" * 20)))
    )
    other = json.dumps(replay([log], spec, ReplayOptions(OPTIONS.logs, names=ClientNames(hashed=True))))
    assert shown == again != other


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_command_writes_the_report(arguments, log, config, capsys):
    assert main(["plan", "replay", str(log), "--policy", str(config), "--log-format", LOG_FORMAT, *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if arguments:
        assert json.loads(out)["totals"]["denied"] == 6
    else:
        assert "denied: 6 of 12 requests (50 %), 3 of 4 clients (75 %)" in out
        assert "save: 1/1h sliding_log name=save-1h" in out
        assert "POST /save" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay"], "FILE: expected a log, such as: tidegate plan replay access.log --policy config.yaml"),
        (["replay", "LOG"], "--policy: expected rules, such as --policy config.yaml"),
        (["replay", "LOG", "--policy", "api=2/fortnight"], "unknown unit of time 'fortnight'"),
        (["replay", "LOG", "--policy", "api=2/1h slow"], "unknown algorithm 'slow'"),
        (["replay", "LOG", "--policy", "api=2/1m", "--policy", "CONFIG"], "cannot be combined"),
        (["replay", "LOG", "--policy", "api=2/1m", "--policy", "b=2/1m"], "which of the policies api, b"),
        (["replay", "LOG", "--policy", "api=2/1m", "--timezone", "Mars"], "expected a time zone"),
        (["replay", "LOG", "--policy", "api=2/1m", "--columns", "x"], "expected a field and its column"),
        (["replay", "LOG", "--policy", "missing.yaml"], "missing.yaml: cannot be read"),
        (["replay", "LOG", "--policy", "api=2/1h concurrency"], "a limit of concurrent requests cannot be replayed"),
    ],
)
def test_wrong_arguments_say_what_would_be_right(arguments, message, log, config, capsys):
    paths = {"LOG": str(log), "CONFIG": str(config)}
    given = [paths.get(each, each) for each in arguments]
    assert main(["plan", *given, "--log-format", LOG_FORMAT]) == 2
    assert message in capsys.readouterr().err


def test_a_limit_of_slots_needs_durations(tmp_path, capsys):
    (tmp_path / "a.log").write_text(COARSE.format(1, "a"))
    (tmp_path / "config.yaml").write_text(
        "rate_limiting: {categories: {a: {limits: [2/1h concurrency], endpoints: [/a]}}}"
    )
    arguments = [str(tmp_path / "a.log"), "--policy", str(tmp_path / "config.yaml"), "--uncertainty", "0s"]
    assert main(["plan", "replay", *arguments]) == 2
    assert "can only be replayed from a log with durations, such as $request_time" in capsys.readouterr().err


SHARDED = """
import sys
from tidegate.plan import ReplayOptions, read_spec
from tidegate.plan import _api as api
from tidegate.plan._logs.formats import LogOptions
api.MIN_PARALLEL_BYTES = 0
def read(processes):
    options = ReplayOptions(LogOptions(log_format=sys.argv[3]), processes, retries=2, uncertainty=1_000_000)
    return api.replay(sys.argv[1:2], read_spec(sys.argv[2:3]), options)
if __name__ == "__main__":
    alone = read(1)
    assert read(3) == alone
    print(alone["totals"]["denied"] > 0, alone["retries"]["requests"] > 0)
"""


def test_processes_that_share_the_clients_give_the_same_report(tmp_path, config):
    made = [Call(at * 50, target=f"/items/{at}", peer=f"203.0.113.{at * at % 41}") for at in range(400)]
    log = write_log(tmp_path / "access.log", made)
    (tmp_path / "program.py").write_text(SHARDED)
    arguments = [sys.executable, tmp_path / "program.py", log, config, LOG_FORMAT]
    result = subprocess.run(arguments, capture_output=True, check=True, text=True)
    assert result.stdout == "True True\n"
