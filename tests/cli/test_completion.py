"""Completion scripts: bash completes with ours; the scripts of all shells contain every command and option."""

import json
import shutil
import subprocess

import pytest

from tests.servers.process import need
from tidegate._cli import COMMANDS, main
from tidegate._cli.completion import SHELLS, read_commands


@pytest.fixture
def script(capsys):
    def read(shell):
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return read


def complete(script, line, folder):
    """Return what bash offers at the end of a line."""
    program = f"""{script}
COMP_WORDS=({line})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_tidegate
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    bash = need(shutil.which("bash"), "bash", "apt-get install bash")
    result = subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert not result.stderr
    return result.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("tidegate do", ["doctor"]),
        ("tidegate --ver", ["--version"]),
        ("tidegate start --sto", ["--store", "--store-file", "--stop-within"]),
        ("tidegate completion ''", ["bash", "fish", "zsh"]),
        ("tidegate completion b", ["bash"]),
        ("tidegate start ser", ["service file.yaml"]),
        ("tidegate start --data ser", ["service file.yaml"]),
        ("tidegate start --workers ser", [""]),
        ("tidegate block --json --f", ["--for"]),
    ],
)
def test_bash_completes_commands_options_and_files(script, tmp_path, line, offered):
    (tmp_path / "service file.yaml").touch()
    assert complete(script("bash"), line, tmp_path) == offered


def test_bash_offers_every_command(script, tmp_path):
    assert set(complete(script("bash"), "tidegate ''", tmp_path)) == {*COMMANDS, "--help", "--version"}


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_contain_every_command_and_option(script, shell):
    text = script(shell)
    for command in read_commands():
        assert command.name in text
        for option in command.options:
            for flag in option.flags:
                assert (flag.lstrip("-") if shell == "fish" else flag) in text


def test_quotes_are_escaped(script):
    """Help texts for fish and zsh are in single quotes, and some contain one."""
    for shell in ("fish", "zsh"):
        for line in script(shell).splitlines():
            assert line.replace("'\\''", "").count("'") % 2 == 0, line


def test_the_script_is_written_as_json(capsys):
    assert main(["completion", "bash", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["script"].startswith("# bash completion")
