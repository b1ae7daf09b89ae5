"""Two sets of rules compared on the same requests, and conditions that fail a check."""

import json

import pytest

from tests.plan.drivers import LOG_FORMAT, Call, write_log
from tidegate._cli import main
from tidegate.errors import ConfigError
from tidegate.plan import ReplayOptions, diff, read_spec
from tidegate.plan._conditions import DIFF_FIGURES, REPLAY_FIGURES, Condition
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._markdown import escape

OPTIONS = ReplayOptions(LogOptions(log_format=LOG_FORMAT))


@pytest.fixture
def log(tmp_path):
    made = [Call(at * 100, target=f"/{at}", peer=f"203.0.113.{at % 3}") for at in range(12)]
    return write_log(tmp_path / "access.log", made)


def test_decisions_that_differ_are_counted(log):
    report = diff([log], read_spec(["api=3/1m"]), read_spec(["api=1/1m"]), OPTIONS)
    assert (report["old"]["denied"], report["new"]["denied"]) == (3, 9)
    assert report["newly_denied"] == {
        "requests": 6, "requests_share": 0.5, "clients": 3, "clients_share": 1.0, "usd": 0.0,
    }  # fmt: skip
    assert report["newly_allowed"]["requests"] == 0
    assert report["clients"][0] == {"client": "203.0.113.0", "newly_denied": 2, "newly_allowed": 0}
    back = diff([log], read_spec(["api=1/1m"]), read_spec(["api=3/1m"]), OPTIONS)
    assert (back["newly_denied"]["requests"], back["newly_allowed"]["requests"]) == (0, 6)


def test_money_of_changed_decisions_is_added_up(tmp_path):
    log = tmp_path / "usage.jsonl"
    records = [{"ts": 1790000000 + i, "user": "u", "model": "m", "usd": 0.5} for i in range(4)]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    report = diff([log], read_spec(["api=4/1m"]), read_spec(["api=1/1m"]))
    assert report["newly_denied"]["usd"] == 1.5


def test_the_command_fails_on_a_condition(log, capsys):
    arguments = ["plan", "diff", "api=3/1m", "api=1/1m", "--log", str(log), "--log-format", LOG_FORMAT]
    assert main([*arguments, "--fail-if", "newly_denied_clients > 50%"]) == 1
    out, err = capsys.readouterr()
    assert "newly denied: 6 requests (50 %) of 3 clients (100 %)" in out
    assert "- api: 3/1m" in out
    assert "+ api: 1/1m" in out
    assert err == "tidegate: --fail-if: newly_denied_clients > 50%\n"
    assert main([*arguments, "--fail-if", "newly_denied_requests > 6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == []
    assert main([*arguments, "--markdown"]) == 0
    assert "| denied | 3 | 9 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("denied_clients > 0.1%", True),
        ("denied_clients>2", False),
        ("denied_clients >= 2", True),
        ("denied_requests > 20 %", False),
        ("denied_requests >= 20%", True),
        ("denied_requests < 1_000", True),
    ],
)
def test_conditions(text, holds):
    report = {"totals": {"denied": 20, "requests": 100, "denied_clients": 2, "clients": 10}}
    assert Condition.parse(text, REPLAY_FIGURES).holds(report, REPLAY_FIGURES) is holds


def test_a_share_of_nothing_is_no_share():
    report = {"totals": {"denied": 0, "requests": 0, "denied_clients": 0, "clients": 0}}
    assert not Condition.parse("denied_clients > 0%", REPLAY_FIGURES).holds(report, REPLAY_FIGURES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("denied_client > 1", "did you mean 'denied_clients'"),
        ("denied_clients", "expected a condition such as"),
        ("denied_clients == 1", "expected a condition such as"),
        ("newly_denied_usd > 1%", "has no total"),
    ],
)
def test_wrong_conditions_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Condition.parse(text, DIFF_FIGURES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "api=1/1m", "--log", "LOG"], "expected the old and the new rules, and a log"),
        (["diff", "api=1/1m", "api=2/1m"], "expected the old and the new rules, and a log"),
        (["diff", "api=1/1m", "api=2/1m", "--log", "LOG", "--policy", "x"], "is an option of 'tidegate plan replay'"),
        (["replay", "LOG", "--policy", "api=1/1m", "--leave-out", "x"], "is an option of 'tidegate plan suggest'"),
    ],
)
def test_options_of_other_actions_are_refused(arguments, message, log, capsys):
    assert main(["plan", *(each.replace("LOG", str(log)) for each in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_names_from_a_log_are_no_markdown():
    assert escape("a|b`<img>`\n# c") == r"a\|b\`\<img\>\` \# c"
