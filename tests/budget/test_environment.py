"""Settings from environment variables, checked together."""

import asyncio

import pytest

from tests.budget.both_kinds import used
from tests.cases import cases
from tidegate.budget import AsyncTaskBudget, TaskBudget
from tidegate.budget._settings.environment import CONFIG_VARIABLE, VARIABLES, read_environment
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


def test_the_variables_of_the_specification_are_read(open_budget, environ, path):
    budget = open_budget(environ)
    result = budget.check_all_limits(3)
    assert result.limits == {
        "minute": 20, "hour": 100, "day": 500, "week": 2000, "month": 7500, "concurrency": 5,
    }  # fmt: skip
    assert path.exists()
    assert used(budget)["month"] == 3


def test_the_environment_of_the_process_is_the_default(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with TaskBudget.from_env() as budget:
        assert budget.settings.per_month == 7500
    monkeypatch.delenv("RATE_LIMIT_PER_MONTH")
    with TaskBudget.from_env() as budget:
        assert budget.settings.per_month is None


async def test_the_async_budget_reads_the_environment(environ):
    async with AsyncTaskBudget.from_env(environ) as budget:
        assert (await budget.check_all_limits(20)).allowed
        assert not (await budget.check_all_limits(1)).allowed


def test_a_budget_is_disabled_by_default(environ, path):
    del environ["RATE_LIMIT_ENABLED"]
    with TaskBudget.from_env(environ) as budget:
        assert not budget.settings.enabled
        assert budget.check_all_limits(10_000)
    with TaskBudget.from_env({}) as budget:
        assert budget.check_all_limits(10_000)
    assert not path.exists()


@cases(
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
def test_words_for_true_and_false(environ, text, value):
    assert read_environment(environ | {"RATE_LIMIT_ENABLED": text}).enabled is value


def test_one_error_lists_every_wrong_variable(environ):
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
        "RATE_LIMIT_ON_STORE_ERROR": "panic",
        "RATE_LIMIT_WEBHOOK": "ftp://example.com",
        "CONCURRENCY_LIMIT": "many",
        "RATE_LIMIT_CONFIG": "there is no such file.yaml",
    }
    with pytest.raises(ConfigError) as error:
        TaskBudget.from_env(environ | wrong)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{len(wrong)} settings of the budget are invalid:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(wrong)
    messages = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert messages["RATE_LIMIT_PER_MINUTE"] == "expected an integer of at least 1, not 'twenty'"
    assert messages["RATE_LIMIT_STRATEGY"] == "expected rolling or fixed, not 'sliding'"


def test_one_wrong_variable_is_named(environ):
    with pytest.raises(ConfigError, match=r"^RATE_LIMIT_PER_DAY: expected an integer of at least 1"):
        TaskBudget.from_env(environ | {"RATE_LIMIT_PER_DAY": "five"})


def test_wrong_variables_are_refused_even_if_the_budget_is_disabled(environ):
    """So that enabling the budget later raises no new errors."""
    with pytest.raises(ConfigError, match="RATE_LIMIT_STRATEGY"):
        TaskBudget.from_env(environ | {"RATE_LIMIT_ENABLED": "false", "RATE_LIMIT_STRATEGY": "fixd"})


def test_an_enabled_budget_needs_a_limit():
    with pytest.raises(
        ConfigError, match="the budget is enabled but has no limits: set at least one of RATE_LIMIT_PER_"
    ):
        TaskBudget.from_env({"RATE_LIMIT_ENABLED": "true"})


def test_the_directory_of_the_file_is_created(environ, tmp_path):
    path = tmp_path / "app" / "data" / "rate_limits.db"
    with TaskBudget.from_env(environ | {"RATE_LIMIT_STORAGE_PATH": str(path)}) as budget:
        assert budget.check_all_limits(1)
    assert path.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"RATE_LIMIT_STORAGE_PATH: cannot create the directory .* is not a directory"
    ):
        TaskBudget.from_env(environ | {"RATE_LIMIT_STORAGE_PATH": str(tmp_path / "file" / "x" / "limits.db")})


def test_a_file_sets_what_the_variables_do_not(environ, tmp_path, clock):
    file = tmp_path / "budget.yaml"
    file.write_text("tiers: {minute: 7, day: 9}\ncosts:\n  tokens: {day: 1000}\nstrategy: fixed\n")
    settings = read_environment(environ | {CONFIG_VARIABLE: str(file)})
    assert (settings.per_minute, settings.per_day) == (20, 500)  # variables override the file
    assert settings.costs == {"tokens": {"day": 1000}}
    assert settings.strategy == "rolling"
    only_file = {name: environ[name] for name in ("RATE_LIMIT_STORAGE_PATH", "RATE_LIMIT_ENABLED")}
    settings = read_environment(only_file | {CONFIG_VARIABLE: str(file)})
    assert (settings.per_minute, settings.strategy) == (7, "fixed")


