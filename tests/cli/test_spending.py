"""`tidegate budget --by …` and `--providers …`: reports of a ledger, and the spending ceilings with a forecast."""

import csv
import io
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tests.budget.polling import wait_until
from tests.budget.receiver import run_receiver
from tidegate import ConfigError, Denied, Limit, StoreUnavailable
from tidegate._cli import main
from tidegate._cli.spending import find_window
from tidegate.budget import TaskBudget
from tidegate.core._bounds import MAX_INTEGER
from tidegate.outbound import Providers, request_options
from tidegate.outbound.httpx import RateLimitTransport
from tidegate.spending import Ledger, Spending
from tidegate.spending._ledger import MAX_SUM, read_ledger
from tidegate.spending._milestones import MAX_NAMES, Milestones
from tidegate.spending._monitor import CeilingUsage
from tidegate.spending._report import forecast_ceiling, format_amount, short_money
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

URL = "https://api.test/v1/chat/completions"
SETTINGS = """
domain: api.test
name: models
profile: openai
price: {date: 2026-11-01, models: {m: {input: 1, output: 5}, n: {input: 2, output: 10}}}
limits: [1000/1m, 0.02/day unit=usd]
spend: [{limit: 0.01, period: day, unit: usd, per: team}]
pool: {members: [{name: a}]}
"""
START = 1_767_268_800  # 2026-01-01 12:00 UTC


class Client(httpx.Client):
    """A client whose answers have 30 tokens, unless it is told otherwise."""

    def __init__(self, providers, store, **options):
        self.tokens = 30

        def handle(_request):
            return httpx.Response(200, json={"usage": {"prompt_tokens": 100, "completion_tokens": self.tokens}})

        transport = RateLimitTransport(
            providers, store, httpx.MockTransport(handle), timeout=0, tokenizer=lambda _text: 100, **options
        )
        self.gate = transport.gate
        super().__init__(transport=transport)

    def ask(self, model, team="", tag=""):
        with request_options(team=team, tag=tag):
            self.post(URL, json={"model": model, "max_tokens": 100}).raise_for_status()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture
def store():
    return MemoryStore(clock=ManualClock(START))


