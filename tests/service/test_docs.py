"""The docs describe every setting, metric, problem, path and command; the example file is valid."""

from pathlib import Path

import pytest

from tidegate.cli import COMMANDS
from tidegate.service.config.settings import OPTIONS, SECTIONS, load_settings
from tidegate.service.http.json_protocol import VERB_FIELDS
from tidegate.service.http.metrics import METRICS
from tidegate.service.http.problems import KINDS

ROOT = Path(__file__).parents[2]
SERVICE = (ROOT / "docs/service.md").read_text(encoding="utf-8")
WIRE = (ROOT / "docs/wire.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*(option.name for option in OPTIONS), *SECTIONS])
def test_every_setting_is_described(name):
    assert f"`{name}`" in SERVICE


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_described(name):
    assert f"`{name}" in SERVICE


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "demo"])
def test_every_command_is_described(name):
    assert f"`tidegate {name}" in SERVICE


@pytest.mark.parametrize("name", KINDS)
def test_every_problem_is_described(name):
    row = next(line for line in WIRE.splitlines() if f"`{name}`" in line and line.startswith("|"))
    assert str(KINDS[name][0]) in row


@pytest.mark.parametrize("verb", VERB_FIELDS)
def test_every_verb_and_its_fields_are_described(verb):
    row = next(line for line in WIRE.splitlines() if line.startswith(f"| `/v1/{verb}`"))
    for field in VERB_FIELDS[verb]:
        assert f"`{field}`" in row or "subject" in row


def test_the_example_file_is_valid():
    settings = load_settings(ROOT / "examples/service/service.yaml")
    assert set(settings.policies.entries) == {"api", "login", "search", "openai", "exports"}
    descriptor = [("path", "/login"), ("remote_address", "203.0.113.9")]
    assert settings.policies.match_descriptor("edge", descriptor)[0].policy.limits[0].quota == 5
