"""Commands name the extra that is missing, before anything starts."""

import sys

import pytest

from tidegate.cli import main


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("uvicorn", ["start", "--policy", "a=1/1s"], "tidegate start needs uvicorn: pip install 'tidegate[service]'"),
        ("cronsim", ["start", "--data", "data"], "fetching sources needs cronsim: pip install 'tidegate[sources]'"),
        ("grpc", ["start", "--grpc", "127.0.0.1:1"], "the setting 'grpc' needs grpc: pip install 'tidegate[service]'"),
        ("aiohttp", ["egress", "x.yaml"], "tidegate egress needs aiohttp: pip install 'tidegate[egress]'"),
        (
            "aiohttp",
            ["start", "--egress", "127.0.0.1:1"],
            "the setting 'egress' needs aiohttp: pip install 'tidegate[egress]'",
        ),
    ],
)
def test_a_missing_extra_is_named(module, arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    assert main(arguments) == 2
    assert capsys.readouterr().err.strip() == f"tidegate: {message}"
    assert not list(tmp_path.iterdir())
