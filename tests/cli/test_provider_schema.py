"""The JSON schema of provider files refuses what their reader refuses, and accepts what it accepts."""

import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from tests.cases import cases
from tests.outbound.test_provider_file import BAD_PROVIDERS
from tidegate import ConfigError
from tidegate._cli.file_kinds import KINDS
from tidegate.outbound._providers.file import read_provider

ROOT = Path(__file__).parents[2]
SCHEMA = jsonschema_rs.validator_for(KINDS["provider"].schema())

# What a JSON schema cannot refuse: the bad files by the reason.
NOT_IN_A_SCHEMA = {
    "it cannot compare two values of a file": {
        "alias_of_alias", "endpoint_cost_in_unknown_unit", "endpoint_cost_too_much", "estimate_of_unknown_unit",
        "pool_by_price_in_two_currencies",
    },
    "it does not know which units the prices, the profile and the estimate count": {
        "currency_as_word", "currency_differs_from_prices", "currency_differs_in_mapping", "currency_in_cents",
        "currency_differs_with_decimals", "currency_uncommon", "currency_without_price", "money_in_capitals",
        "money_unit_misspelled", "money_without_price", "unit_misspelled",
    },
    "it cannot compare a part of the entries of a list or a mapping, or their order": {
        "endpoint_twice", "models_hidden", "models_limit_wrong", "pool_members_same_name", "spend_same_name",
        "spend_twice", "two_limits_one_name",
    },
    "the names are those of other files, which depend on the machine": {
        "price_without_profile", "profile_unknown", "timezone_unknown", "unbounded_misspelled",
    },
    "a regular expression cannot compute: the product of a number and a unit": {"money_too_much"},
    "it describes values, and a file that is not YAML has none": {"not_yaml"},
}  # fmt: skip
NOT_REFUSED = frozenset().union(*NOT_IN_A_SCHEMA.values())


