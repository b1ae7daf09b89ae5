"""config.yaml: the format of the spec, our extensions, and a collection of invalid files."""

from pathlib import Path

import pytest
import yaml

from tests.cases import cases
from tests.inbound.harness import only_match
from tidegate import ConfigError
from tidegate._policy.config_value import parse
from tidegate.inbound._rules.config import load_rules

BAD_CONFIGS = sorted((Path(__file__).parent / "bad_configs").glob("*.yaml"))

SPEC = """\
rate_limiting:
  enabled: true
  categories:
    expensive:
      limit: 5
      window_minutes: 60
    moderately:
      limit: 10
      window_minutes: 60
    read:
      limit: 60
      window_minutes: 1
    very_expensive:
      limit: 3
      window_minutes: 60
  cleanup_interval_minutes: 5
  max_entries: 10000
"""


@pytest.fixture
def load(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return load_rules(path)

    return write


def matched(rules, path, method="GET"):
    match = only_match(rules, path, method)
    return match and (match.category.name, match.cost)


def table(rules):
    """Category by category: quota, period, algorithm of each limit."""
    return {
        category.name: [(limit.quota, limit.period, limit.algorithm) for limit in category.policy.limits]
        for category in rules.categories
    }


DEFAULTS = {
    "expensive": [(5, "1h", "sliding_log")],
    "moderately": [(10, "1h", "sliding_log")],
    "read": [(60, "1m", "sliding_log")],
    "very_expensive": [(3, "1h", "sliding_log")],
}


def test_the_file_of_the_spec_equals_the_defaults(load):
    rules = load(SPEC)
    assert table(rules) == DEFAULTS
    assert rules.enabled
    assert (rules.cleanup_interval, rules.max_entries) == (300, 10_000)
    assert rules == load_rules() == load("") == load("feeds: [a, b]\n") == load("rate_limiting:\n") == load_rules({})


def test_a_mapping_can_be_the_file_or_its_section():
    mapping = yaml.safe_load(SPEC)
    assert load_rules(mapping) == load_rules(mapping["rate_limiting"]) == load_rules()


@pytest.mark.parametrize("text", ["read: {limit: 7}", "read: {window_minutes: 1, limit: 7}"])
def test_omitted_settings_have_the_defaults_of_the_spec(load, text):
    rules = load(f"rate_limiting:\n  categories:\n    {text}\n")
    assert table(rules) == DEFAULTS | {"read": [(7, "1m", "sliding_log")]}
    assert only_match(rules, "/api/feeds").category.policy.limits[0].quota == 7
    rules = load("rate_limiting: {categories: {expensive: {window_minutes: 0.5}}}")
    assert only_match(rules, "/api/cluster").category.policy.limits[0].period == "30s"


def test_a_limit_has_the_name_of_its_category_so_a_changed_window_keeps_the_usage(load):
    for minutes in (1, 2):
        rules = load(f"rate_limiting: {{categories: {{read: {{window_minutes: {minutes}}}}}}}")
        (limit,) = only_match(rules, "/api/feeds").category.policy.limits
        assert limit.name == "read"


def test_disabled_rules_match_nothing(load):
    rules = load("rate_limiting: {enabled: no}")
    assert not rules.enabled
    assert only_match(rules, "/api/cluster") is None


EXTENDED = """\
feeds: []
rate_limiting:
  defaults: true
  algorithm: fixed_window
  on_store_error: allow
  exempt: [/health, {path: /static/*, methods: GET}]
  exempt_methods: [OPTIONS]
  exempt_clients: [10.0.0.0/8, "::1"]
  unmatched: browse
  categories:
    browse:
      limit: 100
    uploads:
      limits:
        - 10/1m
        - 100/1d token_bucket
        - 50/1h burst=60 name=hourly
        - 7500/month
        - {limit: 9, window: day, algorithm: calendar_window, timezone: Europe/Berlin, reset_hour: 9}
        - {limit: 1000, window_minutes: 5, unit: tokens, name: tpm}
      endpoints:
        - /upload/*
        - path: /import/{name}
          methods: [POST, PUT]
          cost: 5
        - {path: /tokens, cost: {tokens: 7}}
      methods: POST
      cost: 2
      mode: shadow
      on_store_error: deny
    mine:
      limit: 1
      algorithm: sliding_window
      endpoints: [/api/cluster]
"""


def test_all_extensions(load):
    rules = load(EXTENDED)
    by_name = {category.name: category for category in rules.categories}
    assert table(rules)["uploads"] == [
        (10, "1m", "fixed_window"),
        (100, "1d", "token_bucket"),
        (50, "1h", "token_bucket"),
        (7500, "month", "calendar_window"),
        (9, "day", "calendar_window"),
        (1000, "5m", "fixed_window"),
    ]
    assert [limit.name for limit in by_name["uploads"].policy.limits] == [
        "uploads-1m", "uploads-1d", "hourly", "uploads-month", "uploads-day", "tpm",
    ]  # fmt: skip
    assert (by_name["uploads"].policy.mode, by_name["uploads"].policy.on_store_error) == ("shadow", "deny")
    assert (by_name["browse"].policy.mode, by_name["browse"].policy.on_store_error) == ("enforce", "allow")
    assert table(rules)["browse"] == [(100, "1h", "fixed_window")]
    assert table(rules)["mine"] == [(1, "1h", "sliding_window")]

    def found(path, method="GET"):
        return matched(rules, path, method)

    assert found("/upload/a/b", "POST") == ("uploads", 2)
    assert found("/upload/a/b", "GET") == ("browse", 1)
    assert found("/import/x", "PUT") == ("uploads", 5)
    assert found("/tokens", "POST") == ("uploads", {"tokens": 7})
    assert found("/api/cluster") == ("mine", 1)  # the file takes precedence over the defaults
    assert found("/api/recluster") == ("expensive", 1)
    assert found("/anything") == ("browse", 1)
    assert found("/health") is None
    assert found("/static/x.css") is None
    assert found("/static/x.css", "POST") == ("browse", 1)
    assert found("/api/cluster", "OPTIONS") is None
    assert found("/api/admin/rate-limit-stats") is None
    assert "10.1.2.3" in rules.exempt_clients
    assert "11.1.2.3" not in rules.exempt_clients


def test_the_default_categories_can_be_disabled():
    rules = load_rules({"defaults": False, "categories": {"all": {"limit": 5, "endpoints": ["/*"]}}})
    assert table(rules) == {"all": [(5, "1h", "sliding_log")]}
    assert matched(rules, "/api/cluster") == ("all", 1)
    assert matched(load_rules({"defaults": False}), "/api/cluster") is None


def test_unmatched_requests_can_be_unlimited():
    rules = load_rules({"unmatched": None})
    assert only_match(rules, "/elsewhere") is None
    assert matched(rules, "/api/feeds") == ("read", 1)


def test_a_category_may_have_an_empty_list_of_endpoints():
    rules = load_rules({"categories": {"login": {"limit": 5, "endpoints": []}}})
    assert "login" in table(rules)


def test_the_cost_of_a_default_category_applies_to_its_endpoints():
    rules = load_rules({"categories": {"read": {"cost": 3}}})
    assert [matched(rules, path) for path in ("/api/feeds", "/elsewhere")] == [("read", 3), ("read", 3)]


def test_the_admin_endpoint_can_be_limited():
    path = "/api/admin/rate-limit-stats"
    rules = load_rules({"categories": {"admin": {"limit": 5, "endpoints": [path]}}})
    assert matched(rules, path) == ("admin", 1)


def test_mistakes_in_a_mapping_name_the_field():
    with pytest.raises(ConfigError) as error:
        load_rules({"rate_limiting": {"categories": {"read": {"limit": "many"}}}})
    assert str(error.value) == "rate_limiting.categories.read.limit: expected an integer of at least 1, not 'many'"
    assert (error.value.file, error.value.line) == (None, None)


@cases("path", BAD_CONFIGS)
def test_invalid_files_raise_the_message_in_their_first_line(path):
    """The first line of each file is a comment with the expected message."""
    expected = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    with pytest.raises(ConfigError) as error:
        load_rules(path)
    assert str(error.value) == f"{path}:{expected}"
    assert error.value.file == str(path)
    assert error.value.line is not None


def test_the_invalid_files_are_found():
    assert len(BAD_CONFIGS) > 50


def test_the_example_in_the_module_docstring_is_valid():
    from tidegate.inbound._rules import config  # noqa: PLC0415 - its docstring is the subject

    example = config.__doc__.partition("\n\n")[2].partition("\n\n")[0]
    rules = load_rules(yaml.safe_load("\n".join(line[4:] for line in example.splitlines())))
    assert parse(example).is_mapping
    assert matched(rules, "/import", "POST") == ("uploads", 5)