def report(capsys, *arguments):
    assert main(["budget", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def ledger(tmp_path, file, store):
    """A ledger of two days."""
    path = tmp_path / "spending.db"
    with Client(Providers.load(files=[file]), store, spending=Spending(path, clock=store.clock)) as client:
        client.ask("m", "search")
        client.ask("n", "search", "nightly")
        client.ask("m", "=cmd()")
        store.clock.advance(86_400)
        client.ask("m", "search")
        client.tokens = 200
        client.ask("m")
        client.gate.spending.close()
    return path


def test_sums_by_model_team_and_day(ledger, capsys):
    rows = json.loads(report(capsys, "--by", "model,team,day", "--ledger", ledger, "--json"))
    found = [(row["model"], row["team"], row["day"], row["calls"], row["amount"], row["overrun"]) for row in rows]
    assert found == [
        ("m", "", "2026-01-02", 1, 1100, 500),
        ("m", "=cmd()", "2026-01-01", 1, 250, 0),
        ("m", "search", "2026-01-01", 1, 250, 0),
        ("m", "search", "2026-01-02", 1, 250, 0),
        ("n", "search", "2026-01-01", 1, 500, 0),
    ]
    assert {row["unit"] for row in rows} == {"usd_micros"}


def test_as_csv_without_formulas(ledger, capsys):
    text = report(capsys, "--by", "team", "--ledger", ledger, "--csv", "--until", "2026-01-01")
    rows = list(csv.DictReader(io.StringIO(text)))
    found = [(row["team"], row["calls"], row["amount"]) for row in rows]
    assert found == [("'=cmd()", "1", "250"), ("search", "2", "750")]


def test_control_characters_are_not_written_as_csv(tmp_path, file, capsys):
    path, url = tmp_path / "spending.db", f"sqlite:///{tmp_path}/quota.db"
    ledger = Ledger(path)
    for team in ("\n=cmd()", " =cmd()", "\x1b[31mred", "nul\0", "-"):
        ledger.add("models", "usd_micros", 5, team=team)
    ledger.close()
    text = report(capsys, "--by", "team", "--ledger", path, "--csv")
    rows = list(csv.reader(io.StringIO(text)))
    assert [row[0] for row in rows] == ["team", "'?=cmd()", "?[31mred", "' =cmd()", "'-", "nul?"]
    text = report(capsys, "--providers", file, "--store", url, "--ledger", path, "--csv")
    assert "\x1b" not in text
    assert "team=?[31mred" in text


def test_as_a_table(ledger, capsys):
    lines = report(capsys, "--by", "day,member", "--ledger", ledger, "--since", "2026-01-02").splitlines()
    assert lines[0].split() == ["day", "member", "calls", "amount", "overrun"]
    assert lines[1].split() == ["2026-01-02", "a", "2", "0.00135", "usd", "0.0005", "usd"]


def test_two_ledgers_are_summed(ledger, tmp_path, capsys):
    other = Ledger(tmp_path / "other.db")
    other.add("elsewhere", "usd_micros", 7)
    other.close()
    rows = json.loads(report(capsys, "--by", "source", "--ledger", ledger, "--ledger", other.path, "--json"))
    assert [(row["source"], row["calls"]) for row in rows] == [("elsewhere", 1), ("models", 5)]


def test_task_budgets_are_reported_alike(ledger, tmp_path, capsys):
    costs = {"usd_micros": {"day": 5_000_000}}
    with TaskBudget(per_day=100, costs=costs, store=tmp_path / "tasks.db", ledger=ledger) as budget:
        result = budget.check_all_limits(10, task_type="embedding", cost={"usd_micros": 300_000})
        budget.record_completed_tasks(9, cost={"usd_micros": 271_500}, result=result)
        budget.record_completed_tasks(2)
    rows = json.loads(report(capsys, "--by", "source,model", "--ledger", ledger, "--json"))
    found = [(row["source"], row["model"], row["unit"], row["calls"], row["amount"]) for row in rows]
    assert found == [
        ("models", "m", "usd_micros", 4, 1850),
        ("models", "n", "usd_micros", 1, 500),
        ("tasks", "", "tasks", 2, 2),
        ("tasks", "embedding", "tasks", 9, 9),
        ("tasks", "embedding", "usd_micros", 9, 271_500),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "modle"], "--by: unknown column 'modle': did you mean 'model'?"),
        (["--by", "day,day"], "--by: expected different columns, such as model,team,day, not 'day,day'"),
        (["--by", "day", "--since", "monday"], "--since: expected a day such as 2026-11-01, not 'monday'"),
        ([], "--ledger: reports a ledger: add --by with its columns, such as --by model,day"),
    ],
)
def test_wrong_arguments(ledger, capsys, arguments, message):
    assert main(["budget", "--ledger", str(ledger), *arguments]) != 0
    assert message in capsys.readouterr().err


def test_a_ledger_that_does_not_exist(tmp_path, capsys):
    assert main(["budget", "--by", "day", "--ledger", str(tmp_path / "none.db")]) != 0
    assert "none.db does not exist" in capsys.readouterr().err


def test_ceilings_with_debt_and_forecast(tmp_path, file, capsys):
    url = f"sqlite:///{tmp_path}/quota.db"
    with Client(Providers.load(files=[file]), url, spending=str(tmp_path / "spending.db")) as client:
        client.ask("m", "search")
        client.tokens = 3000
        client.ask("m", "mail")
    arguments = ["--providers", file, "--store", url, "--ledger", tmp_path / "spending.db"]
    rows = {row["key"]: row for row in json.loads(report(capsys, *arguments, "--json"))}
    assert {key: (row["used"], row["debt"]) for key, row in rows.items()} == {
        "api.test/member=a": (15_350, 0),
        "team=search": (250, 0),
        "team=mail": (15_100, 5_100),
    }
    assert rows["team=mail"]["reached_in"] == 0.0
    lines = report(capsys, *arguments).splitlines()
    assert any("0.0151 usd" in line and "151 %" in line and "reached; reset in" in line for line in lines)
    assert "15100" in report(capsys, *arguments, "--csv")


