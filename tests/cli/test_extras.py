"""Commands name the extra that is missing, before anything starts."""

import subprocess
import sys

import pytest

from tidegate._cli import main


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (
            "httptools",
            ["start", "--policy", "a=1/1s"],
            "tidegate start needs httptools: pip install 'tidegate[service]'",
        ),
        ("cronsim", ["start", "--data", "data"], "fetching sources needs cronsim: pip install 'tidegate[sources]'"),
        ("grpc", ["start", "--grpc", "127.0.0.1:1"], "the setting 'grpc' needs grpc: pip install 'tidegate[envoy]'"),
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


@pytest.mark.parametrize("arguments", [["budget", "--store", "none.db"], ["validate", "none.yaml"]])
def test_commands_that_need_no_extra(arguments, tmp_path):
    """In a process of its own: in this one, the packages are already imported."""
    missing = (
        "import sys; sys.modules |= dict.fromkeys(['msgspec', 'httptools', 'httpx', 'aiohttp', 'grpc', 'cronsim'])"
    )
    program = f"{missing}; from tidegate._cli import main; main({arguments})"
    environment = {"RATE_LIMIT_PER_DAY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert "pip install" not in done.stderr
    assert arguments[-1] in done.stderr


WITHOUT = "import sys; sys.modules.update(dict.fromkeys(({!r},)));from tidegate._cli import main; sys.exit(main({!r}))"


def test_checking_a_source_names_its_extra(tmp_path):
    path = tmp_path / "source.yaml"
    path.write_text("name: a\nurl: http://127.0.0.1/\n", encoding="utf-8")
    program = WITHOUT.format("httpx", ["validate", str(path)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = "tidegate: checking a source file needs httpx: pip install 'tidegate[sources]'\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_an_argument_with_the_name_of_a_command_is_not_that_command():
    program = WITHOUT.format("httpx", ["start", "--source-dir", "sources"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tidegate: fetching sources needs httpx: pip install 'tidegate[sources]'\n"


@pytest.mark.parametrize("command", [["add", "x.yaml"], ["sources"]])
def test_a_command_that_cannot_be_imported_names_its_extra(command):
    program = WITHOUT.format("httpx", command)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = "tidegate: sources need httpx: pip install 'tidegate[sources]'\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_completion_needs_no_extra():
    program = WITHOUT.format("msgspec", ["completion", "bash"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "acquire" in done.stdout
    assert "--request" in done.stdout  # of `explain`, which needs no extra
