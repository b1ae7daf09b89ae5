"""Every file this package reads has the same bounds: a few lines of YAML cannot expand to billions of nodes."""

import ast
from pathlib import Path

import pytest

import tidegate
from tidegate import ConfigError
from tidegate.budget._settings.file import read_config
from tidegate.inbound._rules.config import load_rules
from tidegate.outbound import Providers
from tidegate.outbound.sources import read_source
from tidegate.service._config.envoy_files import convert
from tidegate.service._config.settings import load_settings

READERS = {
    "inbound": load_rules,
    "service": load_settings,
    "provider": lambda path: Providers.load([path]),
    "source": read_source,
    "budget": read_config,
    "envoy": lambda path: convert([path]),
}


def doubling(first, line, lines=40):
    """Return YAML in which each line has twice the nodes of the line before."""
    return "\n".join([first, *(line.format(i=i, before=i - 1) for i in range(1, lines))]) + "\n"


BOMB = doubling("x0: &x0 [a, a]", "x{i}: &x{i} [*x{before}, *x{before}]")
DESCRIPTORS = """\
domain: d
descriptors:
- &d0 {key: a, rate_limit: {unit: second, requests_per_unit: 1}}
""" + "".join(
    f"- &d{i} {{key: k{i}, descriptors: [*d{i - 1}, {{key: z{i}, descriptors: [*d{i - 1}]}}]}}\n" for i in range(1, 40)
)


@pytest.mark.parametrize("reader", READERS)
def test_aliases_are_bounded_in_every_file(tmp_path, reader):
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMB)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        READERS[reader](path)
    assert str(error.value) == f"{path}:12: aliases expand to more than 10000 nodes: use fewer aliases"


def test_descriptors_that_refer_to_descriptors_are_bounded(tmp_path):
    path = tmp_path / "envoy.yaml"
    path.write_text(DESCRIPTORS)
    with pytest.raises(ConfigError, match="aliases expand to more than 10000 nodes"):
        convert([path])


def test_no_other_module_reads_yaml():
    """A loader elsewhere would have no bounds."""
    reading = {"compose", "load", "safe_load", "load_all", "safe_load_all", "parse", "scan", "BaseLoader", "Loader"}
    for path in Path(tidegate.__file__).parent.rglob("*.py"):
        if path.name == "loader.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
                assert node.attr not in reading, f"{path}:{node.lineno}"