def test_forecasts():
    hour = 3600.0
    assert forecast_ceiling(50, 100, 6 * hour, 18 * hour) == pytest.approx((50 / 6, 6 * hour))
    assert forecast_ceiling(10, 100, 6 * hour, 18 * hour).reached_in is None
    assert forecast_ceiling(0, 100, 6 * hour, 18 * hour) == (0.0, None)
    assert forecast_ceiling(110, 100, 6 * hour, 18 * hour).reached_in == 0.0


@pytest.mark.parametrize(
    ("amount", "text"), [(25_000_000, "25.00 usd"), (1, "0.000001 usd"), (-1_500_000, "-1.50 usd"), (0, "0.00 usd")]
)
def test_amounts(amount, text):
    assert format_amount(amount, "usd_micros") == text
    assert format_amount(1234, "tasks") == "1,234 tasks"


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (2712, "0.0027"),
        (9999, "0.01"),
        (3, "0.000003"),
        (155_000, "0.16"),
        (1_234_567_890, "1,234.57"),
        (-2712, "-0.0027"),
        (0, "0.00"),
    ],
)
def test_small_amounts_in_a_table_are_not_shown_as_zero(micros, text):
    assert short_money(micros) == text


# ---- warnings --------------------------------------------------------------------------------------------------------


def test_warnings_at_50_80_and_100_percent_by_log_metric_and_webhook(file, store, caplog):
    with run_receiver() as receiver:
        spending = Spending(webhook=receiver.url, secret="secret", clock=store.clock)  # noqa: S106 - of a test
        with Client(Providers.load(files=[file]), store, spending=spending) as client:
            client.tokens = 100
            for _ in range(16):
                client.ask("m", "search")  # 600 of 10,000
            with pytest.raises(Denied, match="usd-day"):
                client.ask("m", "search")
            metrics = client.gate.metrics()
            wait_until(lambda: len(receiver.requests) == 3, "the warnings")
            spending.close()
        teams = [json.loads(body) for _, body in receiver.requests]
        assert [each["milestone"] for each in teams] == [50, 80, 100]
        assert (teams[0]["used"], teams[0]["quota"], teams[0]["debt"]) == (5400, 10_000, 0)
        assert (metrics["warned_50"], metrics["warned_80"], metrics["warned_100"]) == (1, 1, 1)
        assert metrics["spent_micros"] == 16 * 600
        assert "80 % of api.test:usd-day+team team=search is used or reserved: 0.0084 usd of 0.01 usd" in caplog.text
        levels = [record.levelname for record in caplog.records if "% of" in record.getMessage()]
        assert levels == ["WARNING"] * 3


def test_each_window_warns_again(file, store):
    spending = Spending(clock=store.clock)
    with Client(Providers.load(files=[file]), store, spending=spending) as client:
        client.tokens = 100
        for _ in range(2):
            for _ in range(10):
                client.ask("m", "search")
            store.clock.advance(86_400)
        assert client.gate.metrics()["warned_50"] == 2


