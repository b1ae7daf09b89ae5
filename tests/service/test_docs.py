"""The docs describe every setting, metric, problem, path and command; the example file is valid."""

from pathlib import Path

from tests.cases import cases
from tidegate._cli import COMMANDS
from tidegate.service._api.problems import KINDS
from tidegate.service._api.requests import TargetRequest
from tidegate.service._api.verbs import VERBS
from tidegate.service._config.settings import load_settings

ROOT = Path(__file__).parents[2]
SERVICE = (ROOT / "docs/howto/service.md").read_text(encoding="utf-8")
CLI = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
WIRE = (ROOT / "docs/reference/wire.md").read_text(encoding="utf-8")


@cases("name", KINDS)
def test_every_problem_is_described(name):
    rows = WIRE.partition("## Problems")[2].splitlines()
    row = next(line for line in rows if f"`{name}`" in line and line.startswith("|"))
    assert str(KINDS[name][0]) in row


OTHER_FIELDS = TargetRequest.__struct_fields__  # which the text describes, and not the table


@cases("verb", VERBS.values())
def test_every_verb_its_fields_and_its_token_are_described(verb):
    row = next(line for line in WIRE.splitlines() if line.startswith(f"| `{verb.path}`"))
    assert ("(GET)" in row) == (verb.method == "GET")
    assert ("needs the admin token" in row) == verb.admin
    assert row.split("|")[-2].strip() == ("yes" if verb.idempotent else "no")
    assert ("subject" in row) == ({"domain", "asks"} & set(verb.fields) != set())
    for field in verb.fields:
        assert f"`{field}`" in row or field in OTHER_FIELDS
        assert f"`{field}`" in WIRE


def test_every_path_in_the_table_exists():
    named = {line.split("`")[1] for line in WIRE.splitlines() if line.startswith("| `/v1/")}
    assert named == {verb.path for verb in VERBS.values()} | {"/v1/overview", "/v1/history", "/v1/key", "/v1/check"}


@cases("verb", [verb for verb in VERBS.values() if verb.name in COMMANDS])
def test_every_command_of_an_admin_verb_names_the_token(verb):
    section = CLI.partition(f"\n### tidegate {verb.name}\n")[2].partition("\n#")[0]
    assert section
    assert ("admin token" in section) == verb.admin


def test_the_example_file_is_valid():
    settings = load_settings(ROOT / "examples/service/service.yaml")
    assert set(settings.policies.entries) == {"api", "login", "search", "openai", "exports"}
    descriptor = [("path", "/login"), ("remote_address", "203.0.113.9")]
    assert settings.policies.match_descriptor("edge", descriptor)[0].policy.limits[0].quota == 5