class EditorLoader(yaml.SafeLoader):
    """Reads YAML as editors do, by the core schema of YAML 1.2: `off` and `2026-11-01` are strings."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - as in PyYAML


for tag, expression in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?",
}.items():
    EditorLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{expression})$"), None)


def as_an_editor_reads(text):
    return with_string_keys(yaml.load(text, EditorLoader))  # noqa: S506 - a SafeLoader


def with_string_keys(value):
    if isinstance(value, dict):
        return {str(key): with_string_keys(each) for key, each in value.items()}
    return [with_string_keys(each) for each in value] if isinstance(value, list) else value


@pytest.fixture
def reads(tmp_path):
    """Give a function that returns whether the reader accepts a text."""

    def check(text):
        path = tmp_path / "provider.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            read_provider(path)
        except ConfigError:
            return False
        return True

    return check


def fill(text):
    """Add the fields that a row of a table leaves out."""
    named = {line.partition(":")[0] for line in text.splitlines()}
    domain = "" if "domain" in named else "domain: example.com\n"
    limits = (
        ""
        if named & {"limit", "period", "limits", "concurrency", "models", "pool"}
        else "limits: [5/1m, 900/1m unit=tokens]\n"
    )
    return f"{domain}{limits}{text}\n"


PRICE = "profile: openai\nprice: {date: 2026-11-01, models: {m: {input: 1, output: 5}}}\n"

PRICED_MEMBER = """
limits: 5/1m
profile: openai
spend: 5/day unit=usd
pool: {pick: price, members: [{name: a, price: {date: 2026-11-01, default: {input: 1, output: 1_000.5}}}]}
"""


@cases("path", [path for path in BAD_PROVIDERS if path.stem not in NOT_REFUSED])
def test_the_schema_refuses_each_bad_file(path):
    assert not SCHEMA.is_valid(as_an_editor_reads(path.read_text(encoding="utf-8")))


@cases("path", [path for path in BAD_PROVIDERS if path.stem in NOT_REFUSED - {"not_yaml"}])
def test_only_what_a_schema_cannot_refuse_is_listed(path):
    SCHEMA.validate(as_an_editor_reads(path.read_text(encoding="utf-8")))


def test_the_listed_files_exist():
    assert {path.stem for path in BAD_PROVIDERS} >= NOT_REFUSED


@cases(
    "text",
    [
        # domain and name
        "domain: ''", "domain: 5", "domain: [a.test]", "domain: -a.test", "domain: a..test", "domain: 1.2.3",
        "domain: me@a.test", "domain: a.test/v1", "domain: a_b.test:80", "name: ''", "name: ~", "name: [a]",
        # one limit
        "limit: 5\nperiod: 60", "limit: 5\nperiod: 0s", "limit: 5\nperiod: 1M", "limit: 5\nperiod: months",
        "limit: 5\nperiod: 30m1h", "limit: 5\nperiod: ''", "limit: 5\nperiod: [1m]", "limit: -5\nperiod: 1m",
        "limit: 2.5\nperiod: 1m", "limit: '5'\nperiod: 1m", "limit: true\nperiod: 1m", "limit: 5/1m",
        "limit: 9007199254740992\nperiod: 1m", "limit: 5\nperiod: 1m\nalgorithm: sliding",
        "limit: 5\nperiod: 30s\nalgorithm: calendar_window", "limit: 5\nperiod: 30s\ntimezone: Europe/Berlin",
        "limit: 5\nperiod: 1d\nalgorithm: sliding_log\ntimezone: Europe/Berlin",
        "limit: 5\nperiod: 1d\nalgorithm: fixed_window\nreset_hour: 3", "limit: 5\nperiod: day\nreset_day: 2",
        "limit: 5\nperiod: week\nreset_day: 8", "limit: 5\nperiod: hour\nreset_hour: 3",
        "limit: 5\nperiod: month\nreset_day: 32", "limit: 5\nperiod: 1m\nburst: -1", "limit: 5\nperiod: 1m\nunit: ''",
        "limit: 5\nperiod: year\nalgorithm: token_bucket",
        # several limits
        "limits: []", "limits: 5", "limits: {}", "limits: [5]", "limits: [5/month sliding_log]", "limits: [0/1m]",
        "limits: [5/1m burst=x]", "limits: [5/1m speed=3]", "limits: ['5/1m, 6/1h']", "limits: [5/1m 6/1h]",
        "limits: [5/1m name=a name=b]", "limits: [5/1m fixed_window sliding_log]", "limits: [5/0s]", "limits: [2.5/1m]",
        "limits: [5/1d timezone=Europe/Berlin]", "limits: [5/30s calendar_window]", "limits: [5/1m margin=1s]",
        "limits: [5/month reset_day=40]", "limits: [5/1M]", "limits: [{limit: 5}]", "limits: [{period: 1m}]",
        "limits: [{limit: 5, period: 1m, name: ''}]", "limits: [{limit: 5, period: 1m, nam: a}]",
        "limits: [5/1m]\nburst: 5", "limits: [5/1m]\nperiod: 1m", "concurrency: 5\nperiod: 1m",
        "concurrency: 0", "concurrency: {limit: 5, lease: 10}", "concurrency: {limit: 5, lease: month}",
        "concurrency: {limit: 5, leas: 1m}", "concurrency: [5]",
        # models
        "models: {}", "models: {'*': []}", "models: {'*': 5}", "models: [5/1m]", "models: {'*': 5/1m}\nperiod: 1m",
        "output_reserve: p0", "output_reserve: 95", "aliases: [a]", "aliases: {a: ''}", "aliases: {a: [b]}",
        "strict: 1", "strict: maybe", "unbounded: [a]", "unbounded: {web_search: 5}", "unbounded: {a: {tokens: -1}}",
        "unbounded: {web_search: {usd_micros: 5}}", "unbounded: {web_search: {calls: 5}}", "profile: ''", "profile: []",
        # keys
        "api_key: ''", "api_key: [k]", "api_key_file: ''", "api_key: k\napi_key_file: keys/k", "key: bearer",
        "api_key: k\nkey: 5", "api_key: k\nkey: basic", "api_key: k\nkey: header X@Y", "api_key: k\nkey: {}",
        "api_key: k\nkey: {query: q, prefix: Bearer}", "api_key: k\nkey: {header: X, plain_http: maybe}",
        "api_key: k\nkey: {header: X, prefix: ''}", "api_key:\nkey: bearer",
        # other fields
        "endpoints: {path: /a}", "endpoints: [/a]", "endpoints: [{path: '/a?b'}]", "endpoints: [{path: /a, cost: -1}]",
        "endpoints: [{path: /a, cost: 1.5}]", "endpoints: [{path: /a, cost: {requests: x}}]",
        "endpoints: [{path: /a, methods: ['']}]", "endpoints: [{path: /a, method: GET}]", "per: user", "per: {host: 1}",
        "learn: true", "on_store_error: ignore", "retries: -1", "retries: two", "retries: {max: 11}",
        "retries: {within: 5}", "retries: {within: month}", "retries: {most: 1}", "estimate: 5",
        "estimate: {tokens: -1}", "estimate: {tokens: 1.5}",
        # money
        "price: 5\nprofile: openai\nspend: 5", "profile: openai\nprice: {date: 2026-11-01}",
        "profile: openai\nprice: {date: 2026-11-01, models: {}}",
        "profile: openai\nprice: {default: {kinds: {image: 1}}}",
        "profile: openai\nprice: {date: soon, default: {kinds: {image: 1}}}",
        "profile: openai\nprice: {date: 2026-13-01, default: {kinds: {image: 1}}}",
        "profile: openai\nprice: {date: 2026-11-01, currency: USD, default: {kinds: {image: 1}}}",
        "profile: openai\nprice: {date: 2026-11-01, default: {}}",
        "profile: openai\nprice: {date: 2026-11-01, default: {kinds: {image: -1}}}",
        "profile: openai\nprice: {date: 2026-11-01, default: {kinds: {image: '1'}}}",
        "profile: openai\nprice: {date: 2026-11-01, default: {kinds: {image: 99999999999}}}",
        "profile: openai\nprice: {date: 2026-11-01, default: {audio: 1}}",
        f"{PRICE}spend: 25/day", f"{PRICE}spend: 0/day unit=usd", f"{PRICE}spend: [{{limit: 5, period: day}}]",
        f"{PRICE}spend: {{limit: 0, period: day, unit: usd}}", f"{PRICE}spend: 2.5/day unit=usd_micros",
        f"{PRICE}spend: {{limit: 2.5, period: day, unit: usd_micros}}", f"{PRICE}spend: {{period: day, unit: usd}}",
        # pools
        "pool: []", "pool: {members: []}", "pool: {members: {a: 1}}", "limits: 5/1m\npool: {members: [a]}",
        "limits: 5/1m\npool: {members: [{name: a, weight: 1001}]}", "limits: 5/1m\npool: {members: [{name: ''}]}",
        "limits: 5/1m\npool: {members: [{name: a, order: -1}]}", "limits: 5/1m\npool: {members: [{name: a, drain: 1}]}",
        "limits: 5/1m\npool: {members: [{name: a, url: 'https://u@b.test'}]}",
        "limits: 5/1m\npool: {members: [{name: a, url: 'https://b.test?x=1'}]}",
        "limits: 5/1m\npool: {members: [{name: a, url: 'ftp://b.test'}]}",
        "limits: 5/1m\npool: {members: [{name: a, api_key: k, api_key_file: f}]}",
        "limits: 5/1m\npool: {members: [{name: a, period: 1m}]}",
        "limits: 5/1m\npool: {members: [{name: a, algorithm: fixed_window}]}",
        "limits: 5/1m\npool: {members: [{name: a, key: bearer}]}",
        "limits: 5/1m\nkey: bearer\npool: {members: [{name: a}]}",
        "limits: 5/1m\npool: {members: [{name: a}], sticky: ''}",
        "limits: 5/1m\npool: {members: [{name: a, learn: off}]}",
    ],
)  # fmt: skip
def test_the_reader_and_the_schema_refuse(text, reads):
    assert not reads(fill(text)), "the reader accepts it"
    assert not SCHEMA.is_valid(as_an_editor_reads(fill(text))), "the schema accepts it"


@cases(
    "text",
    [
        "name: 5", "name: 1.5", "name: true", "name: off", "domain: API.Example.com.", "domain: 127.0.0.1",
        "domain: '[::1]'", "domain: '::1'", "domain: bücher.example", "domain: localhost", "domain: a_b.test",
        "limit: 1_000\nperiod: 1m", "limit: 5\nperiod: 1h30m", "limit: 5\nperiod: 1.5h", "limit: 5\nperiod: Hour",
        "limit: 5\nperiod: month\nreset_day: 31\nreset_hour: 23", "limit: 5\nperiod: week\nreset_day: 7",
        "limit: 5\nperiod: 1D\ntimezone: Europe/Berlin", "limit: 5\nperiod: 1d\nalgorithm: sliding_log\ntimezone: UTC",
        "limit: 5\nperiod: 1m\nburst: 10", "limit: 5\nperiod: 1m\nburst: 0", "limit: 5\nperiod: 1m\nunit: 5",
        "limit: 5\nperiod: year\nalgorithm: calendar_window", "limit: 5\nperiod: 250ms\nconcurrency: 3",
        "limits: 5/1m", "limits: [5 per 30s, 100 requests/hour name=b]", "limits: [5/Month]", "limits: [5 every 1h30m]",
        "limits: ['5/1m sliding_log margin=300ms name=\"a b\"']",
        "limits: [5/1d calendar_window timezone=Europe/Berlin]",
        "limits: [5/year reset_hour=9, 7 calls in 2m burst=1_0]", "limits: [{limit: 5, period: month, name: 7}]",
        "limits: 5/1m\nalgorithm: fixed_window", "concurrency: {limit: 5, lease: 10m}", "concurrency: 1_000",
        "models: {gpt-*: [5/1m], '*': 9/1m}", "models: {5: 5/1m}\nlimits: 5/1m",
        "models: {gpt-*: 5/1m}\nconcurrency: 5",
        "output_reserve: maximum", "aliases: {a: 5}", "strict: yes", "strict: Off", "strict: true",
        "profile: openai\nunbounded: {web_search: {tokens: 50_000}}", "api_key: 123",
        "api_key:", "api_key: k\nkey: bearer",
        "api_key: k\nkey: header X-Key", "api_key: k\nkey: {query: 5, plain_http: no}",
        "endpoints: [{path: /a/*, methods: get, cost: {requests: 2}}, {path: /, cost: 0}]", "per: []", "per: host",
        "learn: off", "learn: lower", "retries: 0", "retries: {max: 3, within: 30s}", "estimate: {tokens: 800}",
        f"{PRICE}spend: 2.50/day unit=usd",
        f"{PRICE}spend: [25 usd/month, {{limit: 0.5, period: day, unit: usd, per: [tag]}}]",
        f"{PRICE}limits: [25/day unit=usd timezone=Europe/Berlin, '2_500/1h unit=usd_micros']", f"{PRICE}spend: []",
        f"{PRICE}unbounded: {{web_search: {{usd_micros: 10_000}}}}",
        "profile: openai\nprice: {date: 20261101, currency: eur, default: {kinds: {image: 0.04}, request: 0}}",
        "limits: 5/1m\npool: {members: [{name: 1, api_key: k, weight: 3, drain: no}], sticky: X-Conversation}",
        "pool: {members: [{name: a, limits: 5/1m}, {name: b, limit: 5, period: 1m, url: 'https://b.test/v1'}]}",
        "limits: 5/1m\nkey: bearer\npool: {members: [{name: a, api_key: k}]}",
        PRICED_MEMBER,
    ],
)  # fmt: skip
def test_the_reader_and_the_schema_accept(text, reads):
    assert reads(fill(text)), "the reader refuses it"
    SCHEMA.validate(as_an_editor_reads(fill(text)))


def provider_files_of_the_docs():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    blocks = [
        text for page in pages for text in re.findall(r"```yaml[^\n]*\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    return [text for text in blocks if re.search("^domain:", text, re.MULTILINE) and "descriptors:" not in text]


@cases("text", provider_files_of_the_docs())
def test_the_provider_files_of_the_docs_fit_the_schema(text):
    SCHEMA.validate(as_an_editor_reads(text))


@cases("path", sorted((ROOT / "src/tidegate/outbound/_profiles").glob("*.yaml")))
def test_the_shipped_profiles_fit_their_schema(path):
    schema = jsonschema_rs.validator_for(KINDS["profile"].schema())
    schema.validate(as_an_editor_reads(path.read_text(encoding="utf-8")))
