"""Environment variables: the document's, checked together."""

import pytest

from tests.budget.faces import used
from tidegate.budget import AsyncTaskBudget, TaskBudget
from tidegate.budget.environment import CONFIG, VARIABLES, read_environment
from tidegate.errors import ConfigError


@pytest.fixture
def environ(path):
    return {
        "RATE_LIMIT_PER_MINUTE": "20",
        "RATE_LIMIT_PER_HOUR": "100",
        "RATE_LIMIT_PER_DAY": "500",
        "RATE_LIMIT_PER_WEEK": "2000",
        "RATE_LIMIT_PER_MONTH": "7_500",
        "RATE_LIMIT_STORAGE_PATH": str(path),
        "RATE_LIMIT_ENABLED": "true",
        "RATE_LIMIT_STRATEGY": "rolling",
        "CONCURRENCY_LIMIT": "5",
    }


def test_the_documents_example(open_budget, environ, path):
    budget = open_budget(environ)
    result = budget.check_all_limits(3)
    assert result.limits == {
        "minute": 20, "hour": 100, "day": 500, "week": 2000, "month": 7500, "concurrency": 5,
    }  # fmt: skip
    assert path.exists()
    assert used(budget)["month"] == 3


def test_the_process_s_own_environment(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with TaskBudget.from_env() as budget:
        assert budget.settings.per_month == 7500
    monkeypatch.delenv("RATE_LIMIT_PER_MONTH")
    with TaskBudget.from_env() as budget:
        assert budget.settings.per_month is None


async def test_the_async_budget_too(environ):
    async with AsyncTaskBudget.from_env(environ) as budget:
        assert (await budget.check_all_limits(20)).allowed
        assert not (await budget.check_all_limits(1)).allowed


def test_off_by_default(environ, path):
    del environ["RATE_LIMIT_ENABLED"]
    with TaskBudget.from_env(environ) as budget:
        assert not budget.settings.enabled
        assert budget.check_all_limits(10_000)
    with TaskBudget.from_env({}) as budget:
        assert budget.check_all_limits(10_000)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TRUE", True),
        ("1", True),
        ("yes", True),
        ("on", True),
        ("False", False),
        ("0", False),
        ("no", False),
        ("", False),
    ],
)
def test_words_for_on_and_off(environ, text, value):
    assert read_environment(environ | {"RATE_LIMIT_ENABLED": text}).enabled is value


def test_every_wrong_variable_is_named_at_once(environ):
    wrong = {
        "RATE_LIMIT_PER_MINUTE": "twenty",
        "RATE_LIMIT_PER_HOUR": "0",
        "RATE_LIMIT_PER_DAY": "-5",
        "RATE_LIMIT_PER_WEEK": "2.5",
        "RATE_LIMIT_PER_MONTH": "1" + "0" * 30,
        "RATE_LIMIT_ENABLED": "perhaps",
        "RATE_LIMIT_STRATEGY": "sliding",
        "RATE_LIMIT_TIMEZONE": "Mars/Olympus",
        "RATE_LIMIT_BATCH_TTL": "soon",
        "RATE_LIMIT_ON_DATABASE_ERROR": "panic",
        "RATE_LIMIT_WEBHOOK_URL": "ftp://example.com",
        "CONCURRENCY_LIMIT": "many",
        "RATE_LIMIT_CONFIG": "there is no such file.yaml",
    }
    with pytest.raises(ConfigError) as error:
        TaskBudget.from_env(environ | wrong)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{len(wrong)} settings of the budget are wrong:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(wrong)
    said = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert said["RATE_LIMIT_PER_MINUTE"] == (
        "expected a whole number of tasks, at least 1, not 'twenty'; leave it out for no limit"
    )
    assert said["RATE_LIMIT_STRATEGY"] == "expected rolling or fixed, not 'sliding'"


def test_one_wrong_variable(environ):
    with pytest.raises(ConfigError, match=r"^RATE_LIMIT_PER_DAY: expected a whole number of tasks"):
        TaskBudget.from_env(environ | {"RATE_LIMIT_PER_DAY": "five"})


def test_wrong_variables_are_refused_while_it_is_off(environ):
    """So that switching it on is no surprise."""
    with pytest.raises(ConfigError, match="RATE_LIMIT_STRATEGY"):
        TaskBudget.from_env(environ | {"RATE_LIMIT_ENABLED": "false", "RATE_LIMIT_STRATEGY": "fixd"})


def test_on_without_any_limit():
    with pytest.raises(ConfigError, match="RATE_LIMIT_ENABLED is true, but no limit is set"):
        TaskBudget.from_env({"RATE_LIMIT_ENABLED": "true"})


def test_the_folder_of_the_file_is_made(environ, tmp_path):
    path = tmp_path / "app" / "data" / "rate_limits.db"
    with TaskBudget.from_env(environ | {"RATE_LIMIT_STORAGE_PATH": str(path)}) as budget:
        assert budget.check_all_limits(1)
    assert path.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"RATE_LIMIT_STORAGE_PATH: the folder .* cannot be made: Not a directory"):
        TaskBudget.from_env(environ | {"RATE_LIMIT_STORAGE_PATH": str(tmp_path / "file" / "x" / "limits.db")})


def test_a_file_for_what_variables_do_not_say(environ, tmp_path, clock):
    file = tmp_path / "budget.yaml"
    file.write_text("tiers: {minute: 7, day: 9}\ncosts:\n  tokens: {day: 1000}\nstrategy: fixed\n")
    settings = read_environment(environ | {CONFIG: str(file)})
    assert (settings.per_minute, settings.per_day) == (20, 500)  # variables go before the file
    assert settings.costs == {"tokens": {"day": 1000}}
    assert settings.strategy == "rolling"
    only_file = {name: environ[name] for name in ("RATE_LIMIT_STORAGE_PATH", "RATE_LIMIT_ENABLED")}
    settings = read_environment(only_file | {CONFIG: str(file)})
    assert (settings.per_minute, settings.strategy) == (7, "fixed")


def test_a_wrong_file_is_one_of_the_wrong_settings(environ, tmp_path):
    file = tmp_path / "budget.yaml"
    file.write_text("tiers:\n  minut: 7\n")
    with pytest.raises(ConfigError) as error:
        read_environment({"RATE_LIMIT_ENABLED": "yes", "RATE_LIMIT_STRATEGY": "x", CONFIG: str(file)})
    assert f"{CONFIG}: {file}:2: tiers.minut: unknown setting: is 'minute' meant?" in str(error.value)
    assert "RATE_LIMIT_STRATEGY: expected rolling or fixed, not 'x'" in str(error.value)


def test_a_tier_that_is_never_reached_is_said_so(environ, caplog):
    with TaskBudget.from_env(environ | {"RATE_LIMIT_PER_MINUTE": "150"}):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "150 per minute is never reached: 100 per hour is less"
    ]


def test_the_file_may_switch_it_on(tmp_path, path):
    file = tmp_path / "budget.yaml"
    file.write_text(f"enabled: true\ntiers: {{minute: 7}}\nstorage: {path}\n")
    assert read_environment({CONFIG: str(file)}).enabled
    assert not read_environment({CONFIG: str(file), "RATE_LIMIT_ENABLED": "no"}).enabled


def test_documented_variables(environ):
    assert set(environ) <= set(VARIABLES.values())