def test_validate_names_the_members_and_ceilings_of_a_provider(tmp_path, capsys):
    file = tmp_path / "models.yaml"
    file.write_text(
        "domain: ai.example\nprofile: openai\nlimits: [60/1m]\n"
        "price: {date: 2026-11-01, models: {m: {input: 1, output: 4}}}\n"
        "spend: [25/day unit=usd, {limit: 5, period: day, unit: usd, per: team}]\n"
        "pool: {members: [{name: a}, {name: b, limits: [30/1m], drain: true}]}\n",
        encoding="utf-8",
    )
    assert main(["validate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "member a: 60/1m sliding_log\n" in out
    assert "member b: 30/1m sliding_log, drained\n" in out
    assert "spending ceiling: 25000000/day" in out
    assert "spending ceiling for each team: 5000000/day" in out


def test_a_limit_without_fixed_windows_warns_once_per_milestone(store):
    settings = {
        "domain": "api.test",
        "profile": "openai",
        "price": {"date": "2026-11-01", "models": {"m": {"input": 1, "output": 5}}},
        "limits": ["0.005/1d unit=usd"],
    }
    with Client(Providers.of(settings), store, spending=Spending()) as client:
        for _ in range(17):  # 250 each
            client.ask("m")
            store.clock.advance(60)
        assert {name: count for name, count in client.gate.metrics().items() if name.startswith("warned")} == {
            "warned_50": 1,
            "warned_80": 1,
        }
        store.clock.advance(90_000)
        for _ in range(11):
            client.ask("m")
        assert client.gate.metrics()["warned_50"] == 2


def test_a_name_that_is_not_valid_unicode_does_not_stop_the_ledger(tmp_path, store):
    ledger = Ledger(tmp_path / "spending.db", clock=store.clock)
    ledger.add("models", "usd_micros", 5, model="\ud800")
    ledger.add("models", "usd_micros", 7, model="m")
    assert [(entry.model, entry.amount) for entry in ledger.read()] == [("?", 5), ("m", 7)]
    ledger.close()


def test_an_empty_file_is_a_ledger_without_entries(tmp_path, capsys):
    path = tmp_path / "spending.db"
    path.touch()
    assert report(capsys, "--by", "day", "--ledger", path) == "nothing was spent in this time range\n"
    assert path.read_bytes() == b""


@pytest.mark.parametrize("content", [b"not a database", bytes(range(256)) * 20], ids=["text", "bytes"])
def test_a_file_that_is_no_ledger_is_refused_and_not_changed(tmp_path, capsys, content):
    path = tmp_path / "spending.db"
    path.write_bytes(content)
    assert main(["budget", "--by", "day", "--ledger", str(path)]) != 0
    assert f"cannot read the ledger {path}: " in capsys.readouterr().err
    assert path.read_bytes() == content
    with pytest.raises(StoreUnavailable, match="cannot open the ledger"):
        Spending(path)


def test_accounts_of_models_are_listed_and_those_of_unknown_keys_are_named(tmp_path, capsys):
    url, prices = f"sqlite:///{tmp_path}/quota.db", "{date: 2026-11-01, models: {'*': {input: 1, output: 5}}}"
    folder = tmp_path / "providers"
    folder.mkdir()
    head = f"profile: openai\nprice: {prices}\nlimits: [0.01/day unit=usd]\n"
    models = "models: {big*: [0.02/day unit=usd], other: [0.03/day unit=usd]}\n"
    (folder / "a.yaml").write_text(f"domain: a.test\n{head}{models}")
    (folder / "b.yaml").write_text(f"domain: b.test\n{head}per: model\n")
    (folder / "c.yaml").write_text(f"domain: c.test\n{head}per: credential\n")
    with Client(Providers.load(directories=[folder]), url, spending=str(tmp_path / "spending.db")) as client:
        for host in "abc":
            client.post(f"https://{host}.test/v1/chat/completions", json={"model": "big-1", "max_tokens": 100})
    arguments = ["--providers", folder, "--store", url, "--ledger", tmp_path / "spending.db", "--json"]
    assert main(["budget", *map(str, arguments)]) == 0
    output = capsys.readouterr()
    found = [(row["key"], row["used"], row["quota"]) for row in json.loads(output.out)]
    assert found == [
        ("a.test", 0, 10_000),
        ("a.test/models=big*", 250, 20_000),
        ("a.test/models=other", 0, 30_000),
        ("b.test/model=big-1", 250, 10_000),
    ]
    assert "c: its limits apply to each credential separately" in output.err


@pytest.mark.parametrize(
    ("limit", "window"),
    [
        ("25/month unit=usd", (16 * 86_400 + 43_200, 13 * 86_400 + 43_200)),  # of 30 days
        ("25/day calendar_window unit=usd timezone=Europe/Berlin", (13 * 3600, 11 * 3600)),
        ("25/1d fixed_window unit=usd", (86_400 - 600, 600)),
        ("25/1d sliding_log unit=usd", (86_400, 0)),  # the last period, whenever its calls were
    ],
)
def test_how_long_a_window_has_lasted(limit, window):
    now = 1_794_916_800  # 2026-11-17 12:00 UTC
    assert find_window(Limit.parse(limit), 600.0, now * 10**6) == window


def test_a_ledger_that_cannot_be_written_is_logged_once_and_nothing_is_lost(tmp_path, store, caplog):
    path = tmp_path / "spending.db"
    ledger = Ledger(path, clock=store.clock)
    path.unlink()
    path.mkdir()
    for _ in range(3):
        ledger.add("models", "usd_micros", 5)
        ledger.flush()
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot write the ledger {path}, its entries are kept in memory: {caplog.records[0].args[1]}"
    ]
    path.rmdir()  # the file is made again, such as after a rotation
    assert [(entry.calls, entry.amount) for entry in ledger.read()] == [(3, 15)]
    ledger.close()


def test_a_ledger_in_a_folder_that_does_not_exist(tmp_path):
    message = r"ledger: cannot create the ledger .*x.db: No such file or directory: give a path in a folder that exists"
    with pytest.raises(ConfigError, match=message):
        Spending(tmp_path / "no" / "x.db")


def test_sums_that_the_file_cannot_store_are_capped_and_lose_no_other_entries(tmp_path, store, capsys):
    ledger = Ledger(tmp_path / "spending.db", clock=store.clock)
    ledger.add("other", "usd_micros", 7)
    for _ in range(2):
        for _ in range(600):  # 600 * 2**53 is more than MAX_SUM
            ledger.add("models", "usd_micros", MAX_INTEGER, overrun=MAX_INTEGER)
        ledger.flush()
    found = {entry.source: (entry.calls, entry.amount, entry.overrun) for entry in ledger.read()}
    assert found == {"models": (1200, MAX_SUM, MAX_SUM), "other": (1, 7, 0)}
    ledger.close()
    assert "4,611,686,018,427.387903 usd" in report(capsys, "--by", "source", "--ledger", ledger.path)


def test_a_sum_that_an_earlier_version_has_stored_as_a_float(tmp_path, store, capsys):
    ledger = Ledger(tmp_path / "spending.db", clock=store.clock)
    ledger.add("models", "usd_micros", 1)
    ledger.flush()
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("UPDATE spending SET amount = 1.8e19")
    assert "9,223,372,036,854.775807 usd" in report(capsys, "--by", "source", "--ledger", ledger.path)
    ledger.add("models", "usd_micros", 1)
    assert [entry.amount for entry in ledger.read()] == [MAX_SUM]
    ledger.close()


# ---- processes -------------------------------------------------------------------------------------------------------

NOT_CLOSED = """
import sys
from tidegate.spending import Ledger
ledger = Ledger(sys.argv[1])
ledger.add("models", "usd_micros", 5)
"""
FORKED = f"""{NOT_CLOSED}
import os
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(Ledger(sys.argv[1]).read())[0][-3:] == (1, 70, 0)  # the child does not write the entries of its parent
else:
    ledger.add("models", "usd_micros", 70)
"""


@pytest.mark.parametrize(("program", "found"), [(NOT_CLOSED, (1, 5)), (FORKED, (2, 75))], ids=["one", "forked"])
def test_a_process_that_ends_without_closing_the_ledger_writes_its_entries(tmp_path, program, found):
    path = tmp_path / "spending.db"
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=60)
    assert [(entry.calls, entry.amount) for entry in read_ledger(path)] == [found]


@pytest.mark.once
@pytest.mark.parametrize("arguments", [[], ["--csv"], ["--json"]])
def test_output_that_cannot_be_written_is_an_error_of_one_line(ledger, arguments):
    command = [sys.executable, "-m", "tidegate", "budget", "--by", "day", "--ledger", ledger, *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    (line,) = done.stderr.splitlines()
    assert "cannot write to standard output: No space left on device" in line
    assert done.returncode == 3


def test_milestones_of_the_latest_limits_are_remembered():
    def usage(used):
        return CeilingUsage(used, 100, 60.0, "usd_micros")

    at = datetime(2026, 11, 17, tzinfo=UTC)
    milestones = Milestones((50,), fixed=True)
    assert milestones.update({"first": usage(60)}, at) == [("first", 50)]
    assert milestones.update({"first": usage(61)}, at) == []
    for number in range(MAX_NAMES):
        milestones.update({f"team {number}": usage(60)}, at)
    assert milestones.update({f"team {MAX_NAMES - 1}": usage(61)}, at) == []
    assert milestones.update({"first": usage(62)}, at) == [("first", 50)]  # it was forgotten