def test_an_error_in_the_file_is_listed_with_the_others(environ, tmp_path):
    file = tmp_path / "budget.yaml"
    file.write_text("tiers:\n  minut: 7\n")
    with pytest.raises(ConfigError) as error:
        read_environment({"RATE_LIMIT_ENABLED": "yes", "RATE_LIMIT_STRATEGY": "x", CONFIG_VARIABLE: str(file)})
    assert f"{CONFIG_VARIABLE}: {file}:2: tiers.minut: unknown setting: " in str(error.value)
    assert "RATE_LIMIT_STRATEGY: expected rolling or fixed, not 'x'" in str(error.value)


def test_a_tier_without_effect_is_logged(environ, caplog):
    with TaskBudget.from_env(environ | {"RATE_LIMIT_PER_MINUTE": "150"}):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "the limit of 150 per minute has no effect: 100 per hour is lower"
    ]


def test_the_file_can_enable_the_budget(tmp_path, path):
    file = tmp_path / "budget.yaml"
    file.write_text(f"enabled: true\ntiers: {{minute: 7}}\nstore: {path}\n")
    assert read_environment({CONFIG_VARIABLE: str(file)}).enabled
    assert not read_environment({CONFIG_VARIABLE: str(file), "RATE_LIMIT_ENABLED": "no"}).enabled


def test_the_variables_of_the_specification_are_known(environ):
    assert set(environ) <= set(VARIABLES.values())


def test_unknown_variables_are_warned_about_with_the_nearest_name(open_budget, environ, caplog):
    open_budget({**environ, "RATE_LIMIT_PER_DAYS": "3", "rate_limit_strategy": "fixed", "RATE_LIMIT_XYZZY": "1"})
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "unknown variable RATE_LIMIT_PER_DAYS has no effect; did you mean 'RATE_LIMIT_PER_DAY'?",
        "unknown variable RATE_LIMIT_XYZZY has no effect",
        "unknown variable rate_limit_strategy has no effect; did you mean 'RATE_LIMIT_STRATEGY'?",
    ]


def test_known_variables_are_not_warned_about(open_budget, environ, caplog):
    open_budget({**environ, "RATE_LIMIT_BATCH_TTL": "10m", "PATH": "/bin"})
    assert not caplog.records


def test_secrets_and_urls_may_be_in_files(environ, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret of a webhook\n", encoding="utf-8")
    values = {"RATE_LIMIT_WEBHOOK": "http://127.0.0.1:9/", "RATE_LIMIT_SECRET_FILE": str(secret)}
    assert read_environment({**environ, **values}).secret == "a secret of a webhook"  # noqa: S105 - of a test
    both = {**values, "RATE_LIMIT_SECRET": "another secret of it"}
    with pytest.raises(ConfigError, match="RATE_LIMIT_SECRET_FILE: cannot be combined with RATE"):
        read_environment({**environ, **both})
    missing = {"RATE_LIMIT_STORAGE_PATH_FILE": str(tmp_path / "missing"), "RATE_LIMIT_PER_DAY": "none"}
    without = {name: value for name, value in environ.items() if name != "RATE_LIMIT_STORAGE_PATH"}
    with pytest.raises(ConfigError) as error:
        read_environment({**without, **missing})
    assert "RATE_LIMIT_STORAGE_PATH_FILE: cannot read" in str(error.value)
    assert "RATE_LIMIT_PER_DAY" in str(error.value), "one error lists every wrong variable"


@pytest.mark.parametrize("kind", [TaskBudget, AsyncTaskBudget])
def test_a_path_alone_reads_the_environment(environ, monkeypatch, tmp_path, kind):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RATE_LIMIT_ENABLED", "true")
    monkeypatch.setenv("RATE_LIMIT_STORAGE_PATH", str(tmp_path / "other.db"))
    settings = settings_of(kind(tmp_path / "x.db"))
    assert (settings.enabled, settings.per_minute, settings.per_month) == (True, 20, 7500)
    assert settings.store == tmp_path / "x.db"
    assert not (tmp_path / "other.db").exists()
    replaced = settings_of(kind(str(tmp_path / "x.db"), per_day=3))
    assert replaced.per_minute is None  # settings of the call replace them all


def settings_of(budget):
    """Return the settings of a budget, and close it."""
    if (closing := budget.close()) is not None:
        asyncio.run(closing)
    return budget.settings


def test_a_path_alone_is_disabled_unless_the_environment_enables_it(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("RATE_LIMIT_PER_DAY", "5")
    assert not settings_of(TaskBudget(tmp_path / "x.db")).enabled
    assert "RATE_LIMIT_ENABLED is not set" in caplog.text


def test_a_path_without_any_settings_is_an_error(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"the budget has no limits: .* or RATE_LIMIT_ENABLED and RATE_LIMIT_PER_"):
        TaskBudget(tmp_path / "x.db")
