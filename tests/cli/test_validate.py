"""`tidegate validate`: recognises every kind of file, says which, and prints the schema of each."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from tests.cases import cases
from tidegate import ConfigError
from tidegate._cli import main
from tidegate._cli.file_kinds import KINDS
from tidegate._cli.file_schemas import SOURCE_FIELDS
from tidegate.inbound._rules.config import load_rules
from tidegate.outbound.sources import _source as source_files

ROOT = Path(__file__).parents[2]
FILES = {
    "service": "policies: {api: 100/1m}\nlisten: 127.0.0.1:8080\n",
    "provider": "domain: financialmodelingprep.com\nlimit: 300\nperiod: 1m\napi_key: hunter2\n",
    "profile": "output: {bounds: [limit]}\nusage: {at: [meta], output: out}\ncounts: {tokens: [output]}\n",
    "prices": "date: '2026-11-01'\nmodels: {gpt-4o*: {input: 2.50, output: 10}, painter: {kinds: {image: 0.04}}}\n",
    "source": "name: fmp-aapl-prices\nurl: https://financialmodelingprep.com/api/v3/historical-price-full/AAPL\n",
    "inbound": (
        "rate_limiting:\n  enabled: true\n  categories:\n    expensive: {limit: 5, window_minutes: 60}\n"
        "  cleanup_interval_minutes: 5\n  max_entries: 10000\nsite: {title: mine}\n"
    ),
    "budget": "tiers: {minute: 20, hour: 100, day: 500, week: 2000, month: 7500}\nconcurrency: 5\n",
}
SAYS = {
    "service": "policy api: 100/1m",
    "provider": "300/1m sliding_log) for financialmodelingprep.com",
    "profile": "profile file counts tokens: output",
    "prices": "gpt-4o*: input 2.50 usd, output 10.00 usd\n  painter: image 0.04 usd",
    "source": "source fmp-aapl-prices: fetched at the default interval",
    "inbound": "category expensive: 5/1h sliding_log",
    "budget": "budget: 20 per minute, 100 per hour, 500 per day, 2000 per week, 7500 per month",
}


@pytest.fixture
def write(tmp_path):
    def build(text, name="file.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return build


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_of_file_is_recognised(kind, write, capsys):
    path = write(FILES[kind])
    assert main(["validate", path]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"{path}: valid ({KINDS[kind].title})\n")
    assert SAYS[kind] in output
    assert "hunter2" not in output
    assert main(["validate", path, "--kind", kind, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == kind


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("doman: a.example\nlimit: 300\nperiod: 1m\n", "provider", "did you mean 'domain'?"),
        ("nmae: a\nurl: https://a.example\n", "source", "did you mean 'name'?"),
        ("tires: {minute: 1}\nstrategy: rolling\n", "budget", "did you mean 'tiers'?"),
        ("categories: {read: {limit: none}}\n", "inbound", "expected an integer"),
        ("policys: {}\n", "service", "did you mean 'policies'?"),
        ("rate_limitting: {categories: {}}\n", "inbound", "did you mean 'rate_limiting'?"),
        ("date: 2026-11-01\nmodel: {m: {input: 1, output: 2}}\n", "prices", "did you mean 'models'?"),
        ("default: {input: 1, output: 2}\nmodel: {m: {request: 1}}\n", "prices", "did you mean 'models'?"),
        ("- a\n", "service", "expected a mapping"),
    ],
)
def test_an_error_names_the_detected_kind(text, kind, message, write, capsys):
    path = write(text)
    assert main(["validate", path]) == 2
    wrong = capsys.readouterr().err
    error, note = wrong.splitlines()
    assert message in error
    assert note.startswith(f"tidegate: {path} was read as {KINDS[kind].title}")


def test_a_service_file_without_policies_says_so(write, capsys):
    assert main(["validate", write("")]) == 0
    assert capsys.readouterr().out.endswith(": valid (a service file)\n  no policies\n")


def test_provider_files_can_name_profiles_that_the_user_adds(write, tmp_path, capsys):
    provider = write("domain: llm.test\nlimits: [100/1m unit=tokens]\nprofile: acme\n", "llm.yaml")
    assert main(["validate", provider]) == 2
    wrong = capsys.readouterr().err
    assert "llm.yaml:3: profile: there is no profile 'acme': expected anthropic, azure," in wrong
    assert "--profile" in wrong
    (tmp_path / "mine").mkdir()
    own = write(FILES["profile"], "mine/acme.yaml")
    assert main(["validate", provider, "--profile", str(tmp_path / "mine")]) == 0
    assert main(["validate", "--profile", str(tmp_path / "mine"), own, provider]) == 0
    capsys.readouterr()
    write("domain: llm.test\nlimits: [100/1m unit=tokens]\nprofile: acmee\n", "llm.yaml")
    assert main(["validate", provider, own]) == 2
    assert "there is no profile 'acmee': did you mean 'acme'?" in capsys.readouterr().err
    assert main(["validate", provider, "--profile", str(tmp_path / "none")]) == 2
    assert "there is no such file or directory" in capsys.readouterr().err


def test_the_kind_can_be_given(write, capsys):
    path = write("name: both\nconcurrency: 5\n")
    assert main(["validate", path]) == 0
    assert KINDS["budget"].title in capsys.readouterr().out
    assert main(["validate", path, "--kind", "provider"]) == 2
    wrong = capsys.readouterr().err
    assert "needs a domain" in wrong
    assert "taken for" not in wrong
    with pytest.raises(SystemExit):
        main(["validate", path, "--kind", "car"])


def test_the_schema_of_a_provider_has_money_and_pools():
    text = """
    {domain: a.test, profile: openai, price: {date: "2026-11-01", models: {m: {input: 0.15, output: 1}}},
     limits: [500/1m, {limit: 2.50, period: day, unit: usd}], spend: {limit: 0.5, period: day, unit: usd, per: team},
     pool: {pick: price, sticky: x-conversation, members: [{name: a, api_key: x, weight: 3}, {name: b, drain: true}]}}
    """
    fits = jsonschema_rs.validator_for(KINDS["provider"].schema())
    fits.validate(yaml.safe_load(text))
    assert not fits.is_valid(yaml.safe_load(text.replace("pick:", "pik:")))
    assert not fits.is_valid(yaml.safe_load(text.replace("input:", "inptu:")))


@pytest.mark.parametrize("kind", FILES)
def test_each_kind_has_a_schema_that_its_file_fits(kind, capsys):
    assert main(["validate", "--schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["title"] == f"tidegate {kind}"
    fits = jsonschema_rs.validator_for(schema)
    fits.validate(yaml.safe_load(FILES[kind]))
    if kind != "inbound":  # a file of the application: other sections are its own
        assert not fits.is_valid({"nonsense": 1, **yaml.safe_load(FILES[kind])})
        assert set(schema["properties"]) == KINDS[kind].fields
    else:
        assert not fits.is_valid({"rate_limiting": {"nonsense": 1}})


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *(("provider", path) for path in (ROOT / "examples").rglob("providers/*.yaml")),
        *(("source", path) for path in (ROOT / "examples").rglob("sources/*.yaml")),
        ("budget", ROOT / "examples/demo/budget.yaml"),
        ("service", ROOT / "examples/service/service.yaml"),
        ("egress", ROOT / "examples/egress/egress.yaml"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_examples_are_recognised_and_fit_their_schemas(kind, path, capsys, monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "RESEARCH_TOKEN", "NIGHTLY_TOKEN"):
        monkeypatch.setenv(name, f"{name}-of-an-example")
    assert main(["validate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == kind
    content = json.loads(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")), default=str))  # dates as text
    jsonschema_rs.validator_for(KINDS[kind].schema()).validate(content)


def test_the_fields_of_a_source_are_those_of_its_reader():
    assert source_files.SOURCE_FIELDS == SOURCE_FIELDS


def test_other_files_are_checked_without_httpx(write):
    code = "import sys; sys.modules['httpx'] = None; from tidegate._cli import main; sys.exit(main(sys.argv[1:]))"
    for kind in ("service", "provider", "inbound", "budget"):
        command = [sys.executable, "-c", code, "validate", write(FILES[kind], f"{kind}.yaml")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0, kind


@cases(
    ("section", "is_valid"),
    [
        ({"categories": {"a": {"limit": 0, "endpoints": ["/"]}}}, True),
        ({"categories": {"a": {"limit": -1, "endpoints": ["/"]}}}, False),
        ({"categories": {"a": {"limit": 1, "endpoints": ["/"], "plans": {"pro": "5/1m", "x": ["5/1m"]}}}}, True),
        ({"categories": {"a": {"limit": 1, "endpoints": ["/"], "plans": {"pro": {"limit": 5}}}}}, True),
        ({"categories": {"a": {"limit": 1, "endpoints": ["/"], "plans": {"pro": {"limt": 5}}}}}, False),
        ({"block_after": "20/1m", "block_for": "10m", "ipv4_prefix": 24, "ipv6_prefix": 56}, True),
        ({"ipv4_prefix": 33}, False),
        ({"block_after": 20, "block_for": "10m"}, False),
        ({"block_after": {"10/1m": "5m", "100/1h": "1d"}}, True),
        ({"block_after": {"10/1m": 5}}, False),
    ],
)
def test_the_schema_and_the_reader_agree_on_inbound_settings(section, is_valid):
    fits = jsonschema_rs.validator_for(KINDS["inbound"].schema())
    assert fits.is_valid({"rate_limiting": section}) is is_valid
    if is_valid:
        load_rules(section)
    else:
        with pytest.raises(ConfigError):
            load_rules(section)
