"""Settings from YAML, and errors with file, line and field."""

from fractions import Fraction
from pathlib import Path

import pytest

from tests.cases import cases
from tidegate.budget import AsyncTaskBudget, BudgetSettings, TaskBudget
from tidegate.budget._settings.file import read_config
from tidegate.errors import ConfigError

ALL_SETTINGS = """\
tiers: {minute: 20, hour: 100, day: 500, week: 2_000, month: 7500}
concurrency: 5
types:
  embedding: {minute: 100}
costs:
  usd_micros: {day: 5_000_000}
reserved: {1: 20%, 2: 0.05}
schedule:
  - {name: night, between: "22:00-06:00", days: mon-fri, scale: 200%}
  - {load_above: 0.8, limits: {minute: 5, "day:usd_micros": 100}}
strategy: fixed
timezone: Europe/Berlin
store: limits.db
name: nightly
batch_ttl: 5m
retention_days: 40
on_store_error: local
deadline: 0.5
milestones: [50, 90]
webhook: https://example.com/hook
secret: s3cret
"""


def test_all_settings_of_a_file_are_read(tmp_path):
    file = tmp_path / "budget.yaml"
    file.write_text(ALL_SETTINGS)
    settings = BudgetSettings(**read_config(file))
    assert [tier.name for tier in settings.plan.tiers] == [
        "minute", "hour", "day", "week", "month", "minute:embedding", "day:usd_micros", "concurrency",
    ]  # fmt: skip
    assert settings.plan.reserved_shares() == [(1, Fraction(1, 4)), (2, Fraction(1, 20))]
    night, busy = settings.schedule
    assert (night.between, night.days, night.scale) == ((1320, 360), frozenset(range(5)), 2)
    assert (busy.name, busy.load_above, busy.limits) == ("rule 2", 0.8, {"minute": 5, "day:usd_micros": 100})
    assert settings.batch_ttl_microseconds == 300_000_000
    assert settings.milestones == (50, 90)


def test_a_mapping_is_read_like_a_file(open_budget, path):
    budget = open_budget({"tiers": {"day": 10}, "reserved": {1: "10%"}, "store": str(path)})
    assert budget.check_all_limits(9)
    assert not budget.check_all_limits(1)
    assert budget.check_all_limits(1, priority=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tier: {}", "1: tier: unknown setting: "),
        ("tiers: {minute: none}", "1: tiers.minute: expected "),
        ("tiers: {year: 5}", "1: tiers.year: unknown setting: "),
        ("tiers: {day: 5}\nstrategy: rollin", "2: strategy: expected rolling or fixed, not 'rollin'"),
        ("tiers: {day: 5}\ntimezone: Berlin", "2: timezone: unknown time zone 'Berlin'"),
        ("types:\n  a:b: {day: 5}", "1: types: expected a task type without ':' and '<', not 'a:b'"),
        ("costs: {tasks: {day: 5}}", "1: costs: 'tasks' cannot be a unit: it is a reserved name"),
        ("reserved: {high: 0.5}", "1: reserved.high: expected an integer of at least 1 as priority, not high"),
        (
            "tiers: {day: 9}\nreserved: {101: 0.5}",
            "2: reserved: expected priorities up to 100, the largest that a task may have, not 101",
        ),
        ("reserved: {1: lots}", "1: reserved.1: expected a share such as 0.2 or 20%, not 'lots'"),
        (
            "tiers: {day: 9}\nreserved: {1: 60%, 2: 40%}",
            "2: reserved: the shares add up to 1: expected a sum below 1",
        ),
        ("schedule:\n  - {scale: 50%}", "2: schedule[0]: the rule has no condition"),
        ("schedule:\n  - {days: mon}", "2: schedule[0]: the rule changes no quota"),
        (
            "schedule:\n  - days: monday\n    between: 9-17\n    scale: 2",
            "3: schedule[0].between: expected a time span",
        ),
        ("schedule:\n  - days: someday\n    scale: 2", "2: schedule[0].days: expected weekdays such as mon-fri"),
        ("schedule:\n  - {days: mon, limits: {day: 5}}", "2: schedule[0]: unknown tier 'day': the budget has no tiers"),
        (
            "tiers: {day: 9}\nschedule:\n  - {days: mon, limits: {dai: 5}}",
            "3: schedule[0]: unknown tier 'dai': the budget has day; did you mean 'day'?",
        ),
        ("batch_ttl: soon", "1: batch_ttl: expected a duration such as 10m, or a number of seconds, not 'soon'"),
        ("webhook: example.com", "1: webhook: expected an http or https URL such as https://"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path, text, message):
    file = tmp_path / "budget.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        TaskBudget.from_config(file)
    assert str(error.value).startswith(f"{file}:{message}")


@cases(
    ("options", "message"),
    [
        ({}, "the budget is enabled but has no limits"),
        ({"per_day": 0}, "per_day: expected an integer of at least 1, not 0"),
        ({"per_day": True}, "per_day: expected an integer"),
        ({"per_day": 1, "types": {"a": {"year": 5}}}, "types: a: unknown period 'year'"),
        ({"per_day": 1, "costs": {"tokens": 5}}, "costs: tokens: expected quotas such as"),
        ({"per_day": 1, "reserved": {0: 0.5}}, "reserved: expected priorities that are integers of at least 1"),
        ({"per_day": 9, "reserved": {101: 0.5}}, "reserved: expected priorities up to 100"),
        ({"per_day": 1, "reserved": {1: 0.5}}, "reserved: the shares reserve all of 1 per day"),
        ({"types": {"a": {"day": 5}}, "costs": {"a": {"day": 5}}}, "types: 'a' is a task type and a unit of costs"),
        ({"per_day": 1, "store": ""}, "store: expected the path of a file"),
        (
            {"per_day": 1, "strategy": "rollin"},
            "strategy: expected rolling or fixed, not 'rollin'; did you mean 'rolling'?",
        ),
        ({"per_day": 1, "strategy": "x", "deadline": 0}, "2 settings of the budget are invalid"),
    ],
)
def test_wrong_settings_are_refused(options, message, path):
    with pytest.raises(ConfigError, match=message):
        TaskBudget(**{"store": path} | options)


@pytest.mark.parametrize("kind", [TaskBudget, AsyncTaskBudget])
@pytest.mark.parametrize("convert", [str, Path])
async def test_the_first_argument_may_be_the_path_of_the_storage(kind, convert, tmp_path):
    budget = kind(convert(tmp_path / "x.db"), per_day=10)
    assert str(budget.settings.store) == str(tmp_path / "x.db")
    result = budget.check_all_limits(1)
    assert (await result if kind is AsyncTaskBudget else result).allowed
    assert (tmp_path / "x.db").exists()
    closing = budget.close()
    if kind is AsyncTaskBudget:
        await closing


@pytest.mark.parametrize(
    ("argument", "options", "message"),
    [
        ("x.db", {"store": "y.db"}, "store: cannot be combined with a path as the first argument"),
        (7, {}, "settings: expected BudgetSettings, or the path or URL of the store, not 7"),
    ],
)
def test_other_first_arguments_are_refused(argument, options, message):
    with pytest.raises(ConfigError) as refused:
        TaskBudget(argument, per_day=10, **options)
    assert str(refused.value) == message
